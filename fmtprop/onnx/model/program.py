"""An ONNX model as a program of PyTorch functions, run node by node.

The same walk serves two purposes. On data, it runs models that a plan cannot express (shapes that depend on data,
sequences, strings). On tensors without data under a tracer, it makes a graph; nodes that depend only on constants are
computed outside of the tracer. This module must not know about files or graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import onnx
import torch
from onnx import helper

from fmtprop.errors import FmtpropError, ImportModelError, ShapeError
from fmtprop.ir.tensors import map_tensors
from fmtprop.onnx.model import limits, operators
from fmtprop.onnx.model.elements import element_type, in_bytes
from fmtprop.onnx.model.modes import SizesOnly
from fmtprop.onnx.model.operators.values import DataDependentError, NotInTorchError, is_known, is_repeated
from fmtprop.onnx.model.reading import Source
from fmtprop.onnx.model.recording import Recording
from fmtprop.onnx.model.reference import result_nbytes, run_node
from fmtprop.onnx.model.rest import Rest
from fmtprop.onnx.model.steps import Body, NodeStep, body_of, expanded
from fmtprop.ops.without_data import without_data
from fmtprop.system.machine import memory_nbytes
from fmtprop.system.printable import first_line

#: nodes of branches and loops that an imported model may have, after loops are unrolled
MOST_UNROLLED_STEPS: Final = 1_000
#: bytes of small operands: the results of most nodes on them are small too
_SMALL_NBYTES: Final = 4096
#: items of sequences that are copied in the time of a node
_ITEMS_OF_A_STEP: Final = 1_000
#: most elements of a tensor that may be a shape
_FEW_ELEMENTS: Final = 64
#: bytes that nodes may make of constants, plus eight times the bytes of the weights
MOST_FOLDED_NBYTES: Final = 1 << 29
#: bytes of constants that nodes on constants may read, plus 32 times the bytes of the weights: some seconds
MOST_READ_NBYTES: Final = 1 << 34
#: products that nodes on constants may compute: some seconds
MOST_FOLDED_PRODUCTS: Final = 1 << 37
#: bytes of constants that nodes may make of one number each; a graph describes them by this number
MOST_REPEATED_NBYTES: Final = 1 << 30


class ContradictionError(ImportModelError):
    """Parts of a model do not fit together, whatever its inputs are."""


class LimitError(ImportModelError):
    """Nodes on constants ask for too much memory or time."""


class OperandsError(ImportModelError):
    """A node cannot run on its operands: the model is wrong, or the inputs of a run are."""


class OnnxProgram:
    """A runnable model, on data or on tensors without data.

    Raises ImportModelError if an operator is not supported; the message names the node.
    """

    def __init__(self, source: Source) -> None:
        model = source.model
        self.opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
        self.body = body_of(model.graph, self.opsets)
        self.body.constants |= source.weights
        #: the weights that inputs of a run may replace
        self.weights = source.replaceable
        self.body.inputs = [name for name in self.body.inputs if name not in source.weights]
        # exporters call all graphs alike
        self.name = source.stem or model.graph.name or "model"
        self.inputs = [info for info in model.graph.input if info.name not in source.weights]
        self.outputs = list(model.graph.output)
        self.weights_nbytes = sum(value.nbytes for value in source.weights.values())
        #: the file's data about the model, by ONNX Runtime's names
        self.metadata: dict[str, Any] = {
            "producer_name": model.producer_name,
            "graph_name": model.graph.name,
            "domain": model.domain,
            "description": model.doc_string,
            "graph_description": model.graph.doc_string,
            "version": model.model_version,
            "custom_metadata_map": {entry.key: entry.value for entry in model.metadata_props},
        }
        #: labels of the nodes that ran on ONNX's reference
        self.reference_nodes: list[str] = []
        #: what runs rounds of loops in another way than node by node
        self.bodies: Rounds | None = None

    def of_body(
        self, body: Body, given: Mapping[str, torch.Tensor], constants: Mapping[str, Any], outputs: Sequence[str]
    ) -> OnnxProgram:
        """Return the body of a loop as a program of its own.

        `given`: examples of its inputs, by name. `constants`: other values that it reads.
        """
        made = copy.copy(self)
        made.bodies, made.weights, made.name = None, frozenset(), body.name or self.name
        made.body = replace(body, inputs=list(given), outputs=list(outputs), constants=body.constants | dict(constants))
        made.inputs = [helper.make_tensor_value_info(name, element_type(one), one.shape) for name, one in given.items()]
        made.outputs = [onnx.ValueInfoProto(name=name) for name in outputs]
        return made

    def run(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run node by node.

        Raises ImportModelError if a node cannot run on its operands; the message names it.
        """
        with torch.no_grad():
            results = _Run(self).body(self.body, dict(inputs), {})
            taken = set(map(_address, (*inputs.values(), *self.body.held())))
            return [_owned(result, taken) for result in results]

    def trace(
        self, inputs: Mapping[str, Any], recording: Recording, *, splits: bool = False
    ) -> tuple[list[Any], Rest | None]:
        """Run on tensors without data, and record the calls; return the outputs, and the nodes that are left.

        `splits`: leave nodes with shapes and branches that depend on the inputs, and those that read their results;
        outputs that these make are None. Otherwise DataDependentError is raised.
        """
        run = _Run(self, recording, splits=splits)
        return run.body(self.body, dict(inputs), {}), run.rest

    def finish(self, steps: Sequence[NodeStep], values: Mapping[str, Any], *, owned: bool = True) -> list[Any]:
        """Run the last nodes on all values that they and the outputs read, and return the outputs.

        `owned`: whether outputs must share no memory with others. Raises ImportModelError if a node cannot run on its
        operands; the message names it.
        """
        last = Body(self.body.name, list(values), self.body.outputs, steps=list(steps))
        with torch.no_grad():
            results = _Run(self).body(last, values, {})
            if not owned:
                return results
            taken = set(map(_address, (*values.values(), *last.held())))
            return [_owned(result, taken) for result in results]


class Rounds(Protocol):
    """What runs rounds of loops."""

    def results(self, body: Body, values: Sequence[Any], scope: Mapping[str, Any]) -> list[Any] | None:
        """Return the results of a round; None if it is to run node by node."""


#: errors that functions of PyTorch and of numpy raise about their operands
_FAILURES: Final = (
    RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError,
    MemoryError,
)  # fmt: skip


class _Run:
    """One run, and its counts so far."""

    def __init__(self, program: OnnxProgram, recording: Recording | None = None, *, splits: bool = False) -> None:
        self.program = program
        self.recording = recording
        #: whether nodes whose results depend on values are left for later, and these nodes
        self.splits = splits
        self.rest: Rest | None = None
        self.depth = 0
        #: branches around the present node that a run may not take
        self.doubtful = 0
        self.steps = 0
        self.folded_nbytes = 0
        self.repeated_nbytes = 0
        self.read_nbytes = 0
        self.products = 0

    def body(self, body: Body, inputs: Mapping[str, Any], scope: Mapping[str, Any]) -> list[Any]:
        values = _Scope(scope, body.constants)
        values.update(inputs)
        splits = self.splits and not self.depth
        for step in body.steps:
            results = self.left(step, values) if splits else self.made(step, values)
            for name, result in zip(step.outputs, results, strict=False):
                if name:
                    values[name] = result
            for name in step.last:
                values.pop(name, None)
        return [
            values.get(name) if splits and self.rest is not None else values.find(name, None) for name in body.outputs
        ]

    def made(self, step: NodeStep, values: _Scope) -> Sequence[Any]:
        """Return the results of a node of a body."""
        return self.step(step, [values.find(name, step) for name in step.inputs], values)

    def left(self, step: NodeStep, values: _Scope) -> Sequence[Any]:
        """Return the results of a node, none if it must be left for later."""
        if self.rest is None or not self.rest.depends(step):
            calls = [] if self.recording is None else self.recording.calls
            before = len(calls)
            try:
                return self.made(step, values)
            except DataDependentError as error:
                self.rest = self.rest or Rest(error)
                del calls[before:]
        self.rest.add(step, values)
        return ()

    def step(self, step: NodeStep, arguments: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        if self.depth:
            # a sequence is copied
            copied = sum(len(value) for value in arguments if isinstance(value, list))
            self._count_steps(step, 1 + copied // _ITEMS_OF_A_STEP)
        try:
            return self._checked(step, self._call(step, arguments, scope))
        except DataDependentError as error:
            text = str(error)
            raise (
                error
                if text.startswith("node ")
                else DataDependentError(f"{step.label}: {text.partition(' depends on the values')[0]}")
            ) from None
        except ShapeError as error:
            raise OperandsError(f"{step.label}: {error}") from error
        except FmtpropError:
            raise
        except ImportError as error:
            raise ImportModelError(f"{step.label}: {first_line(error)}") from error
        except NotImplementedError as error:
            raise ImportModelError(f"{step.label}: {first_line(error)} is not supported") from error
        except _FAILURES as error:
            given = ", ".join(map(_described, arguments))
            raise OperandsError(f"{step.label} cannot run on {given or 'nothing'}: {first_line(error)}") from error

    def _count_steps(self, step: NodeStep, number: int) -> None:
        """Count the nodes that branches and loops run, and refuse too many."""
        self.steps += number
        if self.recording is not None and self.steps > MOST_UNROLLED_STEPS:
            raise DataDependentError(f"{step.label}: a loop runs more than {MOST_UNROLLED_STEPS} nodes, the number")
        if self.steps > limits.LOOP_STEPS:
            raise ImportModelError(
                f"{step.label}: loops have run {limits.LOOP_STEPS} nodes in this run, and may run no more"
            )

    def _checked(self, step: NodeStep, results: Any) -> Sequence[Any]:
        # a sequence is a list, several results are a tuple
        found: Sequence[Any] = results if isinstance(results, tuple) else (results,)
        if len(found) < len(step.outputs) and any(step.outputs):
            raise ContradictionError(f"{step.label} names {len(step.outputs)} outputs, it has {len(found)}")
        return found

    def _call(self, step: NodeStep, arguments: list[Any], scope: Mapping[str, Any]) -> Any:
        recording = self.recording
        if recording is None or step.runs_subgraphs:
            return self._make(step, arguments, scope)
        shape_only = step.op in operators.SHAPE_ONLY and not step.domain
        kept = step.op in operators.KEEPING and not step.domain
        if kept:
            arguments = [*map(in_bytes, arguments)]
        if shape_only or (is_known(arguments) and not kept):
            arguments = recording.plain(arguments)
            if not shape_only or step.op in operators.GROWING:  # others give a few numbers, and read none
                self._check_size(step, arguments, scope)
            return self._make(step, arguments, scope)
        if self.doubtful and step.op in operators.REFUSING and not step.domain and _is_computed(arguments[1]):
            raise DataDependentError(f"{step.label}: whether it runs on its indices or its divisor")
        arguments = recording.traced(arguments)
        recording.origin = step.name
        return self._make(step, arguments, scope)

    def _make(self, step: NodeStep, arguments: list[Any], scope: Mapping[str, Any]) -> Any:
        function = step.function
        carried = step.op in operators.CARRYING and not step.domain
        if function is None or not (carried or all(map(_in_torch, arguments))):
            return self._otherwise(step, arguments)
        attributes = step.attributes
        if step.asks:
            attributes = attributes | self._asked(step, arguments, scope)
        try:
            return function(*arguments, **attributes)
        except NotInTorchError:
            return self._otherwise(step, arguments)

    def _asked(self, step: NodeStep, arguments: list[Any], scope: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a node's function asks of the run."""
        doubtful = step.op == "If" and not is_known(arguments[0])
        known = {
            "wanted": len(step.outputs),
            "rounded": step.rounded,
            "run": lambda body, values: self._subgraph(step, body, values, scope, doubtful),
        }
        return {name: known[name] for name in step.asks}

    def _subgraph(
        self, step: NodeStep, body: Body, values: Sequence[Any], scope: Mapping[str, Any], doubtful: bool
    ) -> list[Any]:
        if len(values) > len(body.inputs):
            raise ContradictionError(
                f"{step.label}: its subgraph takes {len(body.inputs)} inputs, {len(values)} are given"
            )
        self._count_steps(step, 1)  # a body may have no nodes
        if self.recording is None and self.program.bodies is not None and body.inputs:
            found = self.program.bodies.results(body, values, scope)
            if found is not None:
                self._count_steps(step, len(body.steps))
                return found
        self.depth += 1
        self.doubtful += doubtful
        try:
            return self.body(body, dict(zip(body.inputs, values, strict=False)), scope)
        finally:
            self.depth -= 1
            self.doubtful -= doubtful
            if self.recording is not None:
                self.recording.origin = step.name

    def _otherwise(self, step: NodeStep, arguments: list[Any]) -> Any:
        """Run a node as ONNX's function body for it, or on ONNX's reference if there is none."""
        body = expanded(step, arguments)
        if body is not None:
            return tuple(self.body(body, dict(zip(body.inputs, arguments, strict=False)), {}))
        if self.recording is not None and not is_known(arguments):
            raise DataDependentError(f"{step.label}: PyTorch has no such operator, and the result of ONNX's reference")
        nbytes = result_nbytes(step.node, step.version, arguments) if step.op in operators.GROWING else 0
        if nbytes > memory_nbytes():
            raise ValueError(f"its result has {nbytes} bytes, more than this machine's memory")
        self.program.reference_nodes.append(step.label)
        return run_node(step.node, step.version, arguments)

    def _check_size(self, step: NodeStep, arguments: list[Any], scope: Mapping[str, Any]) -> None:
        """Refuse a result that would be too large before it is computed."""
        nbytes = sum(value.nbytes for value in arguments if isinstance(value, torch.Tensor))
        growing = step.op in operators.GROWING
        if not growing and nbytes <= _SMALL_NBYTES:
            return
        self.read_nbytes += nbytes
        most = MOST_READ_NBYTES + 32 * self.program.weights_nbytes
        if self.read_nbytes > most:
            raise LimitError(
                f"{step.label} reads {nbytes} bytes of constants; all nodes on constants together may read {most}: "
                "compute them once, and keep the result as an initialiser"
            )
        if step.function is None or not all(map(_in_torch, arguments)):
            self._count(step, nbytes, result_nbytes(step.node, step.version, arguments) if growing else 0, 0)
            return
        try:
            with SizesOnly() as mode:
                made = self._make(step, map_tensors(arguments, _small_or_without_data), scope)
        except DataDependentError:  # a function that reads all numbers: its result is no larger than they are
            return
        self.products += mode.products
        if self.products > MOST_FOLDED_PRODUCTS:
            raise LimitError(
                f"{step.label} computes {mode.products} products of constants; all nodes on constants together may "
                f"compute {MOST_FOLDED_PRODUCTS}: compute it once, and keep the result as an initialiser"
            )
        results = made if isinstance(made, tuple | list) else (made,)
        sizes = [(value.nbytes, is_repeated(value)) for value in results if isinstance(value, torch.Tensor)]
        size = sum(nbytes for nbytes, repeated in sizes if not repeated)
        repeated = sum(nbytes for nbytes, repeated in sizes if repeated)
        self._count(step, nbytes, size, repeated)

    def _count(self, step: NodeStep, nbytes: int, size: int, repeated: int) -> None:
        """Count the bytes that nodes make of constants, and those of one number each, and refuse too many."""
        self.folded_nbytes += size
        self.repeated_nbytes += repeated
        if self.repeated_nbytes > MOST_REPEATED_NBYTES:
            raise LimitError(
                f"{step.label} makes {repeated} bytes of one number; all nodes together may make "
                f"{MOST_REPEATED_NBYTES}: use a tensor of one element, which operators broadcast"
            )
        most = MOST_FOLDED_NBYTES + 8 * self.program.weights_nbytes
        if self.folded_nbytes > most:
            raise LimitError(
                f"{step.label} makes {size} bytes of constants of {nbytes} bytes; all nodes together may make {most}: "
                "keep such a tensor as an initialiser"
            )


class _Scope(dict[str, Any]):
    """Values by name, with those of the enclosing graphs."""

    def __init__(self, outer: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        super().__init__(outer)
        self.update(constants)

    def find(self, name: str, step: NodeStep | None) -> Any:
        """Return a value; None for an operand that is left out."""
        if not name:
            return None
        try:
            return self[name]
        except KeyError:
            where = "an output of the graph" if step is None else step.label
            raise ContradictionError(f"{where} reads {name!r}, which nothing before it makes") from None


def _is_computed(value: Any) -> bool:
    """Return whether a tensor of integers depends on the inputs."""
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not is_known(value)


def _small_or_without_data(tensor: torch.Tensor) -> Any:
    """Return a large tensor without its data; a few numbers may be a shape and stay."""
    return without_data(tensor) if tensor.numel() > _FEW_ELEMENTS else tensor


def _address(value: Any) -> int | None:
    """Return where a tensor's memory begins."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _owned(value: Any, taken: set[int | None]) -> Any:
    """Return a result that shares no memory with others or with itself, and note its memory as taken."""
    if isinstance(value, list):
        return [_owned(item, taken) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if _address(value) in taken or value.nbytes > value.untyped_storage().nbytes():
        value = value.clone(memory_format=torch.contiguous_format)
    taken.add(_address(value))
    return value


def _in_torch(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_in_torch, value))
    return value is None or isinstance(value, torch.Tensor)


def _described(value: Any) -> str:
    if isinstance(value, list):
        return f"a sequence of {len(value)}"
    if value is None:
        return "nothing"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
