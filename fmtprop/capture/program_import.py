"""Import of an exported program's signature: the graph's inputs, constants, outputs, and the structure of a call.

:mod:`fmtprop.capture.fx_import` imports the calls. Must not know the exporter.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from fmtprop.capture.fx_import import import_calls, placeholders
from fmtprop.capture.torch_call import check_real, parts_of, tensor_type
from fmtprop.errors import IN_PLACE_REMEDY, ImportModelError
from fmtprop.ir import Graph, Value
from fmtprop.ir.structure import Slot, describe, is_container
from fmtprop.ops.host_call import Parts
from fmtprop.ops.pytorch import tree_unflatten

#: results that a call leaves in the module
_STATE = {OutputKind.BUFFER_MUTATION: "buffer", OutputKind.PARAMETER_MUTATION: "parameter"}


def import_program(program: ExportedProgram, name: str, signature: inspect.Signature | None) -> Graph:
    """Return the graph of a functional exported program.

    `signature`: signature of the module's ``forward``, if there is a module. Raises ImportModelError if the program
    changes state, or takes or has objects that a graph cannot describe.
    """
    return _Importer(program, name, signature).graph


def user_inputs(program: ExportedProgram) -> list[InputSpec]:
    """Return the inputs of the module's call, without parameters and buffers."""
    return [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


class _Importer:
    """One import: the exported program, the graph under construction, and the value of each placeholder."""

    def __init__(self, program: ExportedProgram, name: str, signature: inspect.Signature | None) -> None:
        self.program = program
        self.signature = signature
        self.graph = Graph(name)
        self.values: dict[str, Any] = {}
        self.placeholders = {node.name: node for node in placeholders(program)}
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
            if spec.kind in _STATE:
                if self._is_equal_at_every_call(spec):
                    continue
                raise ImportModelError(
                    f"the model changes its {_STATE[spec.kind]} {spec.target!r} at every call; a graph has no state. "
                    "Export it in eval mode (batch normalization), change it once before compiling, pass the state as "
                    f"an input and return it, or {IN_PLACE_REMEDY}"
                )
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                raise ImportModelError(
                    f"the model modifies its input {spec.target!r} in place, and a plan writes only to its results; "
                    f"compute a new tensor and return it, or {IN_PLACE_REMEDY}"
                )
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise ImportModelError(
                    f"output {spec.target!r} of kind {spec.kind.name} is not part of inference; export the forward pass"
                )

    def _is_equal_at_every_call(self, spec: OutputSpec) -> bool:
        """Return whether a state is written back as it was, or depends on constants alone and no result reads it."""
        signature = self.program.graph_signature
        before = {given.arg.name for given in signature.input_specs if given.target == spec.target}
        if spec.arg.name in before:
            return True
        changed = {other.target for other in signature.output_specs if other.kind in _STATE}
        varying = {
            given.arg.name
            for given in signature.input_specs
            if given.kind is InputKind.USER_INPUT or given.target in changed
        }
        results = {other.arg.name for other in signature.output_specs}
        return not varying & self._sources({spec.arg.name}) and not before & self._sources(results)

    def _sources(self, names: Collection[str]) -> set[str]:
        """Return the names of some nodes and of all nodes that they depend on."""
        found = [node for node in self.program.graph.nodes if node.name in names]
        seen = set(found)
        for node in found:  # the list grows during the loop
            found += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
        return {node.name for node in found}

    # inputs first, so that they keep their names even if a parameter has the same name
    def _add_inputs(self) -> None:
        for spec in user_inputs(self.program):
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
        for result, spec in zip(results, self.program.graph_signature.output_specs, strict=True):
            if spec.kind in _STATE:
                continue
            if isinstance(result, Value):
                flat.append(Slot(len(self.graph.output_nodes)))
                self.graph.output(result)
            else:
                flat.append(result)
        return flat

    def _arguments(self) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Return name and structure of the positional and of the keyword-only arguments."""
        slots: list[Any] = []
        for spec in user_inputs(self.program):
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


def _nested(slots: Sequence[Any], spec: Any, role: str) -> Any:
    _check_containers(slots, spec, role)
    return tree_unflatten(list(slots), spec)


def _check_containers(slots: Sequence[Any], spec: Any, role: str) -> None:
    """Refuse tensors in objects that a graph's structure would treat as fixed values."""
    if spec.is_leaf():
        return
    kind = spec.context if spec.type is namedtuple else spec.type  # torch treats all named tuples as one kind
    if not is_container(kind) and any(isinstance(slot, Slot) for slot in slots):
        raise ImportModelError(
            f"a tensor of the model's {role}s is in a {kind.__module__}.{kind.__qualname__}, which a graph "
            "cannot describe; use a tuple, a list, a dict or a dataclass"
        )
    start = 0
    for child in spec.children():
        _check_containers(slots[start : start + child.num_leaves], child, role)
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
