"""An exported program with symbolic sizes as text, without its tensors; and back.

The text is PyTorch's own JSON of a program, in which arguments and results are flat: a graph's structure has their
nesting, and knows classes by name alone. Owns both directions; must not know files or plans.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from fmtprop.archive.program_safety import check_program, check_relation
from fmtprop.capture.exporting import exporting
from fmtprop.capture.pytorch import deserialized, detect_fake_mode, functions_of_sizes, guard_of, serialized
from fmtprop.capture.specialise import Sizes
from fmtprop.capture.torch_export import Exported
from fmtprop.capture.torch_log import held_back
from fmtprop.errors import FmtpropError, ImportModelError
from fmtprop.ops.pytorch import tree_structure


def text_of(exported: Exported) -> tuple[bytes, list[str]]:
    """Return the text of a program, and the relations of sizes that decided its branches."""
    if exported.guards is not None:
        raise ImportModelError("it was read from a file, and has branches that sizes decide")
    bare = copy.copy(exported.program)
    for name in ("_state_dict", "_constants"):  # the text has no numbers
        setattr(bare, name, {key: _without_numbers(tensor) for key, tensor in getattr(bare, name).items()})
    (whole, *_), signature = bare.module_call_graph, bare.graph_signature
    if whole.signature is None:
        raise ImportModelError("it does not tell its arguments")
    leaves = (0,) * len(signature.user_inputs), (0,) * len(signature.user_outputs)
    specs = tree_structure((leaves[0], {})), tree_structure(leaves[1])
    flat = replace(whole.signature, in_spec=specs[0], out_spec=specs[1], forward_arg_names=None)
    bare._module_call_graph = [replace(whole, signature=flat)]
    bare._guards_code = []  # they name nested arguments
    sizes = Sizes(exported.program)
    # the programs for smaller sizes are not in the text
    larger = [one.node.expr > 1 for one in sizes.symbols] if exported.of_small is not None else []
    relations = [_written(one) for one in (*sizes.relations, *larger) if one != True]  # noqa: E712 - sympy's own
    try:
        with exporting():
            text = serialized(bare)
    except Exception as error:  # PyTorch's serializer raises anything
        raise ImportModelError(f"PyTorch cannot write its program: {str(error).splitlines()[0]}") from error
    check_program(text, "its program")
    for relation in relations:
        check_relation(relation, "its program")
    return text, relations


def program_of(
    text: bytes,
    relations: Sequence[str],
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
) -> ExportedProgram:
    """Return the program of a text, after a check that it executes no code.

    `state`, `constants`: the tensors of a program's ``state_dict`` and ``constants``.
    """
    check_program(text, "the program")
    for relation in relations:
        check_relation(relation, "the program")
    try:
        with exporting(), held_back():
            program = deserialized(text, dict(state), dict(constants))
            _relate(program, relations)
    except FmtpropError:
        raise
    except Exception as error:  # PyTorch builds objects from the text, and may raise anything
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportModelError(f"the program cannot be read by torch {torch.__version__}: {line}") from error
    return program


def _without_numbers(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        raise ImportModelError(f"it has a {type(tensor).__name__} among its constants")
    empty = torch.empty(0, dtype=tensor.dtype)
    return torch.nn.Parameter(empty, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else empty


def _written(relation: Any) -> str:
    import sympy  # type: ignore[import-untyped]

    return str(sympy.srepr(relation))


def _relate(program: ExportedProgram, relations: Sequence[str]) -> None:
    """Give a program the relations that decided its branches: PyTorch's own text lacks them."""
    import sympy

    recorded = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(recorded)
    if not relations or mode is None or mode.shape_env is None:
        return
    names = functions_of_sizes()
    sizes: list[Any] = [size for _, value in Sizes(program).inputs for size in value.shape if not isinstance(size, int)]
    symbols = {symbol.name: symbol for size in sizes for symbol in size.node.expr.free_symbols}
    for text in relations:
        given = sympy.sympify(text, locals=names)
        own = given.subs({one: symbols[one.name] for one in given.free_symbols if one.name in symbols})
        mode.shape_env.guards.append(guard_of(own))
