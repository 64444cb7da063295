"""Import of a PyTorch module as a graph, through ``torch.export``.

This module owns the export to an ``ExportedProgram``, and the import of its signature as the graph's inputs, constants
and outputs; :mod:`fmtprop.frontends.fx_import` imports its calls. Must not know formats, targets or plans.
"""

from __future__ import annotations

import copy
import inspect
import traceback
import warnings
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from fmtprop.errors import ImportModelError
from fmtprop.frontends.fx_import import import_calls
from fmtprop.frontends.source_text import check_keywords, check_parameter
from fmtprop.frontends.specialise import Sizes, specialised
from fmtprop.frontends.torch_call import check_real, parts_of, tensor_type
from fmtprop.frontends.torch_log import held_back
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.structure import Slot, describe, is_container
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops.host_call import Parts
from fmtprop.system.locks import ProcessLock

__all__ = ["Exported", "from_torch", "from_torch_symbolic"]

_EXPORTING = ProcessLock()


def from_torch(
    module: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Graph:
    """Import a PyTorch model as an op graph.

    The model is exported for inference with the shapes of the example inputs; its composite ops (convolution, linear,
    normalization, attention) stay whole. A call without an op of fmtprop becomes an ``aten`` node, which runs on the
    reference target, so every exportable model with static shapes can be imported.

    Parameters
    ----------
    module : torch.nn.Module or torch.export.ExportedProgram
        The model, on the CPU. A module is exported in eval mode; its own mode does not change.
    example_inputs : tensor or tuple, optional
        Positional arguments of ``forward``: they give shapes and data types, and arguments that are not tensors
        are fixed in the graph. Not needed for an exported program.
    kwargs : mapping of str to object, optional
        Keyword arguments of ``forward``.
    name : str, optional
        Name of the graph; the class of the module by default.

    Returns
    -------
    Graph
        Inputs are named as ``forward`` names its arguments, constants by their qualified name in the module, nodes
        carry the module they come from as ``origin``. Constants share memory with the module where it is contiguous.
        ``graph.structure`` tells how results are nested: :func:`fmtprop.ir.structure.restructure`.

    Raises
    ------
    ImportModelError
        The model cannot be exported, has dynamic shapes, control flow that depends on data, state that it changes,
        random numbers, or tensors that are not plain CPU tensors.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> graph = from_torch(net, torch.zeros(2, 8), name="net")
    >>> [node.name for node in graph.input_nodes], sorted(graph.constants)
    (['input'], ['0.bias', '0.weight'])
    """
    with _exporting():
        model = _exported(module, example_inputs, kwargs, None, name)
        if isinstance(module, ExportedProgram) and example_inputs is not None:
            _check_examples(model.program, example_inputs, dict(kwargs or {}))
        return model.imported(model.program)


def from_torch_symbolic(
    module: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    name: str | None = None,
) -> Exported:
    """Export a PyTorch model once, for sizes that may change.

    Parameters
    ----------
    module, example_inputs, kwargs, name
        As :func:`from_torch`.
    dynamic_shapes : dict, tuple or list, optional
        Which axes may change, as ``torch.export.export`` takes it. An exported program has it already.

    Returns
    -------
    Exported
        Gives the graph for each set of sizes.

    Raises
    ------
    ImportModelError
        As :func:`from_torch`; or a size that is marked cannot change.
    """
    with _exporting():
        return _exported(module, example_inputs, kwargs, dynamic_shapes, name)


@contextmanager
def _exporting() -> Iterator[None]:
    # The exporter patches torch while it works: two concurrent exports would break each other and all later ones.
    with _EXPORTING.current, held_back():
        yield


@dataclass(frozen=True)
class Exported:
    """A functional exported program, and the way from it to graphs.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        Functional.
    name : str
        Of the graphs.
    signature : inspect.Signature, optional
        Of the module's ``forward``, where there is a module.
    examples : sequence of torch.Tensor
        The tensors that it was exported with, without data.
    """

    program: ExportedProgram
    name: str
    signature: inspect.Signature | None
    examples: Sequence[torch.Tensor]

    def graph(self, given: Sequence[torch.Tensor]) -> Graph:
        """Import the program for the sizes of some inputs.

        Parameters
        ----------
        given : sequence of torch.Tensor
            One for each tensor that the model takes.

        Returns
        -------
        Graph
            Constants share memory with the program's, so with those of other sizes.

        Raises
        ------
        InputError
            The model was not exported for these sizes.
        ImportModelError
            As :func:`from_torch`.
        """
        with _exporting():
            return self.imported(specialised(self.program, given))

    def imported(self, program: ExportedProgram) -> Graph:
        """Import the program, or what was made of it."""
        graph = _Importer(program, self.name, self.signature).graph
        if not graph.output_nodes:
            raise ImportModelError(
                f"{graph.name} returns no tensor (but None, a number or nothing), so there is nothing to compile; "
                "return what it computes"
            )
        verify(graph, Stage.IMPORTED)
        return graph


def _exported(
    module: nn.Module | ExportedProgram,
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    name: str | None,
) -> Exported:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ImportModelError(f"kwargs must be a dict of example keyword inputs by name, got {kwargs!r}")
    if isinstance(module, ExportedProgram):
        program = module
        _check_tensors({**program.state_dict, **program.constants})
    elif isinstance(module, torch.jit.ScriptModule):
        raise ImportModelError(
            f"{module.original_name} is a TorchScript module, which torch.export does not take; import the nn.Module "
            "that it was made from"
        )
    elif isinstance(module, nn.Module):
        program = _export(module, example_inputs, dict(kwargs or {}), dynamic_shapes)
    else:
        raise ImportModelError(
            f"from_torch takes a torch.nn.Module or a torch.export.ExportedProgram, got {type(module).__name__}; "
            "wrap a function in a module"
        )
    _check_names(program)
    program = _functionalised(program)
    signature = None if isinstance(module, ExportedProgram) else inspect.signature(module.forward)
    without = example_inputs is None and not kwargs
    leaves = Sizes(program).hints if without else pytree.tree_leaves((example_inputs, kwargs))
    examples = [leaf.to("meta") for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Exported(program, name or _name_of(program, module), signature, examples)


# ---------------------------------------------------------------- export


def _export(module: nn.Module, example_inputs: Any, kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    args = _positional(module, example_inputs, kwargs)
    _check_tensors(dict([*module.named_parameters(), *module.named_buffers()]))
    _check_tensors(_named_leaves(args, kwargs))
    check_keywords(kwargs)
    # torch's error about a key that a graph cannot hold is not helpful
    describe([], [], pytree.tree_map(lambda leaf: None, (args, kwargs)))
    args, kwargs = _separated(args), _separated(kwargs)
    with _eval_mode(module), torch.no_grad(), held_back():
        try:
            return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        except Exception as first:  # the exporter runs the user's code: it raises anything
            try:
                # bytecode analysis can sometimes export a model that tracing by execution cannot
                return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=True)
            except Exception:  # likewise
                raise ImportModelError(_export_failure(module, first)) from first


def _positional(module: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if example_inputs is None:
        args: tuple[Any, ...] = ()
    elif isinstance(example_inputs, tuple | list):
        args = tuple(example_inputs)
    else:
        args = (example_inputs,)
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ImportModelError(
            f"{type(module).__name__}.forward{signature} cannot be called with the example inputs: {error}. "
            "example_inputs is a tensor or a tuple of the positional arguments, kwargs the keyword arguments"
        ) from error
    return args


def _named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        leaves = pytree.tree_leaves_with_path((tuple(args), dict(kwargs)))
    except ValueError as error:  # a class that is registered without names of its members
        raise ImportModelError(f"example inputs: {error} Or use a tuple, a list, a dict or a dataclass") from error
    return {f"example input {pytree.keystr(path[1:])}": leaf for path, leaf in leaves}


def _separated(tree: Any) -> Any:
    # The exporter makes one input of two arguments that are the same tensor object, and so would the graph.
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    # Not module.eval(): some models do more in it (such as fusing branches), others refuse it.
    modes = [(child, child.training) for child in module.modules()]
    for child, _ in modes:
        child.training = False
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def _export_failure(module: nn.Module, error: Exception) -> str:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"torch.export cannot export {type(module).__name__}: {_running(module, error)} takes a branch or a size "
            "from a tensor's values, and a graph runs every op once: compute both sides and choose with torch.where "
            "(torch.export.draft_export lists every obstacle)"
        )
    failure = f"torch.export cannot export {type(module).__name__}: {_first_lines(error)}\n"
    if any(phrase in str(error) for phrase in ("not a known type", "Unsupported input type")):
        return (
            f"{failure}Take and return tensors, numbers, tuples, lists and dicts (a model of transformers: "
            "kwargs={'use_cache': False}), or register the class with torch.export.register_dataclass"
        )
    return (
        f"{failure}"
        "Check that module(*example_inputs, **kwargs) runs and that no branch depends on tensor values "
        "(torch.export.draft_export lists every obstacle)"
    )


def _running(module: nn.Module, error: Exception) -> str:
    """Return the path of the module that raised an error, with its line of source."""
    names = {id(child): name or type(child).__name__ for name, child in module.named_modules()}
    found = type(module).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        child = frame.f_locals.get((*frame.f_code.co_varnames, "self")[0])
        if isinstance(child, nn.Module) and id(child) in names and not frame.f_globals["__name__"].startswith("torch."):
            found = f"{names[id(child)]} ({frame.f_code.co_filename}:{line})"
    return found


def _first_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()][:6]
    return "\n  ".join([type(error).__name__, *lines])


def _functionalised(program: ExportedProgram) -> ExportedProgram:
    # Example inputs would be checked by source code that torch writes from their keys and strings, without escapes.
    program = copy.copy(program)
    program.example_inputs = None
    # An empty table decomposes only ops that alias or mutate: in-place ops become functional, dropout in eval mode
    # becomes a copy; linear, convolution, normalizations and attention stay whole.
    with warnings.catch_warnings():
        # torch copying its own classes: nothing that a user could change
        warnings.filterwarnings("ignore", r".*treespec, LeafSpec.*", FutureWarning)
        try:
            functional: ExportedProgram = program.run_decompositions({})
        except Exception as error:  # torch traces the program again, and may raise anything
            raise ImportModelError(
                "run_decompositions cannot make the exported program functional: "
                f"{_first_lines(error)}\nMake new tensors instead of changing views in place, and use a program that "
                "still has its weights"
            ) from error
        return functional


def _name_of(program: ExportedProgram, module: nn.Module | ExportedProgram) -> str:
    if isinstance(module, nn.Module):
        return type(module).__name__
    for node in program.graph.nodes:
        for _, owner in (node.meta.get("nn_module_stack") or {}).values():
            return str(owner if isinstance(owner, str) else owner.__name__).rpartition(".")[2]
    return "model"


# ---------------------------------------------------------------- checks


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type != "cpu":
            raise ImportModelError(f"{name} is on device {tensor.device}; fmtprop runs on the CPU: use .to('cpu')")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ImportModelError(
                f"{name} is a {tensor.layout} tensor{' (quantized)' if tensor.is_quantized else ''}; "
                "only dense, unquantized tensors can be imported: use .to_dense() or .dequantize()"
            )


def _check_names(program: ExportedProgram) -> None:
    """Refuse names that torch cannot write when it makes the program functional."""
    for spec in program.graph_signature.input_specs:
        check_parameter(spec.target or "")
    in_spec = program.call_spec.in_spec
    if in_spec is not None and in_spec.type is tuple and in_spec.num_children == 2:
        check_keywords(in_spec.children()[1].context or ())


def _check_examples(program: ExportedProgram, example_inputs: Any, kwargs: dict[str, Any]) -> None:
    args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    given = pytree.tree_leaves((args, kwargs))
    specs = _user_inputs(program)
    if len(given) != len(specs):
        raise ImportModelError(
            f"the exported program takes {len(specs)} inputs, example_inputs has {len(given)}; leave it out, "
            "an exported program already has its shapes"
        )
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec, example in zip(specs, given, strict=True):
        value = values.get(spec.arg.name)
        if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
            continue
        if tuple(value.shape) != tuple(example.shape) or value.dtype != example.dtype:
            raise ImportModelError(
                f"input {spec.arg.name}: the program was exported for {value.dtype} {tuple(value.shape)}, the example "
                f"is {example.dtype} {tuple(example.shape)}; export it again with this shape"
            )


def _user_inputs(program: ExportedProgram) -> list[InputSpec]:
    return [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


# ---------------------------------------------------------------- signature to graph


class _Importer:
    """One import: the exported program, the graph under construction, and the value of each placeholder."""

    def __init__(self, program: ExportedProgram, name: str, signature: inspect.Signature | None) -> None:
        self.program = program
        self.signature = signature
        self.graph = Graph(name)
        self.values: dict[str, Any] = {}
        self.placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self._seen: dict[tuple[Any, ...], Value] = {}
        self._check_state()
        self._add_inputs()
        self._add_constants()
        results = import_calls(self.graph, program.graph_module, self.values)
        slots = self._add_outputs(results)
        self.graph.remove_dead()
        positional, keyword = self._arguments()
        self.graph.structure = describe(positional, keyword, _nested(slots, program.call_spec.out_spec, "result"))

    def _check_state(self) -> None:
        """Refuse programs that change state outside of the call."""
        for spec in self.program.graph_signature.output_specs:
            if spec.kind is OutputKind.BUFFER_MUTATION:
                raise ImportModelError(
                    f"the model changes its buffer {spec.target!r} at every call; a graph has no state. Export it in "
                    "eval mode (batch normalization), or pass the state as an input and return it"
                )
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                raise ImportModelError(
                    f"the model modifies its input {spec.target!r} in place; compute a new tensor instead"
                )
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise ImportModelError(
                    f"output {spec.target!r} of kind {spec.kind.name} is not part of inference; export the forward pass"
                )

    # inputs first, so that they keep their names even if a parameter has the same name
    def _add_inputs(self) -> None:
        for spec in _user_inputs(self.program):
            argument = spec.arg
            if isinstance(argument, ConstantArgument):
                self.values[argument.name] = argument.value
            elif isinstance(argument, TensorArgument):
                recorded = self.placeholders[argument.name].meta.get("val")
                check_real(recorded, f"input {argument.name}")
                type_ = tensor_type(recorded, f"input {argument.name}")
                self.values[argument.name] = self.graph.input(argument.name, type_)
            else:
                raise ImportModelError(
                    f"input {argument.name}: {type(argument).__name__} is neither a tensor nor a fixed number; shapes "
                    "must be static: export without dynamic_shapes"
                )

    def _add_constants(self) -> None:
        for spec in self.program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                continue
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                raise ImportModelError(
                    f"{spec.target or spec.arg.name}: inputs of kind {spec.kind.name} are not supported"
                )
            self.values[spec.arg.name] = self._constant(str(spec.target))

    def _constant(self, target: str) -> Value | Parts:
        program = self.program
        tensor = program.state_dict.get(target, program.constants.get(target))
        if not isinstance(tensor, torch.Tensor):
            raise ImportModelError(f"constant {target!r} is missing from the exported program, which is incomplete")
        if isinstance(tensor, torch._subclasses.FakeTensor):
            raise ImportModelError(f"constant {target!r} has no data: the model was exported under FakeTensorMode")
        if tensor.untyped_storage().nbytes() < _bytes_reached(tensor):
            raise ImportModelError(
                f"constant {target!r} has no data: its memory was released; load the program or the module again"
            )
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        # the same memory may mean other numbers: negation and conjugation can be a bit of the tensor
        key = (*place, tensor.is_neg(), tensor.is_conj())
        if key not in self._seen:
            name = self.graph.fresh_name(target) if target in self.graph else target
            type_ = tensor_type(tensor, f"constant {target}")
            self._seen[key] = self.graph.constant(name, type_, parts_of(tensor.detach().resolve_neg()).contiguous())
        return Parts(self._seen[key]) if tensor.is_complex() else self._seen[key]

    def _add_outputs(self, results: Sequence[Any]) -> list[Any]:
        """Add an output for every tensor; return the flat results with slots for the tensors."""
        flat: list[Any] = []
        for result in results:
            if isinstance(result, Value):
                flat.append(Slot(len(self.graph.output_nodes)))
                self.graph.output(result)
            else:
                flat.append(result)
        return flat

    def _arguments(self) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Return name and structure of the positional and of the keyword-only arguments."""
        slots: list[Any] = []
        for spec in _user_inputs(self.program):
            place = Slot(sum(isinstance(slot, Slot) for slot in slots))
            slots.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else place)
        args, kwargs = _nested(slots, self.program.call_spec.in_spec, "argument")
        if self.signature is not None:
            return _by_signature(self.signature, args, kwargs)
        recorded = self.program.module_call_graph[0].signature
        names = list(getattr(recorded, "forward_arg_names", None) or [])[: len(args)]
        if len(names) != len(args):
            names = [f"arg_{i}" for i in range(len(args))]
        return list(zip(names, args, strict=True)), list(kwargs.items())


def _bytes_reached(tensor: torch.Tensor) -> int:
    """Return the number of bytes that the storage of a tensor must have."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * tensor.element_size()


def _nested(slots: Sequence[Any], spec: Any, what: str) -> Any:
    _check_containers(slots, spec, what)
    return pytree.tree_unflatten(list(slots), spec)


def _check_containers(slots: Sequence[Any], spec: Any, what: str) -> None:
    """Refuse tensors in objects that a graph's structure would treat as fixed values."""
    if spec.is_leaf():
        return
    kind = spec.context if spec.type is namedtuple else spec.type  # torch treats all named tuples as one kind
    if not is_container(kind) and any(isinstance(slot, Slot) for slot in slots):
        raise ImportModelError(
            f"a tensor of the model's {what}s is in a {kind.__module__}.{kind.__qualname__}, which a graph "
            "cannot describe; use a tuple, a list, a dict or a dataclass"
        )
    start = 0
    for child in spec.children():
        _check_containers(slots[start : start + child.num_leaves], child, what)
        start += child.num_leaves


def _by_signature(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    # Omitted arguments are recorded with their defaults, which are fixed like given numbers.
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    positional: list[tuple[str, Any]] = []
    keyword: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [(f"{name}_{i}", item) for i, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keyword += value.items()
        else:
            (keyword if kind is inspect.Parameter.KEYWORD_ONLY else positional).append((name, value))
    return positional, keyword
