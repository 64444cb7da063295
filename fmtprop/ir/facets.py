"""Facets of an op: its products, its numbers, PyTorch's operator, its post-ops, its cost, the slices of a batch.

With the defaults of a facet, an op takes part in fewer optimizations, but is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fmtprop.ir.node import Attrs
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Linear:
    """Where the products are that an op sums, of its ``src`` and its ``weights``, or of the gradients of these."""

    #: ``(dims of src, of weights, of dst) -> products``
    products: Callable[[Dims, Dims, Dims], float]
    #: whether the outputs lie along the last axis of weights, of dst and of a bias of the rank of dst. Otherwise they
    #: lie along the first axis of weights (behind one of groups, where weights have an axis more than src), along axis
    #: 1 of dst and in a bias of one axis.
    by_columns: bool = False
    #: whether weights are a window that slides over src, perhaps in groups of channels
    windowed: bool = False
    #: whether the window slides over dst: each number of src is added to all places of a window
    transposed: bool = False
    #: the operand or result of the op that has the dims of src, of weights and of dst: the gradient by an operand sums
    #: as many products, but other ones
    roles: tuple[str, str, str] = ("src", "weights", "dst")
    #: whether the first axis of src are steps that wait for one another: the products of a step have few rows, as many
    #: as src has sequences, along axis 1. Weights have the directions along axis 1
    by_steps: bool = False

    def output_axis(self, ndim: int) -> int:
        """Return the axis of dst along which the outputs lie; dst has `ndim` axes."""
        return ndim - 1 if self.by_columns else 1

    def bias_dims(self, outputs: int, ndim: int) -> Dims:
        """Return the dims of a bias with a number for each output, where dst has `ndim` axes."""
        return (*(1,) * (ndim - 1), outputs) if self.by_columns else (outputs,)

    def factor_dims(self, weights: Dims, ndim: int) -> Dims:
        """Return the dims in which a number for each output multiplies weights, where dst has `ndim` axes."""
        if self.by_columns:
            return (*(1,) * (len(weights) - 1), weights[-1])
        head = 2 if self.channels_per_group(weights, ndim) else 1
        return (*weights[:head], *(1,) * (len(weights) - head))

    def channels_per_group(self, weights: Dims, ndim: int) -> int:
        """Return the source's channels in each group; 0 where weights have no groups (dst has `ndim` axes)."""
        return weights[2] if self.windowed and len(weights) > ndim else 0


def _one(attrs: Any, gathered: float) -> float:
    return 1.0


def _none(attrs: Any) -> float:
    return 0.0


def _never(attrs: Any) -> bool:
    return False


@dataclass(frozen=True)
class Cost:
    """Costs of an op without its products, for the model of :mod:`fmtprop.tuning.roofline`."""

    #: ``(attrs, elements of src for one of dst) -> operations for an element of dst``
    operations: Callable[[Any, float], float] = _one
    #: ``attrs -> places that PyTorch's operator reads, one after another, for an element of dst``; 0 without a window
    window: Callable[[Any], float] = _none
    #: share of the copying bandwidth at which oneDNN's kernels move the op's bytes. Medians over the layers of the
    #: built-in convolutional networks, with one thread on AVX2.
    pace: float = 1.0
    #: the same of PyTorch's operator. Measured on [1, 64, 64, 64] with 2 threads (Xeon with AMX, torch 2.13): 1.4 to
    #: 0.5 of simple element-wise ones, 0.15 to 0.3 of those that take several passes. Less is declared where oneDNN has
    #: generated code, which is not slower.
    pytorch: float = 0.3
    #: part of that where the channels are innermost, of an operator that is written for rows
    across: float = 1.0
    #: ``attrs -> operations of PyTorch's operator for an element of dst``, if they take longer than its bytes; or 0
    by_pytorch: Callable[[Any], float] = _none
    #: factor of `operations` where the channels are not innermost, if oneDNN's code gathers number by number there
    gathers: float = 1.0
    #: ``attrs -> whether it reads no more numbers of an operand than it writes``: rows of a table
    picks: Callable[[Any], bool] = _never


class Reads(Enum):
    """Formats on which PyTorch's operator works as they are.

    It copies others number by number: that takes 23 ms where the operator takes 0.5 and a reorder 2 (group
    normalization of [1, 512, 3199] with channels innermost, torch 2.13).
    """

    #: any strides
    ANY = "any"
    #: row-major
    ROWS = "rows"
    #: row-major, and channels-last in PyTorch's sense: of rank 4 and 5
    ROWS_OR_CHANNELS_LAST = "rows or channels-last"


class Bytes(Enum):
    """What an op's primitive does with numbers of a grid that are stored as bytes (:class:`~fmtprop.ir.grid.Grid`)."""

    #: it computes with real numbers only
    NEVER = "never"
    #: each result is one of the sources' numbers, so it needs no scale
    MOVED = "moved"
    #: it sums products of bytes, and scales the sums
    MULTIPLIED = "multiplied"
    #: it converts bytes to reals and back
    CONVERTED = "converted"
    #: it computes with the numbers of two sources, and rounds
    COMBINED = "combined"
    #: it looks each byte up, so no scale is left
    TABULATED = "tabulated"
    #: it computes with the numbers of one source, and rounds if its result is on a grid
    NORMALIZED = "normalized"


@dataclass(frozen=True)
class View:
    """An op that only describes its source anew, so that no data moves where the format permits."""

    #: ``(attrs, desc of src, result type) -> desc of dst``; raises FormatError where the format cannot take it
    dst: Callable[[Any, MemoryDesc, TensorType], MemoryDesc]
    #: ``(attrs, desc of dst, type of src) -> desc of src`` from which the view makes that one; raises FormatError where
    #: there is none. So a good format for a view's reader becomes a format to try for the source's producer.
    src: Callable[[Any, MemoryDesc, TensorType], MemoryDesc] | None = None


@dataclass(frozen=True)
class Absorbs:
    """The post-ops that an op's primitive can absorb."""

    #: kinds of :class:`~fmtprop.ir.op.PostOpForm`
    kinds: frozenset[str] = frozenset()
    #: algorithms of its eltwise post-ops; None for all
    algs: frozenset[str] | None = None
    #: whether it does absorb them. It does not if the library then has reference loops only, or if kernels of our own,
    #: which take no post-ops, run faster.
    wanted: bool = True


def _nothing(attrs: Any) -> frozenset[str]:
    return frozenset()


def _no_operand(attrs: Any) -> str | None:
    return None


def _always(attrs: Any) -> bool:
    return True


def _in_reals(attrs: Any) -> Bytes:
    return Bytes.NEVER


def _same(operand: str, dims: Dims) -> float:
    return 1.0


def _few(dims: Mapping[str, Dims]) -> int:
    return 1


@dataclass(frozen=True)
class ByPyTorch:
    """How PyTorch computes an op: its operator, and the formats on which that is right and fast."""

    #: ``(attrs, torch tensors by operand, result tensors) -> call without arguments``: PyTorch's operator, ready to
    #: write its results directly to these tensors, at the speed that a user of PyTorch gets; None for attributes that
    #: it cannot run so. The operands may have any plain formats, of the data type of the results; an element-wise op's
    #: result may be its operand. Otherwise the op runs on PyTorch by its `reference`.
    operator: Callable[[Any, Mapping[str, Any], Sequence[Any]], Callable[[], object] | None] | None = None
    #: which plain formats the operator works on without a copy
    reads: Reads = Reads.ANY
    #: ``attrs -> bool``: whether `reference` is right for operands of any strides. Some operators of PyTorch are not;
    #: they get row-major operands.
    any_strides: Callable[[Any], bool] = _always
    #: ``attrs -> operands`` that the operator reads faster as a view that repeats numbers along axes (``expand``) than
    #: as a copy of it
    repeated: Callable[[Any], frozenset[str]] = _nothing
    #: ``attrs -> operand`` of which the result is a copy with some numbers changed, which PyTorch can change in the
    #: operand itself; None for other ops
    changed: Callable[[Any], str | None] = _no_operand
    #: ``attrs -> operand`` to whose memory PyTorch can write the result, number by number; None for other ops
    overwritten: Callable[[Any], str | None] = _no_operand


@dataclass(frozen=True)
class Numbers:
    """The numbers of an op: those on which it is defined, special values, rounding, narrower types, bytes."""

    #: ``attrs -> operands`` to which a check gives positive numbers: divisors, variances, arguments of logarithms
    positive: Callable[[Any], frozenset[str]] = _nothing
    #: ``(operand, dims) -> power of two`` by which a check multiplies the numbers of an operand: an op that reads its
    #: own results would amplify rounding errors with large weights
    factor: Callable[[str, Dims], float] = _same
    #: (operand, the operand that its numbers are made of, how): a check has no others for it
    made_of: tuple[tuple[str, str, Callable[[Any], Any]], ...] = ()
    #: ``dims by operand -> count`` of numbers that a primitive may add one after the other in f32, with sums that are
    #: not exact. Rounding errors grow with this count, and so does the tolerance of a check.
    summands: Callable[[Mapping[str, Dims]], int] = _few
    #: ``attrs -> bool``: whether a check may choose the numbers of all operands. It may not if another call must make
    #: one of them from the others, such as indices or a workspace.
    checkable: Callable[[Any], bool] = _always
    #: whether an infinity becomes NaN, or spreads over a whole window: checks give no mask through such an op
    spreads: bool = False
    #: ``attrs -> names``: the special values for which some implementation of the primitive, or of the post-op, differs
    #: from PyTorch: ``"nan"``, ``"inf"``, and ``"extremum"`` where the largest or smallest of infinities alone is a
    #: finite number (docs/numerics.md). oneDNN's reference implementations do not count.
    loses: Callable[[Any], frozenset[str]] = _nothing
    #: ``attrs -> bool``: whether a call of PyTorch gives results of its operands' type, as accurate in a narrower one:
    #: it selects numbers, or adds a few
    narrows: Callable[[Any], bool] = _never
    #: whether it stays in f32 where a model is computed in a narrower type
    stays_wide: bool = False
    #: ``attrs -> operands`` with numbers that are positions in another operand: these are not computed in a narrower
    #: type, since its steps grow with the distance from 0
    positions: Callable[[Any], frozenset[str]] = _nothing
    #: ``attrs -> Bytes``: what its primitive does with bytes that stand for real numbers
    bytes: Callable[[Any], Bytes] = _in_reals


def each_image(attrs: Attrs, batch: int, images: int) -> Attrs | None:
    """Return the attributes as they are: the op treats images one by one."""
    return attrs


def each_image_across_axis(attrs: Any, batch: int, images: int) -> Attrs | None:
    """Return the attributes of an op that works along an axis, as they are; None where that is the batch."""
    found: Attrs | None = attrs if attrs.axis > 0 else None
    return found
