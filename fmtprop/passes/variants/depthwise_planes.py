"""Depthwise convolutions over one or three axes as depthwise convolutions over two, for which kernels exist.

oneDNN's kernels for one channel per group are for images. On other ranks it computes 16 channels for each one, or runs
a general product for each group. A row is an image of one row or one column. A volume is as many images as it has
planes: each plane of the window is one convolution of images, and the sum of these is the result. In channels-last
formats all views are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, Node, PostOp, Value
from fmtprop.ir.tensors import torch_dtype
from fmtprop.ops import Binary, Concat, Conv, Permute, Reshape, Slice
from fmtprop.passes.variants.expand import ExpandingPass, Expansion, has_constant_parameters, is_f32

#: most columns of padding that all kernels take: `jit_dw` pads at most one block of columns, of 4 on AVX2
_FEW_COLUMNS = 4


@dataclass(frozen=True)
class DepthwisePlanes(ExpandingPass):
    """Rewrite depthwise convolutions over one axis or three."""

    #: whether a row becomes an image of one column, for wide padding, and other nodes stay
    upright: bool = False

    def applies(self, graph: Graph, node: Node) -> bool:
        """Whether a node is such a convolution; its source is one volume, or rows."""
        attrs = node.attrs
        if node.op != "convolution" or not isinstance(attrs, Conv) or attrs.groups == 1:
            return False
        channels = graph.type_of(graph.inputs(node.name)["weights"]).dims[1:3]
        if channels != (1, 1) or not has_constant_parameters(graph, node):
            return False
        if len(attrs.strides) == 1:
            return not self.upright or max(*attrs.pad_l, *attrs.pad_r) > _FEW_COLUMNS
        return len(attrs.strides) == 3 and not self.upright and node.results[0].dims[0] == 1

    def growth(self, graph: Graph, node: Node) -> float:
        """Return the expected rounding error: narrow numbers are rounded once more with each plane that is added."""
        if len(node.results[0].dims) < 5 or is_f32(graph, node):
            return 1.0
        return sqrt(graph.type_of(graph.inputs(node.name)["weights"]).dims[3])

    def replace(self, graph: Graph, out: Graph, node: Node) -> None:
        """Add the convolutions of images, and the views before and behind them."""
        if not isinstance(node.attrs, Conv) or len(node.attrs.strides) == 2:
            raise GraphError(f"{node.label} is no depthwise convolution over one axis or three")
        parts = Expansion(graph, out, node)
        if len(node.attrs.strides) == 1:
            _Row(parts, node.attrs, 3 if self.upright else 2).run()
        else:
            _Volume(parts, node.attrs).run()


@dataclass(frozen=True)
class _Row:
    """A convolution over one axis; images get one more axis, of size 1."""

    parts: Expansion
    attrs: Conv
    axis: int

    def run(self) -> None:
        """Add the nodes."""
        parts, attrs, node = self.parts, self.attrs, self.parts.node

        def window(sizes: tuple[int, ...], other: int) -> tuple[int, ...]:
            return (other, *sizes) if self.axis == 2 else (*sizes, other)

        operands = {key: value for key, value in parts.inputs.items() if key in ("src", "weights", "bias")}
        outputs, one, inputs, taps = parts.graph.type_of(operands["weights"]).dims
        window_of = Reshape((outputs, one, inputs, *window((taps,), 1)))
        operands |= {
            "src": self._image("image", operands["src"]),
            "weights": parts.view("window", operands["weights"], window_of),
        }
        read = {name: self._image(name, parts.inputs[name]) for p in node.post_ops for name in p.operands}
        plane = Conv(
            window(attrs.strides, 1),
            window(attrs.dilates, 0),
            window(attrs.pad_l, 0),
            window(attrs.pad_r, 0),
            attrs.groups,
        )
        result = parts.emit("plane", operands, plane)
        parts.carry_post_ops(result.node, node.post_ops, read)
        batch, channels, length = node.results[0].dims
        rows = parts.view("rows", result, Permute((0, 2, 3, 1)))
        joined = parts.view("joined", rows, Reshape((batch, length, channels)))
        parts.view("", joined, Permute((0, 2, 1)))

    def _image(self, part: str, value: Value) -> Value:
        """Return a row as an image; channels are innermost meanwhile, so the added axis has the stride of an image."""
        batch, channels, length = self.parts.graph.type_of(value).dims
        turned = self.parts.view(f"{part}_turned", value, Permute((0, 2, 1)))
        sizes = (1, length) if self.axis == 2 else (length, 1)
        split = self.parts.view(f"{part}_split", turned, Reshape((batch, *sizes, channels)))
        return self.parts.view(part, split, Permute((0, 3, 1, 2)))


@dataclass(frozen=True)
class _Volume:
    """A convolution over three axes of one volume; the planes of its source are a batch of images."""

    parts: Expansion
    attrs: Conv

    def run(self) -> None:
        """Add the nodes."""
        parts, attrs, node = self.parts, self.attrs, self.parts.node
        _, channels, depth, *plane = node.results[0].dims
        taps = parts.graph.type_of(parts.inputs["weights"]).dims[3]
        source = self._with_padding(self._images("images", parts.inputs["src"]))
        within = Conv(attrs.strides[1:], attrs.dilates[1:], attrs.pad_l[1:], attrs.pad_r[1:], attrs.groups)
        total: Value | None = None
        for tap in range(taps):
            operands = {"src": self._seen(source, tap, depth), "weights": self._plane_of_window(tap)}
            tail, read = [], dict[str, Value]()
            if total is not None:
                tail, read = [PostOp("binary", Binary("add"), "total")], {"total": total}
            elif "bias" in parts.inputs:
                operands["bias"] = parts.inputs["bias"]
            if tap == taps - 1:
                tail += node.post_ops
                read |= {name: self._images(name, parts.inputs[name]) for p in node.post_ops for name in p.operands}
            total = parts.emit(f"plane_{tap}", operands, within)
            parts.carry_post_ops(total.node, tail, read)
        if total is None:
            raise GraphError(f"{node.label} has a window without planes")
        images = parts.view("planes", total, Reshape((1, depth, channels, *plane)))
        parts.view("", images, Permute((0, 2, 1, 3, 4)))

    def _images(self, part: str, value: Value) -> Value:
        """Return a volume's planes, or those of a tensor that a post-op reads, as images."""
        _, channels, depth, *plane = self.parts.graph.type_of(value).dims
        turned = self.parts.view(f"{part}_turned", value, Permute((0, 2, 1, 3, 4)))
        return self.parts.view(part, turned, Reshape((depth, channels, *plane)))

    def _with_padding(self, images: Value) -> Value:
        """Return the images with those of the padding before and behind."""
        type_ = self.parts.out.type_of(images)
        zero = torch.zeros((), dtype=torch_dtype(type_.dtype))
        sides = {"before": self.attrs.pad_l[0], "behind": self.attrs.pad_r[0]}
        zeros = {
            side: self.parts.constant(side, zero.expand(count, *type_.dims[1:]).contiguous())
            for side, count in sides.items()
            if count
        }
        if not zeros:
            return images
        joined = [value for value in (zeros.get("before"), images, zeros.get("behind")) if value is not None]
        return self.parts.emit("padded", {f"src_{i}": value for i, value in enumerate(joined)}, Concat(0))

    def _seen(self, source: Value, tap: int, depth: int) -> Value:
        """Return the images that one plane of the window meets."""
        dims = self.parts.out.type_of(source).dims
        start, step = tap * (self.attrs.dilates[0] + 1), self.attrs.strides[0]
        if (start, step, depth) == (0, 1, dims[0]):
            return source
        return self.parts.view(f"seen_{tap}", source, Slice.along(dims, 0, start, depth, step))

    def _plane_of_window(self, tap: int) -> Value:
        """Return the weights of one plane of the window; made only of constants."""
        weights = self.parts.inputs["weights"]
        dims = self.parts.graph.type_of(weights).dims
        groups, _, _, taps, *plane = dims
        if taps > 1:
            weights = self.parts.view(f"cut_{tap}", weights, Slice.along(dims, 3, tap, 1))
        return self.parts.view(f"window_{tap}", weights, Reshape((groups, 1, 1, *plane)))
