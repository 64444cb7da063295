"""Conversion of a graph: compute-intensive ops and the ops after them in another floating type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fmtprop.ir import Category, Graph, Node, OpDef, Role, Value, opdef, ports
from fmtprop.layout import DataType
from fmtprop.ops import Attention, GroupedNBits, InnerProduct, MatMul, MatMulNBits, Reorder, emit
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import insert, shown, unused_name, way_from_compute
from fmtprop.passes.precision.wide import is_compute, wide_values
from fmtprop.passes.rewrites.few_rows import is_of_few_rows

#: rows up to which reading a matrix takes longer than the products with it, in f16 without tiles (Xeon, v3.2: of 4096 x
#: 4096, one row takes 1.3 ms in f16 and 2.6 in f32; of 2048 x 2048, four take 0.5 and 0.8, eight 1.1 and 0.8)
_MOST_ROWS = 4

_NARROW = (DataType.BF16, DataType.F16)

#: attributes of products with codes
_OF_CODES = (MatMulNBits, GroupedNBits)


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """Convert f32 computation to a narrower floating type.

    Compute-intensive ops read activations and weights in ``dtype`` and write it; bandwidth-limited ops, views and
    PyTorch's poolings keep their source's type. Biases, normalization statistics, scales, shifts stay f32, other host
    ops get f32 operands, and graph outputs keep their type. Three kinds of numbers are computed in f32:

    - positions (of grid samples, before a conversion to integers), from the compute-intensive ops on;
    - states, which are element-wise results from positions, from the caller's numbers, or from constants of their
      shape that are all equal or that one layer changes again and again (an integrator, a flow, a step of diffusion,
      a leaky neuron): a step may be small beside the state, and a bf16 state loses it;
    - element-wise results that are read in f32 alone, by host ops and graph outputs.

    Products of few rows with a matrix of the caller's stay in f32, too: they would take less time than its
    conversion. Conversions are reorder nodes; the format assignment merges them with neighbouring changes of format. If
    a compute-intensive op's result would only be converted back, or is one of these numbers, the op writes f32
    itself, the type of its accumulator.

    Requires and returns a normal graph.
    """

    #: ``bf16``, or ``f16`` if the library has it
    dtype: DataType = DataType.BF16

    def run(self, graph: Graph) -> Graph:
        """Return the converted graph."""
        return _Conversion(graph, DataType.F32, self.dtype).run()


class Computing(Protocol):
    """Who knows the data types in which compute-intensive ops can run on this CPU."""

    def computes_in(self, dtype: DataType) -> bool:
        """Return whether they can run in a data type."""

    def is_fast_in(self, dtype: DataType) -> bool:
        """Return whether they are no slower in a data type than in f32."""


@dataclass(frozen=True)
class WidenPrecision(Pass):
    """Compute in f32 where a model has a narrower floating type in which the target is slower, or cannot compute.

    Where it can but is slower, products of few rows stay as they are: they take the time of reading a matrix, which has
    half the bytes. PyTorch's operators have no fast kernels for these types either: on a CPU with AVX-512 but without
    f16, a convolution of 64 channels takes 25 times as long in f16 as in f32 with both conversions. Ops after
    compute-intensive ones stay in f32, host ops get the model's type, and graph outputs keep it. So results are
    rounded less often than the model says. On any CPU, this holds for the layers that always stay in f32.

    Requires and returns a well-formed graph.
    """

    #: asked for the types, such as a target; nothing is widened without one
    target: Computing | None = None

    def run(self, graph: Graph) -> Graph:
        """Return the converted graph."""
        read = {result.dtype for node in graph.nodes() if is_compute(node) for result in node.results}
        for dtype in _NARROW:
            if dtype in read and self.target is not None and not self.target.is_fast_in(dtype):
                graph = _Conversion(graph, dtype, DataType.F32, keeps_rows=self.target.computes_in(dtype)).run()
        graph = graph.copy()
        for node in graph.nodes():
            if not node.is_boundary and opdef(node.op).numbers.stays_wide:
                _widen(graph, node)
        return graph


def _widen(graph: Graph, node: Node) -> None:
    """Give a node operands and results in f32, with conversions around it."""
    inputs = graph.inputs(node.name)
    narrow = {name for name, value in inputs.items() if graph.type_of(value).dtype in _NARROW}
    if not narrow:
        return
    wide = {name: insert(graph, node, Reorder(DataType.F32.value), src=inputs[name]) for name in narrow}
    graph.set_inputs(node.name, {**inputs, **wide})
    results = [one.with_dtype(DataType.F32) if one.dtype in _NARROW else one for one in node.results]
    graph.replace(node.with_(results=tuple(results)))
    for index, before in enumerate(node.results):
        value = Value(node.name, index)
        if before.dtype in _NARROW and graph.reader_count(value):
            back = emit(graph, "reorder", {"src": value}, Reorder(before.dtype.value), origin=node.origin)
            graph.replace_uses(value, back)
            graph.set_input(back.node, "src", value)


class _Conversion:
    """Converts computation in one floating type to another."""

    def __init__(self, graph: Graph, given: DataType, dtype: DataType, *, keeps_rows: bool = False) -> None:
        self.source, self.given, self.dtype, self.keeps_rows = graph, given, dtype, keeps_rows
        self.widens = dtype is DataType.F32
        self.out = Graph(graph.name, graph.structure)
        self.values: dict[Value, Value] = {}
        self.casts: dict[tuple[Value, DataType], Value] = {}
        self.wide = set() if self.widens else wide_values(graph)

    def run(self) -> Graph:
        for node in self.source.nodes():
            self._visit(node)
        if not self.widens:
            self._store_accumulators()
        return self.out

    def _visit(self, node: Node) -> None:
        inputs = {name: self.values[value] for name, value in self.source.inputs(node.name).items()}
        if node.is_boundary:
            inputs = {
                name: self._cast(value, self.source.type_of(self.source.inputs(node.name)[name]).dtype)
                for name, value in inputs.items()
            }
            self._keep(node, inputs, [result.dtype for result in node.results])
            if node.op == "constant":
                self.out.constants[node.name] = self.source.constants[node.name]
            return
        declaration = opdef(node.op)
        wanted = self._precision(node, declaration, inputs)
        converted = {name: self._cast(value, wanted[name]) for name, value in inputs.items()}
        changed = not self._keeps_types(node) and any(
            self.out.type_of(converted[one.name]).dtype is self.dtype
            for one in ports(node, converted)
            if one.role is not Role.PARAMETER
        )
        changed = changed and not self._is_wide(node)
        kept = [one.parameter or one.wide for one in declaration.results]  # statistics, and gradients
        dtypes = [
            self.dtype if changed and result.dtype is self.given and not any(kept[index : index + 1]) else result.dtype
            for index, result in enumerate(node.results)
        ]
        self._keep(node, converted, dtypes)

    def _precision(self, node: Node, declaration: OpDef, inputs: dict[str, Value]) -> dict[str, DataType]:
        """Return the data type in which each operand is read."""
        inputs_before = self.source.inputs(node.name)
        original = {name: self.source.type_of(value).dtype for name, value in inputs_before.items()}
        # rows that codes multiply are integers, if they are bf16; the kernel's results have the type of its rows
        multiplies_codes = type(node.attrs) in _OF_CODES and self.dtype is DataType.BF16 and not self._is_wide(node)
        by_pytorch = declaration.category is Category.HOST and declaration.linear is not None
        compute = declaration.category is Category.COMPUTE or by_pytorch or multiplies_codes
        arrives = {name: self.out.type_of(value).dtype for name, value in inputs.items()}
        # oneDNN reads the slopes of a prelu post-op as f32, even if all else is narrower
        data = [
            one.name
            for one in ports(node, inputs)
            if self.widens
            or (
                one.role is not Role.PARAMETER
                and not one.declared.wide
                and (one.post_op is None or one.post_op.op != "prelu")
            )
        ]
        is_wide = self._is_wide(node)
        changed = compute or (not is_wide and any(arrives[name] is self.dtype for name in data))
        wanted = {}
        for name, dtype in original.items():
            # a sum adds into the result's buffer, so both have one type
            added = is_wide and name in node.tail and (name == node.residual or inputs_before[name] in self.wide)
            if self._keeps_types(node) or not changed or added or dtype is not self.given:
                wanted[name] = dtype
            elif name in data or (compute and name.startswith("weights")):
                wanted[name] = self.dtype
            else:
                wanted[name] = dtype
        return wanted

    def _keeps_types(self, node: Node) -> bool:
        """Return whether a node keeps its types: it names one, has a third one, reads an input once, or stays wide."""
        dtypes = {self.source.type_of(value).dtype for value in self.source.inputs(node.name).values()}
        is_third = any(dtype.is_floating for dtype in dtypes - {self.given, self.dtype})
        is_kept = (self.keeps_rows and _is_read_once(node)) or (not self.widens and opdef(node.op).numbers.stays_wide)
        return is_third or is_kept or _names_its_type(node) or self._reads_an_input_once(node)

    def _reads_an_input_once(self, node: Node) -> bool:
        """Return whether a node is a product of few rows with the caller's matrix, or attention to the caller's keys.

        Their conversion would take longer than the node.
        """
        if self.widens:
            return False
        inputs = self.source.inputs(node.name)
        read = [inputs["weights"]] if is_of_few_rows(node) else []
        if isinstance(node.attrs, Attention):
            read = [value for name, value in inputs.items() if name.endswith(("key", "value"))]
        return any(shown(self.source, value).op == "input" for value in read)

    def _is_wide(self, node: Node) -> bool:
        """Return whether a node computes in the given type, or a compute-intensive op writes its accumulator."""
        return Value(node.name, 0) in self.wide and not (is_compute(node) and len(node.results) > 1)

    def _keep(self, node: Node, inputs: dict[str, Value], dtypes: list[DataType]) -> None:
        results = tuple(result.with_dtype(dtype) for result, dtype in zip(node.results, dtypes, strict=True))
        for index, value in enumerate(self.out.add(node.with_(results=results), inputs)):
            self.values[Value(node.name, index)] = value

    def _cast(self, value: Value, dtype: DataType) -> Value:
        if self.out.type_of(value).dtype is dtype:
            return value
        if (value, dtype) not in self.casts:
            name = unused_name("reorder", self.out, self.source)  # the model may have its own conversions
            self.casts[value, dtype] = emit(self.out, "reorder", {"src": value}, Reorder(dtype.value), name=name)
        return self.casts[value, dtype]

    def _store_accumulators(self) -> None:
        """Make compute-intensive ops write f32 if their results would only be converted back."""
        for (value, dtype), cast in self.casts.items():
            if dtype is not DataType.F32:
                continue
            path = way_from_compute(self.out, value)
            for node in path:
                self.out.replace(node.with_(results=(node.results[0].with_dtype(dtype), *node.results[1:])))
            if path:
                self.out.replace_uses(cast, value)
                self.out.remove(cast.node)


def _is_read_once(node: Node) -> bool:
    """Return whether a product has so few rows that it takes the time of reading its matrix."""
    if not isinstance(node.attrs, InnerProduct | MatMul):
        return False
    dims = node.results[0].dims
    return dims[0 if isinstance(node.attrs, InnerProduct) else -2] <= _MOST_ROWS


def _names_its_type(node: Node) -> bool:
    """Whether the model names the type of a node's result: its own conversion, or most unchanged calls."""
    declaration = opdef(node.op)
    host = declaration.category is Category.HOST and not declaration.numbers.narrows(node.attrs)
    return node.op == "reorder" or host
