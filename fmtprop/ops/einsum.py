"""`einsum`, as permutations, reshapes, and a matrix product or a multiplication for each further tensor.

Owns the reading of an equation: axes that both factors and the result have are batch axes, those that the result lacks
are summed, those of one factor are its rows or columns. More than two tensors are multiplied in PyTorch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fmtprop.ir import Call, Value
from fmtprop.ops.arguments import computable
from fmtprop.ops.binary import Binary
from fmtprop.ops.view_attrs import permuted, reshaped

#: a tensor, and a letter for each of its axes
Factor = tuple[Value, str]

#: emits the product of two tensors, as ``torch.matmul`` does
Multiply = Callable[[Call, Value, Value], Value | None]

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Contraction:
    """The matrix product of an equation: a name for each axis."""

    #: axes of the result before rows and columns; a factor that lacks one is broadcast along it
    batch: str
    #: `rows`, `columns`: axes of the left and of the right factor alone, in the order of the result
    rows: str
    columns: str
    #: axes of both factors that the result lacks
    summed: str
    #: whether the left factor is the second operand
    swapped: bool = False

    @property
    def result(self) -> str:
        """Axes of the product."""
        return self.batch + self.rows + self.columns


def contraction(left: str, right: str, result: str) -> Contraction | None:
    """Return the matrix product of two tensors with named axes; None if it is none.

    Axes of one factor can be batch axes as well, if the result then needs no permutation.

    >>> contraction("bhid", "bhjd", "bhij")
    Contraction(batch='bh', rows='i', columns='j', summed='d', swapped=False)
    >>> contraction("ij", "bjw", "biw").batch
    'b'
    >>> contraction("ij", "ij", "i") is None
    True
    """
    if any(len(set(axes)) != len(axes) for axes in (left, right, result)):
        return None  # a diagonal
    if (set(left) ^ set(right)) - set(result) or set(result) - set(left + right):
        return None  # an axis of one factor is summed
    batch = "".join(axis for axis in result if axis in left and axis in right)
    rows = "".join(axis for axis in result if axis not in right)
    columns = "".join(axis for axis in result if axis not in left)
    summed = "".join(axis for axis in left if axis not in result)
    if not summed or not (rows or columns):
        return None
    for count in range(len(batch), len(result)):
        lead, rest = result[:count], result[count:]
        inner_rows, inner_columns = ("".join(axis for axis in rest if axis in axes) for axes in (rows, columns))
        if not inner_rows or not inner_columns or not set(batch) <= set(lead):
            continue
        if rest == inner_rows + inner_columns:
            return Contraction(lead, inner_rows, inner_columns, summed)
        if rest == inner_columns + inner_rows:
            return Contraction(lead, inner_columns, inner_rows, summed, swapped=True)
    return Contraction(batch, rows, columns, summed)


def import_einsum(call: Call, multiply: Multiply) -> Value | None:
    """Emit the nodes of ``aten.einsum``, with a function for products; None where PyTorch's operator runs it."""
    operands: Sequence[Value] = call["tensors"]
    named = _named(call["equation"], [call.type(value).ndim for value in operands])
    if named is None:
        return None
    *axes, result = named
    if len(operands) == 1:
        alike = sorted(axes[0]) == sorted(result) and len(set(result)) == len(result)
        return permuted(call, operands[0], [axes[0].index(axis) for axis in result]) if alike else None
    factors = list(zip(operands, axes, strict=True))
    sizes = _sizes(call, factors)
    if sizes is None:
        return None
    path = call["path"] or [0, 1] * (len(operands) - 1)
    for first, second in zip(path[::2], path[1::2], strict=True):
        pair = factors[first], factors[second]
        factors = [factor for place, factor in enumerate(factors) if place not in (first, second)]
        read = set(result).union(*(axes_of for _, axes_of in factors))
        product = _product(call, multiply, *pair, result if not factors else read, sizes)
        if product is None:
            return None
        factors.insert(0 if call["path"] is None else len(factors), product)
    return factors[0][0]


def _product(
    call: Call, multiply: Multiply, left: Factor, right: Factor, wanted: str | set[str], sizes: Mapping[str, int]
) -> Factor | None:
    """Return the product of two tensors with the wanted axes, in their order if that is a text; None if it is none."""
    (_, rows_of), (_, columns_of) = left, right
    both = dict.fromkeys(rows_of + columns_of)
    result = wanted if isinstance(wanted, str) else "".join(axis for axis in both if axis in wanted)
    if len(set(rows_of)) == len(rows_of) and len(set(columns_of)) == len(columns_of) and set(result) == set(both):
        if len(result) != len(both) or not computable(call, left[0], right[0]):
            return None
        factors = {f"src_{i}": _arranged(call, *factor, result, ()) for i, factor in enumerate((left, right))}
        return call.emit("binary", factors, Binary("mul")), result
    product = contraction(rows_of, columns_of, result)
    if product is None:
        return None
    if product.swapped:
        left, right = right, left
    src = _arranged(call, *left, product.batch, (product.rows, product.summed))
    weights = _arranged(call, *right, product.batch, (product.summed, product.columns))
    dst = multiply(call, src, weights)
    if dst is None:
        return None
    dst = reshaped(call, dst, [sizes[axis] for axis in product.result])
    if not isinstance(wanted, str):
        return dst, product.result
    return permuted(call, dst, [product.result.index(axis) for axis in result]), result


def _arranged(call: Call, value: Value, axes: str, batch: str, matrix: Sequence[str]) -> Value:
    """Return a factor as a batch of matrices; its batch axes have size 1 where it is broadcast."""
    order = [axes.index(axis) for axis in batch + "".join(matrix) if axis in axes]
    sizes = dict(zip(axes, call.type(value).dims, strict=True))
    shape = [*(sizes.get(axis, 1) for axis in batch), *(prod(sizes[axis] for axis in part) for part in matrix)]
    return reshaped(call, permuted(call, value, order), shape)


def _sizes(call: Call, factors: Sequence[tuple[Value, str]]) -> dict[str, int] | None:
    """Return the size of each named axis; None if a factor is broadcast along a named axis, or is empty."""
    sizes: dict[str, int] = {}
    for value, axes in factors:
        for axis, size in zip(axes, call.type(value).dims, strict=True):
            if size == 0 or sizes.setdefault(axis, size) != size:
                return None
    return sizes


def _named(equation: str, ranks: Sequence[int]) -> list[str] | None:
    """Return one letter for each axis of the operands and of the result; None if there are not enough."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    axes = terms.split(",")
    if len(axes) != len(ranks):
        return None
    free = [letter for letter in _LETTERS if letter not in equation]
    if not arrow:
        result = "..." * ("..." in terms) + "".join(sorted(a for a in set(terms) - set("., ") if terms.count(a) == 1))
    widest = max(rank - len(term.replace("...", "")) for rank, term in zip(ranks, axes, strict=True))
    dots = "".join(free[: max(widest, 0)])
    if len(dots) < widest:
        return None
    named = []
    for rank, term in zip(ranks, axes, strict=True):
        hidden = rank - len(term.replace("...", ""))
        named.append(term.replace("...", dots[len(dots) - hidden :]))
    return [*named, result.replace("...", dots)]
