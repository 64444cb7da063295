"""Tools of checks: input numbers for a primitive, and the error of its result."""

from __future__ import annotations

import math
import zlib
from functools import cache
from typing import NamedTuple

import torch

from fmtprop.ir import Bytes, Category, Grid, Node, linear_of, opdef, port, result_names
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.eltwise import FUNCTIONS, Eltwise
from fmtprop.ops.quantization import FakeQuantize, to_reals

#: largest error of one primitive, relative to the largest magnitude of the reference
TOLERANCE = {DataType.F64: 1e-13, DataType.F32: 2e-5, DataType.BF16: 2e-2, DataType.F16: 4e-3}

#: error of an f32 sum relative to it and to the root of the summands' number. On a check's numbers, rounding errors of
#: one sign come in runs: oneDNN's batch normalization reaches 2e-6, on normally distributed numbers 3e-7
_SUM_ERROR = 2**-18

#: share of bytes that may be rounded to the neighbour; kernels of v3.2 reach 2e-5 on a check's numbers
_ROUNDED_OTHERWISE_SHARE = 1e-3

#: part of a step by which differences of rounded numbers may be no multiples of it: products of f32 are rounded, too
_OFF_THE_GRID = 1e-2

#: part of a step that is added to numbers which a check has rounded
_NOT_IN_THE_MIDDLE = 0.3

#: the same without a bias to add it to: what sources are multiplied by, which no scale is a simple fraction of. Sums of
#: multiples of 1/16 lie in the middle between steps of 0.03 or 0.1 again and again
_NO_FRACTION = 0.6180339887

#: largest difference of two bytes
_BYTE_RANGE = 255

#: least and greatest whole number that a post-op ``round`` is taken to make, and their distance
_WHOLE = (-_BYTE_RANGE, _BYTE_RANGE, 1.0)

#: a run may take smaller f32 numbers for zero (:mod:`fmtprop.jit.denormals`)
_SMALLEST_NORMAL = 2**-126

#: elements of which differences are computed at a time (at least one row of the tensor)
_PIECE_ELEMENTS = 1 << 20


class ShownRounding(NamedTuple):
    """A rounding that a result shows: numbers in the middle between two multiples are rounded to either."""

    #: largest difference that this makes in the result
    step: float
    #: number of steps by which it makes one, if a rounding before it was otherwise, too
    most: int = 1
    #: whether all such differences are multiples of the step
    is_grid: bool = True


def tolerance_of(node: Node, index: int) -> float:
    """Return the largest error of a formatted node's result, relative to the largest magnitude of the reference."""
    operands = node.choice.operands if node.choice is not None else {}
    count = opdef(node.op).numbers.summands({name: desc.dims for name, desc in operands.items()})
    dtype = node.results[index].dtype
    least = TOLERANCE.get(dtype, 0.0)
    if port(node, result_names(node)[index]).declared.wide:  # computed from narrower numbers
        return max(least, *(TOLERANCE.get(desc.dtype, 0.0) for desc in operands.values()))
    return max(least, math.sqrt(count) * _SUM_ERROR) if dtype is DataType.F32 and count > 1 else least


def least_magnitude(node: Node) -> float:
    """Return the magnitude to which errors of a node's results are relative if all results are smaller.

    Products of small numbers are multiples of 1/16. An eltwise post-op may make all of a few results much smaller, such
    as mish of -9; its errors are those of rounded terms of that size.
    """
    return 2**-4 if any(post_op.op == "eltwise" for post_op in node.post_ops) else 0.0


def small_numbers(node: Node, name: str, desc: MemoryDesc, dtype: DataType | None = None) -> torch.Tensor:
    """Return numbers for an operand of a node, the same at each call.

    `dtype`: data type of the same numbers in the result. Default: the format's. Result: the operand's dimensions,
    filled with multiples of 1/4 between -2 and 2, or with integers. They are positive for a divisor, a variance, a root
    or a logarithm, also if one of the latter is a post-op. Their sums are exact in f32 at these sizes. An op may have
    them scaled (:attr:`~fmtprop.ir.facets.Numbers.factor`).
    """
    grid = node.grids.get(name)
    if grid is not None and not desc.dtype.is_floating:
        found = _bytes(node, name, desc, grid)
        return found if dtype is None or dtype is desc.dtype else to_reals(found, grid)
    if "dst" in node.grids and opdef(node.op).numbers.bytes(node.attrs) is Bytes.CONVERTED:
        grid = node.grids["dst"]  # none in the middle between two numbers of the grid
        return to_reals(_bytes(node, name, desc, grid), grid) + _NOT_IN_THE_MIDDLE * grid.scale
    one = port(node, name)
    op, attrs = (node.op, node.attrs) if one.post_op is None else (one.post_op.op, one.post_op.attrs)
    # whole numbers may be divisors
    host = not desc.dtype.is_floating and opdef(node.op).category is Category.HOST
    # a result near zero would lose its digits in a root or a logarithm that follows
    steep = any(
        post_op.op == "eltwise" and opdef("eltwise").numbers.positive(post_op.attrs) for post_op in node.post_ops
    )
    positive = host or (steep and one.post_op is None) or one.declared.name in opdef(op).numbers.positive(attrs)
    wanted = dtype or desc.dtype
    # multiples of 1/4 are exact in every floating-point type, integers in all types
    direct = wanted.is_floating == desc.dtype.is_floating
    low, high = (0, 2) if desc.dtype is DataType.BOOLEAN else (1 if positive else -8, 9)
    pool = _pool(low, high, wanted if direct else desc.dtype)
    numbers = _drawn(f"{node.op}/{name}/{desc.dims}", pool, desc)
    factor = opdef(op).numbers.factor(one.declared.name, desc.dims)
    numbers = numbers if factor == 1.0 else numbers * factor
    roundings = [post_op.attrs for post_op in node.post_ops if isinstance(post_op.attrs, FakeQuantize)]
    if roundings and name == "bias" and wanted.is_floating:
        # one beyond the limits would hide the products, and many sums would be in the middle between two steps
        scale, reach = roundings[0].scale, roundings[0].scale * max(-roundings[0].low, roundings[0].high)
        numbers = numbers * 2.0 ** min(0, math.floor(math.log2(reach / 4))) + _NOT_IN_THE_MIDDLE * scale
    if roundings and name == "src" and wanted.is_floating and linear_of(node) is not None and not _has_bias(node):
        numbers = numbers * _NO_FRACTION
    return numbers if direct else numbers.to(torch_dtype(wanted))


def _has_bias(node: Node) -> bool:
    return node.choice is not None and "bias" in node.choice.operands


def _bytes(node: Node, name: str, desc: MemoryDesc, grid: Grid) -> torch.Tensor:
    """Return bytes that stand for numbers of a grid, from its whole range."""
    pool = _pool(grid.low + grid.zero, grid.high + grid.zero + 1, grid.stored)
    return _drawn(f"{node.op}/{name}/{desc.dims}", pool, desc)


def _drawn(seed: str, pool: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return numbers of a pool, from a place that depends on the seed."""
    dims = desc.dims
    if desc.has_broadcast:  # along such an axis all elements share one position, thus one number
        dims = tuple(1 if stride == 0 else size for size, stride in zip(dims, desc.strides, strict=True))
    start, count = zlib.crc32(seed.encode()) % pool.numel(), math.prod(dims)
    rounds = -(-(start + count) // pool.numel())
    pool = pool.repeat(rounds) if rounds > 1 else pool
    return pool[start : start + count].clone().reshape(dims).expand(desc.dims)


@cache
def _pool(low: int, high: int, dtype: DataType) -> torch.Tensor:
    """Return a pool of random multiples of 1/4, or integers; its size is prime, so no axis repeats with its period."""
    seeded = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(low, high, (65537,), generator=seeded, dtype=torch.int16, device="cpu").to(
        torch_dtype(dtype)
    )
    return numbers.div_(4) if dtype.is_floating else numbers


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected magnitude.

    >>> relative_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.25
    >>> relative_error(torch.tensor([1.0, 0.0]), torch.tensor([1.0, torch.nan]))
    inf
    """
    if got.shape != expected.shape:
        return math.inf
    same = (got == expected) | (got.isnan() & expected.isnan()) | expected.isfinite()
    return error_of_numbers(got, expected) if same.all() else math.inf


def error_of_numbers(got: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the relative error, but ignore positions at which a NaN or an infinity is expected.

    oneDNN and PyTorch differ there by design (docs/numerics.md).
    """
    if got.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if (got == expected).all() else math.inf
    if not expected.numel():
        return 0.0
    # bf16 has too few digits for differences
    wide = torch.promote_types(torch.promote_types(got.dtype, expected.dtype), torch.float32)
    got, expected = got.detach().to(wide), expected.detach().to(wide)
    scale, worst = _largest(expected), _largest_difference(got, expected)
    if not math.isfinite(scale):
        finite = expected.isfinite()
        if not finite.any():
            return 0.0
        scale, worst = _largest(expected[finite]), _largest(got[finite] - expected[finite])
    if math.isnan(worst):
        return math.inf
    if worst < _SMALLEST_NORMAL and wide is torch.float32:
        return 0.0
    scale = max(scale, least)
    return worst / scale if scale else worst


def error_of_bytes(got: torch.Tensor, expected: torch.Tensor, most: int = 1) -> float:
    """Return the largest difference of bytes over their range; 0 if they differ as roundings of equal numbers may.

    A quotient close to the middle between two integers becomes one or the other.
    """
    if got.shape != expected.shape:
        return math.inf
    steps = (got.to(torch.int16) - expected.to(torch.int16)).abs()
    return 0.0 if _are_roundings(steps, most) else int(steps.max()) / _BYTE_RANGE


def error_of_rounded(got: torch.Tensor, expected: torch.Tensor, rounding: ShownRounding, least: float = 0.0) -> float:
    """Return the error of numbers behind a rounding; 0 if they differ as other roundings may.

    Large multiples were large sums, whose errors take more of them over the middle between two.
    """
    if got.shape == expected.shape and got.numel():
        steps = (got.double() - expected.double()).abs() / rounding.step
        share = max(_ROUNDED_OTHERWISE_SHARE, 2 * _SUM_ERROR * float(expected.abs().max()) / rounding.step)
        if not rounding.is_grid:
            equal = steps * rounding.step <= TOLERANCE[DataType.F32] * _largest(expected)
            steps = torch.where(equal, 0.0, steps.ceil())
        off = float((steps - steps.round()).abs().max())
        if _are_roundings(steps.round(), rounding.most, share) and off <= _OFF_THE_GRID:
            return 0.0
    return error_of_numbers(got, expected, least)


def rounding_of(node: Node) -> ShownRounding | None:
    """Return the rounding that a node's result shows, of 0.5 behind post-ops ``round, clip, linear 0.5``; else None.

    A number in the middle between two multiples becomes one or the other, and what follows is computed from it.
    """
    found: ShownRounding | None = None
    numbers = torch.zeros(0)
    for post_op in node.post_ops:
        attrs = post_op.attrs
        alg = getattr(attrs, "alg", post_op.op)
        if isinstance(attrs, FakeQuantize) or alg == "round":
            low, high, scale = (attrs.low, attrs.high, attrs.scale) if isinstance(attrs, FakeQuantize) else _WHOLE
            before = 0 if found is None else math.ceil(found.most * found.step / scale)
            numbers = scale * torch.arange(low, high + 1, dtype=torch.float64)
            found = ShownRounding(scale, 1 + before)
        elif found is not None and isinstance(attrs, Eltwise):
            numbers = FUNCTIONS[alg](numbers, attrs.alpha, attrs.beta)
            jumps = numbers.diff().nan_to_num(0.0, 0.0, 0.0).abs()
            step = float(jumps.max()) if jumps.numel() else 0.0
            found = ShownRounding(step, found.most, found.is_grid and alg in ("linear", "clip")) if step else None
        elif alg not in ("add", "sub", "sum"):  # a sum differs as its summand does
            found = None
    return found


def _are_roundings(steps: torch.Tensor, most: int, share: float = _ROUNDED_OTHERWISE_SHARE) -> bool:
    """Return whether few integers differ, none by more than `most` steps."""
    if not steps.numel():
        return True
    worst, differing = float(steps.max()), int((steps > 0).sum())
    return worst <= most and differing <= max(1.0, share * steps.numel())


def steps_of(node: Node, grid: Grid) -> int:
    """Return the steps of a result's grid by which another rounding within a node may change the result."""
    inner = [post_op.attrs.scale for post_op in node.post_ops[:-1] if isinstance(post_op.attrs, FakeQuantize)]
    return 1 + sum(math.ceil(scale / grid.scale) for scale in inner)


def error_of_output(got: torch.Tensor, expected: torch.Tensor, precision: str) -> float:
    """Return the relative error of a model's output.

    Integers and booleans of a model in ``precision`` bf16 come from rounded numbers (labels, codes, images): their
    error is the share of those that differ, or the relative difference of the numbers if it is smaller.
    """
    if precision == "f32" or expected.is_floating_point() or got.shape != expected.shape or not expected.numel():
        return error_of_numbers(got, expected)
    share = (got != expected).double().mean().item()
    return min(share, error_of_numbers(got.double(), expected.double()))


def _largest_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest magnitude of a difference, or NaN if one is NaN; in pieces, since weights may be large."""
    if got.dim() < 2:
        return _largest(got - expected)
    rows = max(1, _PIECE_ELEMENTS * len(got) // got.numel())
    pairs = zip(torch.split(got, rows), torch.split(expected, rows), strict=True)
    found = [_largest(a - b) for a, b in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude, or NaN if a number is NaN."""
    low, high = torch.aminmax(tensor)
    return max(abs(low.item()), abs(high.item())) if not torch.isnan(low) else math.nan
