"""Convolutions by Winograd's minimal filtering along one axis: fewer products, with oneDNN's primitives.

A convolution with a kernel of ``r`` rows that computes ``m`` rows at a time needs ``n = m + r - 1`` products per
window instead of ``m r``: 6 instead of 12 for ``m = 4, r = 3``. With the matrices A, B and G of Toom and Cook, rows
``y`` of the result come from rows ``x`` of the source and the kernel ``w`` as ``y = A^T ((G w) * (B^T x))``. Here
``*`` pairs the rows; ordinary convolutions of one row sum over channels and columns. In the graph there are, for each
of the ``n`` rows of a tile, a depthwise convolution (a row of B^T; its stride is the tile's height, its padding the
original's) and a convolution one row high. After them comes one matrix product with A^T, with the bias and the
post-ops. All tensors are channels-last, so every view between them is free. The result is copied once, to be dense,
only if there are several images and tiles reach beyond their last rows.

The gradient by the source is a convolution, too: of the gradient by the result, with the kernel turned around and the
channels exchanged. Weights that are no constants (in training) are transformed in each run, by one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from math import prod, sqrt
from typing import ClassVar

import torch

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, Node, PostOp, Value
from fmtprop.ops import Binary, Concat, Conv, ConvGradient, MatMul, Permute, Reshape, Slice
from fmtprop.passes.variants.expand import ExpandingPass, Expansion, has_varying_source, is_f32

#: products of a tile -> points at which its polynomials are evaluated, in addition to infinity. A search found them to
#: have the least rounding errors, or almost; they and the entries of A and B are exact in f32
_POINTS: Mapping[int, tuple[float, ...]] = {
    4: (0, 1, -1),
    6: (0, 0.625, -0.625, 1.5, -1.5),
    8: (0, 0.5, -0.5, 1, -1, 2, -2),
}

#: rows of the kernel -> rows of the result in a tile, those with an error of at most 1.6 times the direct one. Larger
#: tiles double that (six rows of a window of three: 3.1) and save little: by cost, 1 % of VGG-16 (AVX2: 3 %), nothing
#: of ResNet-18 and ResNet-50, 1 % of Inception v3, whose error they brought from 1.6 to 2.7 times that of PyTorch
ROWS = {3: (4, 2), 5: (2,)}

#: factor of the result's error over its products' errors, from the sums of a tile before and after them (random
#: numbers, 64 to 256 channels: 1.15 to 1.2)
_ADDING_RATIO = 1.2

#: approximate factor of the time if the result is copied
_COPY_RATIO = 1.08

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Tile:
    """The matrices of F(m, r): ``m`` rows of a result by a kernel of ``r``, with ``n = m + r - 1`` products.

    Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
    """

    #: A^T, m by n
    output: Matrix
    #: B^T, n by n
    source: Matrix
    #: g, n by r
    kernel: Matrix

    @classmethod
    @cache
    def make(cls, rows: int, taps: int) -> Tile:
        """Return F(rows, taps).

        >>> [[int(number) for number in row] for row in Tile.make(2, 3).output]
        [[1, 1, 1, 0], [0, 1, -1, 1]]
        """
        size = rows + taps - 1
        points = [Fraction(point) for point in _POINTS[size]]
        output = [[*(point**i for point in points), Fraction(i == rows - 1)] for i in range(rows)]
        others = [[b for b in points if b != a] for a in points]
        source = [[*_monic(roots), Fraction(0)] for roots in others] + [_monic(points)]
        scale = [prod(a - b for b in roots) for a, roots in zip(points, others, strict=True)]
        kernel = [[a**i / by for i in range(taps)] for a, by in zip(points, scale, strict=True)]
        kernel.append([Fraction(i == taps - 1) for i in range(taps)])
        return cls(*(tuple(map(tuple, matrix)) for matrix in (output, source, kernel)))

    @property
    def rows(self) -> int:
        """Rows of the result in a tile."""
        return len(self.output)

    @cached_property
    def growth(self) -> float:
        """Expected rounding error relative to a direct convolution's, as a ratio of root mean squares.

        The error of a sum grows as the square root of the number of summands, and a row of products adds up fewer
        numbers than a direct convolution. But the matrices magnify terms that cancel in the result, and their errors
        remain.

        >>> [round(Tile.make(rows, 3).growth, 1) for rows in (2, 4, 6)]
        [0.9, 1.5, 3.1]
        """
        lengths = [_square(g) * _square(b) for g, b in zip(self.kernel, self.source, strict=True)]
        errors = [sum(a * a * length for a, length in zip(row, lengths, strict=True)) for row in self.output]
        return _ADDING_RATIO * sqrt(sum(errors) / len(errors)) / len(self.kernel[0])


def _square(row: Iterable[Fraction]) -> Fraction:
    return sum((number * number for number in row), Fraction(0))


def _monic(roots: Iterable[Fraction]) -> list[Fraction]:
    """Return the coefficients of the polynomial with these roots, the constant first."""
    found = [Fraction(1)]
    for root in roots:
        found = [high - root * low for high, low in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return found


@dataclass(frozen=True)
class Winograd(ExpandingPass):
    """Rewrite convolutions.

    Rounding errors grow by :attr:`Tile.growth`; an infinity in the source spreads, as infinity or NaN, over the rows
    of its tile.
    """

    is_by_types: ClassVar[bool] = True

    #: rows of the result in a tile; default: those with the fewest products
    rows: int | None = None

    def applies(self, graph: Graph, node: Node) -> bool:
        """Whether a node is a convolution that can be filtered."""
        return self.tile(graph, node) is not None

    def replace(self, graph: Graph, out: Graph, node: Node) -> None:
        """Add the steps of a filtered convolution."""
        _Filtering(graph, out, node, self.tile(graph, node)).run()

    def growth(self, graph: Graph, node: Node) -> float:
        """Return the expected rounding error, relative to the direct convolution's."""
        tile = self.tile(graph, node)
        return 1.0 if tile is None else tile.growth

    def forms(self) -> tuple[Winograd, ...]:
        """Return a pass for each height of tiles."""
        return tuple(Winograd(rows=rows) for rows in sorted({rows for several in ROWS.values() for rows in several}))

    def tile(self, graph: Graph, node: Node) -> Tile | None:
        """Return the tile for a convolution; None if it cannot be filtered."""
        window = _window_of(graph, node)
        if window is None:
            return None
        weights = graph.type_of(graph.inputs(node.name)["weights"])
        if (
            weights.dims[2] not in ROWS
            or weights.dims[not window.turned] < 2  # a depthwise convolution of one channel would be an ordinary one
            or not is_f32(graph, node)
            or not has_varying_source(graph, node, window.source)
        ):
            return None
        wanted = [rows for rows in ROWS[weights.dims[2]] if self.rows in (None, rows)]
        tiles = [Tile.make(rows, weights.dims[2]) for rows in wanted]
        return _cheapest(tiles, node.results[0].dims, _leading(graph, node) < len(node.post_ops)) if tiles else None


@dataclass(frozen=True)
class _Window:
    """A convolution with stride 1 along the rows, or its gradient by the source, which is such a convolution, too."""

    #: the operand over which it slides
    source: str
    #: of the columns
    stride: int
    dilate: int
    pad_l: tuple[int, ...]
    pad_r: tuple[int, ...]
    #: whether the kernel is turned around, and its channels are exchanged
    turned: bool = False


def _window_of(graph: Graph, node: Node) -> _Window | None:
    """Return a node's window; None if the node is no such convolution."""
    attrs, weights = node.attrs, graph.inputs(node.name).get("weights")
    if not isinstance(attrs, Conv | ConvGradient) or weights is None:  # a gradient by the weights reads none
        return None
    if attrs.groups != 1 or len(attrs.strides) != 2 or (attrs.strides[0], attrs.dilates[0]) != (1, 0):
        return None
    stride, dilate = attrs.strides[1], attrs.dilates[1]
    if isinstance(attrs, Conv):
        return _Window("src", stride, dilate, attrs.pad_l, attrs.pad_r)
    *_, rows, columns = graph.type_of(weights).dims
    reach = rows - 1, (columns - 1) * (dilate + 1)
    pad_l, pad_r = (tuple(a - b for a, b in zip(reach, pad, strict=True)) for pad in (attrs.pad_l, attrs.pad_r))
    if stride != 1 or min(*pad_l, *pad_r) < 0:
        return None
    return _Window("diff_dst", 1, dilate, pad_l, pad_r, turned=True)


def _leading(graph: Graph, node: Node, *, whole: bool = False) -> int:
    """Return the number of leading post-ops that read nothing, or (if tiles are ``whole``) tensors like the result."""
    types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
    fits = [p.operand is None or (whole and types[p.operand] == node.results[0]) for p in node.post_ops]
    return next((number for number, fit in enumerate(fits) if not fit), len(fits))


def _cheapest(tiles: Sequence[Tile], dims: tuple[int, ...], reads: bool) -> Tile:
    """Return the tile with the fewest products for a result [N, C, H, W], approximately."""
    batch, _, height, _ = dims

    def rows_of_products(tile: Tile) -> float:
        tall = -(-height // tile.rows)
        copied = (batch > 1 or reads) and height % tile.rows  # see the module's last sentence
        # a call costs about as much as one row of tiles
        return len(tile.source) * (batch * tall + 1) * (_COPY_RATIO if copied else 1.0)

    return min(tiles, key=rows_of_products)


class _Filtering(Expansion):
    """The nodes that replace one convolution."""

    def __init__(self, graph: Graph, out: Graph, node: Node, tile: Tile | None) -> None:
        super().__init__(graph, out, node)
        window = _window_of(graph, node)
        if tile is None or window is None:
            raise GraphError(f"{node.label} is not a convolution for Winograd's filtering; see Winograd.eligible")
        self.tile, self.window = tile, window

    def run(self) -> None:
        """Add all nodes; the last one has the convolution's name."""
        batch, channels, height, width = self.node.results[0].dims
        tall, size = -(-height // self.tile.rows), len(self.tile.source)
        kernel = self._kernel()
        products = {f"src_{k}": self._product(k, tall, kernel) for k in range(size)}
        whole = self.emit("products", products, Concat(0))
        split = self.view("tiles", whole, Reshape((size, batch, channels, tall, width)))
        turned = self.view("by_row", split, Permute((1, 3, 0, 4, 2)))
        rows = self.view("rows", turned, Reshape((batch * tall, size, width * channels)))
        factors = self.constant("output", _numbers(self.tile.output)[None])
        operands = {"src": factors, "weights": rows}
        if "bias" in self.inputs:
            operands["bias"] = self._bias(width)
        joined = self.emit("joined", operands, MatMul())
        fits = tall * self.tile.rows == height
        within = _leading(self.graph, self.node, whole=fits)
        read = {name: self.inputs[name] for p in self.node.post_ops[:within] for name in p.operands}
        by_tile = {name: self._by_tile(name, value) for name, value in read.items()}
        self.carry_post_ops(joined.node, self.node.post_ops[:within], by_tile)
        behind = self.node.post_ops[within:]
        image = self.view("image", joined, Reshape((batch, tall * self.tile.rows, width, channels)))
        if fits:
            result = self.view("result" if behind else "", image, Permute((0, 3, 1, 2)))
        else:
            padded = self.view("padded", image, Permute((0, 3, 1, 2)))
            cut = Slice.along((batch, channels, tall * self.tile.rows, width), 2, 0, height)
            result = self.view("result" if behind else "", padded, cut)
        if behind:
            self._follow(result, behind)

    def _bias(self, width: int) -> Value:
        """Return the bias for every position of a row; made only of constants."""
        (channels,) = self.graph.type_of(self.inputs["bias"]).dims
        once = self.view("bias_once", self.inputs["bias"], Reshape((1, channels)))
        places = self.constant("places", torch.ones(width, 1))
        row = self.emit("bias_row", {"src_0": places, "src_1": once}, Binary("mul"))
        return self.view("bias", row, Reshape((1, 1, width * channels)))

    def _by_tile(self, name: str, value: Value) -> Value:
        """Return a tensor like the result, in the form of the product of all tiles."""
        batch, channels, height, width = self.node.results[0].dims
        turned = self.view(f"{name}_turned", value, Permute((0, 2, 3, 1)))
        rows = self.tile.rows
        return self.view(f"{name}_rows", turned, Reshape((batch * height // rows, rows, width * channels)))

    def _follow(self, result: Value, post_ops: Sequence[PostOp]) -> None:
        """Add the post-ops that the product of all tiles cannot apply; the first of them reads another tensor."""
        first, *others = post_ops
        attrs = first.attrs if isinstance(first.attrs, Binary) else Binary("add")  # a sum
        inputs = {"src_0": result, "src_1": self.inputs[first.operand or ""]}
        last = self.emit("", inputs, attrs)
        self.carry_post_ops(last.node, others, self.inputs)

    def _product(self, k: int, tall: int, kernel: Value) -> Value:
        """Add the contribution of the ``k``-th row of every tile; return it."""
        window = self.window
        inputs = {"src": self._source(k, tall), "weights": self._row(k, kernel)}
        pad_l, pad_r = (0, window.pad_l[1]), (0, window.pad_r[1])
        return self.emit(f"product_{k}", inputs, Conv((1, window.stride), (0, window.dilate), pad_l, pad_r))

    def _source(self, k: int, tall: int) -> Value:
        """Add the depthwise convolution that makes the ``k``-th row of every tile of the source."""
        row, padding, source = self.tile.source[k], self.window.pad_l[0], self.inputs[self.window.source]
        taps = [i for i, factor in enumerate(row) if factor]
        first, last = min(taps[0], padding), taps[-1]  # no window starts before the padding
        step = 2 if first == taps[0] and {b - a for a, b in pairwise(taps)} == {2} else 1
        _, channels, height, _ = self.graph.type_of(source).dims
        after = max((tall - 1) * self.tile.rows + last + 1 - padding - height, 0)
        factors = _numbers([row[first : last + 1 : step]]).reshape(1, 1, 1, -1, 1)
        weights = self.constant(f"source_{k}", factors.repeat(channels, 1, 1, 1, 1))
        attrs = Conv((self.tile.rows, 1), (step - 1, 0), (padding - first, 0), (after, 0), channels)
        return self.emit(f"source_{k}", {"src": source, "weights": weights}, attrs)

    def _kernel(self) -> Value:
        """Return the transformed kernel [outputs, inputs, rows, columns] of the weights."""
        outputs, inputs, taps, columns = self.graph.type_of(self.inputs["weights"]).dims
        matrix, same = _numbers(self.tile.kernel), torch.eye(columns)
        if self.window.turned:
            matrix, same = matrix.flip(1), same.flip(1)
        factors = self.constant("kernel", torch.kron(matrix, same).t().contiguous())
        flat = self.view("kernel_flat", self.inputs["weights"], Reshape((outputs * inputs, taps * columns)))
        product = self.emit("kernel_product", {"src": flat, "weights": factors}, MatMul())
        return self.view("kernel", product, Reshape((outputs, inputs, len(self.tile.kernel), columns)))

    def _row(self, k: int, kernel: Value) -> Value:
        """Return a row of the transformed kernel, as weights of a convolution one row high."""
        row = self.view(f"kernel_{k}", kernel, Slice.along(self.out.type_of(kernel).dims, 2, k, 1))
        return self.view(f"kernel_{k}_turned", row, Permute((1, 0, 2, 3))) if self.window.turned else row


def _numbers(matrix: Sequence[Sequence[Fraction]]) -> torch.Tensor:
    return torch.tensor([[float(number) for number in row] for row in matrix], dtype=torch.float32)
