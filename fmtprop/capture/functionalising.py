"""Exported programs without calls that change tensors in place. Must not know graphs."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from fmtprop.archive.source_text import check_keywords, check_parameter
from fmtprop.capture.call_by_call import made_functional
from fmtprop.capture.export_failures import first_lines
from fmtprop.capture.fx_import import is_in_place
from fmtprop.capture.in_place import shows_a_source, with_aliases, with_copies, with_windows
from fmtprop.capture.pytorch import names_of_operators
from fmtprop.capture.run_time_checks import drop_checks, index_by_tensors
from fmtprop.errors import IN_PLACE_REMEDY, ImportModelError
from fmtprop.ops.pytorch import FakeTensor, OpOverload

#: where operators on tensors of the CPU are dispatched to, those without data included
_CPU_KEYS = tuple(getattr(torch.DispatchKey, name) for name in ("CPU", "Meta", "AutogradCPU", "AutogradMeta"))

#: the kernel of an operator that is made of others
_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


def functionalised(program: ExportedProgram) -> ExportedProgram:
    """Return the program without in-place ops."""
    _check_names(program)
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if isinstance(tensor, FakeTensor):  # torch would run operators on it, and crash
            raise ImportModelError(
                f"constant {name!r} has no data: the model was exported under FakeTensorMode, or reads tensor.data in "
                "its forward pass, which torch.export cannot trace: use tensor.detach()"
            )
    # Example inputs would be checked by source code that torch writes from their keys and strings, without escapes.
    program = copy.copy(program)
    program.example_inputs = None
    program._graph_module = with_windows(with_aliases(program.graph_module))
    functional = made_functional(program) or _retraced(program)
    index_by_tensors(functional.graph)
    drop_checks(functional.graph)
    return functional


def _retraced(program: ExportedProgram) -> ExportedProgram:
    """Let PyTorch make a program functional."""
    # An empty table decomposes only ops that alias or mutate: in-place ops become functional, dropout in eval mode
    # becomes a copy; linear, convolution, normalizations and attention stay whole.
    with warnings.catch_warnings():
        # torch copying its own classes: nothing that a user could change
        warnings.filterwarnings("ignore", r".*treespec, LeafSpec.*", FutureWarning)
        try:
            with _operators_of_the_cpu():
                return _decomposed(program)
        except Exception as error:  # torch traces the program again, and may raise anything
            raise ImportModelError(
                "run_decompositions cannot make the exported program functional: "
                f"{first_lines(error)}\nMake new tensors instead of changing {_changing(program)} in place, and use a "
                f"program that still has its weights. If it has a cache, {IN_PLACE_REMEDY}"
            ) from error


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    parts = _composites(program)
    try:
        functional: ExportedProgram = program.run_decompositions(parts)
    except (RuntimeError, ValueError) as error:
        if (changed := with_copies(program.graph_module, error)) is None:
            raise
        program = copy.copy(program)
        program._graph_module = changed
        functional = program.run_decompositions(parts)
    return functional


def _composites(program: ExportedProgram) -> dict[OpOverload, Callable[..., Any]]:
    """Return what composite operators are made of that cannot stay whole.

    Other libraries' (torch.compile takes them apart, too), and those whose result shows their source although PyTorch
    does not declare it, such as an ``einsum`` that is a transposition: a change of one is a change of both.
    """
    nodes = [node for node in program.graph.nodes if isinstance(node.target, OpOverload)]
    apart = {node.target for node in nodes if node.target.namespace not in ("aten", "prims", "fmtprop")}
    if any(map(is_in_place, nodes)):
        apart |= {node.target for node in nodes if shows_a_source(node)}
    return {one: partial(one._op_dk, _COMPOSITE) for one in apart if one._can_decompose()}


def _changing(program: ExportedProgram) -> str:
    """Return the calls that change tensors in place, for a message."""
    names = {str(node.target) for node in program.graph.nodes if is_in_place(node)}
    return f"tensors ({', '.join(sorted(names))})" if names else "views"


@contextmanager
def _operators_of_the_cpu() -> Iterator[None]:
    """Let PyTorch prepare its operators for tensors of the CPU alone: for all devices, it takes 0.1 s a program.

    To make a program functional, it gives each of 500 composite operators a function for each of 21 kinds of devices,
    and asks C++ for the operators of all namespaces once for each of them.
    """
    from torch.export import exported_program

    operators = names_of_operators()
    keys = {name: keys for name, keys in vars(exported_program).items() if name.endswith("_KEYS_TO_OVERRIDE")}
    look_ups = {name: look_up for name, look_up in operators.items() if name == "_materialize_cpp_cia_ops"}
    vars(exported_program).update({name: [key for key in keys[name] if key in _CPU_KEYS] for name in keys})
    operators.update({name: functools.cache(look_ups[name]) for name in look_ups})
    try:
        yield
    finally:
        vars(exported_program).update(keys)
        operators.update(look_ups)


def _check_names(program: ExportedProgram) -> None:
    """Refuse names that torch cannot write when it makes the program functional."""
    for spec in program.graph_signature.input_specs:
        check_parameter(spec.target or "")
    in_spec = program.call_spec.in_spec
    if in_spec is not None and in_spec.type is tuple and in_spec.num_children == 2:
        check_keywords(in_spec.children()[1].context or ())
