"""Numbers stored as bytes in a primitive: its post-ops, scales and zero points.

A node means a computation with real numbers. If operands or the result are stored as bytes of their grids, the
primitive gets the scales as arguments, and some post-ops become others: a rounding before the result is stored is the
storing itself, a rounding in between is four functions, and an operand of bytes is added in units of its own scale.

References
----------
oneDNN developer guide, "Quantization", "Primitive Attributes: Post-ops".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Bytes, Node, linear_of, opdef, result_names
from fmtprop.ir.grid import Grid, usual_limits
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Eltwise, FakeQuantize

#: data type of each operand and result in memory, by name
Stored = Mapping[str, DataType]

#: types of bytes that stand for real numbers
BYTES = frozenset({DataType.S8, DataType.U8})


@dataclass(frozen=True)
class Function:
    """A post-op without operand: a function of one number."""

    alg: str
    alpha: float
    beta: float


@dataclass(frozen=True)
class Kept:
    """One of the node's post-ops, by its index, as its op declares it."""

    index: int


@dataclass
class Chain:
    """The post-ops of a primitive."""

    steps: list[Function | Kept] = field(default_factory=list)
    #: divides the result behind them; 1 for none
    dst_scale: float = 1.0
    _factor: float = 1.0
    _summand: float = 0.0

    def scale(self, factor: float, summand: float = 0.0) -> None:
        """Append ``factor · x + summand``; neighbouring ones become one."""
        self._factor, self._summand = factor * self._factor, factor * self._summand + summand

    def append(self, step: Function | Kept) -> None:
        """Append a step."""
        self.flush()
        self.steps.append(step)

    def flush(self) -> None:
        """Append the scaling so far."""
        if (self._factor, self._summand) != (1.0, 0.0):
            self.steps.append(Function("linear", self._factor, self._summand))
        self._factor, self._summand = 1.0, 0.0

    def store(self, grid: Grid) -> None:
        """Scale the result to bytes of a grid; the primitive rounds and saturates."""
        self.scale(1 / grid.scale, float(grid.zero))
        if not grid.is_full:
            self.append(Function("clip", float(grid.low + grid.zero), float(grid.high + grid.zero)))
        elif self._summand == 0.0:
            self.dst_scale, self._factor = 1 / self._factor, 1.0
        self.flush()

    def position(self, index: int) -> int:
        """Return the place of one of the node's post-ops."""
        return self.steps.index(Kept(index))


@dataclass(frozen=True)
class Scaling:
    """Scales and zero points of a primitive, by the name of the operand or result."""

    scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    #: bits of the axes along which they vary
    masks: Mapping[str, int] = field(default_factory=dict)
    #: zero points that are not 0
    zeros: Mapping[str, int] = field(default_factory=dict)


def stored_of(node: Node) -> Stored:
    """Return the data types of a formatted node's operands and results."""
    operands = {} if node.choice is None else {name: desc.dtype for name, desc in node.choice.operands.items()}
    return {**operands, **{name: desc.dtype for name, desc in zip(result_names(node), node.descs, strict=True)}}


def byte_grids(node: Node, stored: Stored) -> dict[str, Grid]:
    """Return the grids of the operands and results that are stored as bytes."""
    return {name: grid for name, grid in node.grids.items() if stored.get(name) in BYTES}


def chain_of(node: Node, stored: Stored) -> Chain:
    """Return the post-ops of the primitive of a node.

    Raises UnsupportedOpError if oneDNN cannot read a post-op's operand as bytes.
    """
    grids, chain = byte_grids(node, stored), Chain()
    for index, post_op in enumerate(node.post_ops):
        attrs, grid = post_op.attrs, grids.get(post_op.operand or "")
        if isinstance(attrs, FakeQuantize):
            if "dst" in grids and index == len(node.post_ops) - 1:
                break
            chain.scale(1 / attrs.scale)
            chain.append(Function("round", 0.0, 0.0))
            chain.append(Function("clip", float(attrs.low), float(attrs.high)))
            chain.scale(attrs.scale)
        elif grid is not None:
            _append_bytes(chain, node, index, grid)
        elif not (_is_rectifier(attrs) and index == len(node.post_ops) - 2 and "dst" in grids and not grids["dst"].low):
            chain.append(Kept(index))
    if "dst" in grids and opdef(node.op).numbers.bytes(node.attrs) is Bytes.MULTIPLIED:
        chain.store(grids["dst"])
    chain.flush()
    return chain


#: scales that stand for any: no product or quotient of two is 1
_USUAL_SCALES = (1 / 2, 1 / 3, 1 / 5, 1 / 7, 1 / 11, 1 / 13, 1 / 17, 1 / 19)


def with_usual_scales(node: Node, stored: Stored) -> Node | None:
    """Return a sum of products with other scales, for which oneDNN has the same implementations; None without one.

    Scales and zero points are arguments of a primitive, or numbers of its post-ops. So layers that differ in them alone
    may be asked about once.
    """
    roundings = [index for index, post_op in enumerate(node.post_ops) if isinstance(post_op.attrs, FakeQuantize)]
    if linear_of(node) is None or not (node.grids or roundings) or len(node.grids) >= len(_USUAL_SCALES):
        return None
    scales = dict(zip(sorted(node.grids), _USUAL_SCALES, strict=False))
    grids = {
        name: Grid((scales[name],) * len(grid.scales), *usual_limits(grid.low, grid.high), grid.shape, grid.signed)
        for name, grid in node.grids.items()
    }
    post_ops = list(node.post_ops)
    for index in roundings:
        attrs = post_ops[index].attrs
        assert isinstance(attrs, FakeQuantize)
        scale = scales.get("dst", 1 / 23) if index == len(post_ops) - 1 else 1 / (29 + 2 * index)
        post_ops[index] = replace(post_ops[index], attrs=FakeQuantize(scale, *usual_limits(attrs.low, attrs.high)))
    usual = node.with_(grids=grids, post_ops=tuple(post_ops))
    try:
        same = _forms(node, stored) == _forms(usual, stored)
    except UnsupportedOpError:
        return None
    return usual if same else None


def _forms(node: Node, stored: Stored) -> list[object]:
    """Return what a primitive's post-ops are, without their numbers."""
    chain = chain_of(node, stored)
    return [chain.dst_scale == 1.0, *(step.alg if isinstance(step, Function) else step for step in chain.steps)]


def _is_rectifier(attrs: object) -> bool:
    return isinstance(attrs, Eltwise) and (attrs.alg, attrs.alpha) == ("relu", 0.0)


def _append_bytes(chain: Chain, node: Node, index: int, grid: Grid) -> None:
    """Append a post-op with an operand of bytes, in units of the operand's scale."""
    attrs = node.post_ops[index].attrs
    alg = attrs.alg if isinstance(attrs, Binary) else ""
    if alg == "add":
        chain.scale(1 / grid.scale, float(-grid.zero))
    elif alg != "mul" or grid.zero:
        raise UnsupportedOpError(f"{node.label}: its post-op {index} cannot read bytes: only sums and products can")
    chain.append(Kept(index))
    chain.scale(grid.scale)


@lru_cache(maxsize=4096)
def _nothing() -> Scaling:
    return Scaling()


def scaling_of(node: Node, stored: Stored) -> Scaling:
    """Return the scales and zero points of the primitive of a node."""
    grids = byte_grids(node, stored)
    if not grids:
        return _nothing()
    kind = opdef(node.op).numbers.bytes(node.attrs)
    if kind is Bytes.MULTIPLIED:
        return _of_products(node, stored, grids)
    if kind is Bytes.CONVERTED:
        return _of_conversion(node, grids)
    if kind is Bytes.MOVED and len({*grids.values()}) == 1 and {*stored.values()} <= BYTES:
        (grid,) = {*grids.values()}
        if all(
            isinstance(one.attrs, FakeQuantize) or (_is_rectifier(one.attrs) and not grid.zero) for one in node.post_ops
        ):
            return _nothing()
    raise UnsupportedOpError(f"{node.label} computes with real numbers only")


#: parts of the names of implementations that sum products of bytes in 32 bits
_EXACT = ("vnni", "amx", "avx10", "ref")

#: largest sum of a pair of products in 16 bits
_LARGEST_PAIR = 2**15 - 1


def saturates(node: Node, stored: Stored, impl: str, *, has_vnni: bool) -> bool:
    """Return whether an implementation may add pairs of products of bytes in 16 bits, which saturate.

    Without VNNI, that is so for any products but those of depthwise convolutions, and where weights or sources have 7
    bits. If sources are signed, oneDNN halves the weights then, which loses their last bit.
    """
    grids, linear = byte_grids(node, stored), linear_of(node)
    is_general = "gemm" in impl.replace("brgemm", "")
    if not grids or linear is None or any(part in impl for part in _EXACT) or (is_general and has_vnni):
        return False
    if stored["src"] is not DataType.U8:
        return True
    src, weights = grids["src"], grids["weights"]
    largest = 2 * (src.high - src.low) * max(-weights.low - weights.zero, weights.high + weights.zero)
    return not (largest <= _LARGEST_PAIR or (_is_depthwise(node) and not is_general))


def _is_depthwise(node: Node) -> bool:
    """Return whether each channel of the source has an own window, and makes one of the result."""
    groups = getattr(node.attrs, "groups", 1)
    return bool(groups > 1 and groups == node.results[0].dims[1])


def _of_conversion(node: Node, grids: Mapping[str, Grid]) -> Scaling:
    """Return the scaling of a conversion between bytes and reals, or from bytes to others."""
    if len(grids) == 2 and len(set(grids.values())) == 1:
        return _nothing()
    if any(grid.varies for grid in grids.values()) or not all(
        grids[name].is_full for name in ("dst",) if name in grids
    ):
        raise UnsupportedOpError(f"{node.label}: one of its grids has several scales, or limits within a byte")
    scales = {name: grid.scales for name, grid in grids.items()}
    return Scaling(scales, dict.fromkeys(scales, 0), {name: grid.zero for name, grid in grids.items() if grid.zero})


def _of_products(node: Node, stored: Stored, grids: Mapping[str, Grid]) -> Scaling:
    """Return the scaling of sums of products: the scales of both factors as one, for each output."""
    linear = linear_of(node)
    if linear is None or not {"src", "weights"} <= grids.keys():
        raise UnsupportedOpError(f"{node.label}: both factors must be bytes")
    src, weights = grids["src"], grids["weights"]
    if src.varies or any(grid.varies for name, grid in grids.items() if name != "weights"):
        raise UnsupportedOpError(f"{node.label}: only weights may have several scales")
    zeros = {name: grids[name].zero for name in ("src", "weights") if grids[name].zero}
    scales, shape = [src.scale * scale for scale in weights.scales], weights.shape
    mask = 0
    if weights.varies:
        ndim = len(node.results[0].dims)
        outputs = (len(shape) - 1,) if linear.by_columns else (0, 1) if linear.windowed and len(shape) > ndim else (0,)
        if not set(weights.axes) <= set(outputs) or prod(shape) != prod(shape[axis] for axis in outputs):
            raise UnsupportedOpError(f"{node.label}: scales of weights vary along axes {weights.axes}, not {outputs}")
        mask = sum(1 << axis for axis in outputs)
        if len(outputs) > 1:  # of all groups, or of all outputs of a group
            groups, (outer, inner) = getattr(node.attrs, "groups", 1), shape[:2]
            places = product(range(groups), range(node.results[0].dims[1] // groups))
            scales = [scales[min(group, outer - 1) * inner + min(place, inner - 1)] for group, place in places]
    chain, dst = chain_of(node, stored), {}
    if chain.dst_scale != 1.0:
        dst = {"dst": (chain.dst_scale,)}
    return Scaling({"weights": tuple(scales), **dst}, {"weights": mask, **dict.fromkeys(dst, 0)}, zeros)
