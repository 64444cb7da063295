"""ONNX nodes of ops that declare none: PyTorch's exporter writes their references.

Owns the use of ``torch.onnx``, which needs the package ``onnxscript``. All ops are exported as one program, since each
export takes half a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from fmtprop.capture.torch_log import held_back
from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Node, TensorType, opdef
from fmtprop.ir.tensors import torch_dtype
from fmtprop.onnx.model.writing import OPSET, GraphWriter, read_by
from fmtprop.system.printable import first_line


@dataclass(frozen=True)
class _Problem:
    """An op with the types of its operands."""

    node: Node
    types: Mapping[str, TensorType]

    def examples(self) -> list[torch.Tensor]:
        return [torch.zeros(t.dims, dtype=torch_dtype(t.dtype)) for t in self.types.values()]

    def run(self, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        named = dict(zip(self.types, tensors, strict=True))
        results = opdef(self.node.op).reference(self.node.attrs, named)
        # copies: the exporter would make no node for a result that shares memory with an operand
        return tuple(result.clone() for result in results)


class _Program(torch.nn.Module):
    """All problems as one program."""

    def __init__(self, problems: list[_Problem]) -> None:
        super().__init__()
        self.problems = problems

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(tensors)
        return [result for p in self.problems for result in p.run([next(rest) for _ in p.types])]


class NodesByOp:
    """The nodes of some ops, for copies into a graph.

    `steps`: nodes of ops that declare no ONNX nodes, and the types of their operands. Raises UnsupportedOpError if
    ``onnxscript`` is missing, or PyTorch's exporter cannot write an op; the message names the node.
    """

    def __init__(self, steps: Iterable[tuple[Node, Mapping[str, TensorType]]]) -> None:
        problems: dict[Any, _Problem] = {}
        for node, types in steps:
            problems.setdefault(_key(node, types), _Problem(node, types))
        self._places = {key: place for place, key in enumerate(problems)}
        self._problems = list(problems.values())
        self._model = self._exported() if problems else onnx.ModelProto()
        self._makers = {name: node for node in self._model.graph.node for name in node.output}
        self._constants = {proto.name: proto for proto in self._model.graph.initializer}

    def _exported(self) -> onnx.ModelProto:
        try:
            return _export(self._problems)
        except _FAILURES as error:
            for problem in self._problems if len(self._problems) > 1 else ():  # find the one that failed
                try:
                    _export([problem])
                except _FAILURES as its_own:
                    raise _refusal(problem.node, its_own) from its_own
            raise _refusal(self._problems[0].node, error) from error

    def write(self, writer: GraphWriter, node: Node, operands: Mapping[str, str]) -> list[str]:
        """Copy the nodes of an op into a graph."""
        types = {name: writer.type(value) for name, value in operands.items()}
        place = self._places[_key(node, types)]
        names = {_operand(place, name): value for name, value in operands.items()}
        results = [_result(place, index) for index in range(len(node.results))]
        for made in self._needed(results):
            copy = onnx.NodeProto()
            copy.CopyFrom(made)
            copy.name = writer.fresh(f"{node.name}/{made.op_type}")
            for part in (copy.input, copy.output):
                for index, name in enumerate(part):
                    part[index] = self._renamed(writer, node, names, name)
            writer.append(copy)
        return [names[name] for name in results]

    def _needed(self, results: list[str]) -> list[onnx.NodeProto]:
        wanted, found = set(results), []
        for node in reversed(self._model.graph.node):
            if wanted & set(node.output):
                found.append(node)
                wanted |= read_by(node)
        return found[::-1]

    def _renamed(self, writer: GraphWriter, node: Node, names: dict[str, str], name: str) -> str:
        if not name:
            return ""
        if name not in names:
            names[name] = writer.fresh(f"{node.name}/{name}")
            if name in self._constants:
                proto = onnx.TensorProto()
                proto.CopyFrom(self._constants[name])
                proto.name = names[name]
                writer.constants[proto.name] = proto
        return names[name]


#: errors of the exporter about an operator that it cannot write
_FAILURES = (torch.onnx.OnnxExporterError, RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError)


def _refusal(node: Node, error: BaseException) -> UnsupportedOpError:
    name = getattr(node.attrs, "target", node.op)
    while error.__cause__ is not None:  # the exporter wraps its reason in advice
        error = error.__cause__
    return UnsupportedOpError(
        f"{node.label}: PyTorch's exporter cannot write {name} as ONNX operators: {first_line(error).rstrip('.')}; "
        "save the graph as .json"
    )


def _key(node: Node, types: Mapping[str, TensorType]) -> Any:
    return node.op, node.attrs, tuple(types.items())


def _operand(place: int, name: str) -> str:
    return f"call_{place}_{name}"


def _result(place: int, index: int) -> str:
    return f"call_{place}:{index}"


def _export(problems: list[_Problem]) -> onnx.ModelProto:
    try:
        import onnxscript  # noqa: F401 (asked for here, so that one message says how to get it)
    except ImportError as error:
        raise UnsupportedOpError(
            f"{problems[0].node.label}: PyTorch's exporter writes such an op, and needs the package onnxscript, which "
            "is not installed: pip install onnxscript"
        ) from error
    examples = tuple(tensor for problem in problems for tensor in problem.examples())
    with held_back() as log, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own warnings
        exported = torch.export.export(_Program(problems), examples, strict=False)
        program = torch.onnx.export(
            exported,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=[_operand(place, name) for place, problem in enumerate(problems) for name in problem.types],
            output_names=[
                _result(place, index) for place, p in enumerate(problems) for index in range(len(p.node.results))
            ],
        )
        log.clear()  # messages about operators of other packages
    model: onnx.ModelProto = program.model_proto  # type: ignore[union-attr]  # with dynamo, there is one
    return model
