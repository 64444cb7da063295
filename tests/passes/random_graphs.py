"""Random small networks as imported graphs: what rewrites, formats and placement can get in each other's way with."""

from __future__ import annotations

import random
from collections.abc import Callable

from fmtprop.ir import Graph, Value
from fmtprop.ops import Concat, Expand, MatMul, Permute, Pooling, Reorder, Reshape, Slice
from fmtprop.ops.host_call import host_call
from tests.passes.rewriting import Builder

#: activations between layers
_FUNCTIONS = ("relu", "tanh", "swish", "logistic", "abs")


class RandomGraph(Builder):
    """Draws nodes, each on results so far: convolutions, residual sums, concats that share parts, views of views.

    Parameters
    ----------
    rng : random.Random
        Decides all.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        batch, height, width = rng.choice([1, 1, 2]), rng.choice([4, 6, 7]), rng.choice([4, 6, 7])
        self.values = [self.input(batch, rng.choice([3, 8, 16, 17]), height, width)]

    def draw(self, steps: int) -> Graph:
        """Return a graph of about so many nodes, with one to three outputs."""
        kinds: list[Callable[[], Value | None]] = [
            self._convolution, self._convolution, self._pair, self._filtered, self._function, self._norm, self._pooled,
            self._added, self._added, self._residual, self._scaled, self._joined, self._joined, self._sliced,
            self._turned, self._flattened, self._expanded, self._product, self._rounded, self._called,
        ]  # fmt: skip
        while len(self.graph) < steps:
            value = self.rng.choice(kinds)()
            if value is not None:
                self.values.append(value)
        others = self.rng.sample(self.values[1:], min(len(self.values) - 1, self.rng.randrange(3)))
        return self.output(*dict.fromkeys([self.values[-1], *others]))

    # ------------------------------------------------------------------ what there is

    def _dims(self, value: Value) -> tuple[int, ...]:
        return self.graph.type_of(value).dims

    def _image(self) -> Value:
        """Return a result of four axes, a late one more often."""
        images = [value for value in self.values if len(self._dims(value)) == 4]
        return self.rng.choice(images[-4:] if self.rng.random() < 0.7 else images)

    def _like(self, value: Value) -> list[Value]:
        return [other for other in self.values if self._dims(other) == self._dims(value)]

    def _new(self, stem: str) -> str:
        return self.graph.fresh_name(stem)

    # ------------------------------------------------------------------ layers

    def _convolution(self) -> Value:
        kernel = self.rng.choice([1, 1, 3])
        same = {"kernel": kernel, "pad_l": kernel // 2}
        source = self._image()
        channels = self._dims(source)[1]
        groups = self.rng.choice([1, 1, 1, 4, channels])
        if channels % groups:
            groups = 1
        outputs = channels if groups > 1 else self.rng.choice([4, 8, 16, 20, channels])
        return self.conv(source, outputs, self._new("conv"), self.rng.random() < 0.7, groups=groups, **same)

    def _filtered(self) -> Value:
        source = self._image()
        outputs = self.rng.choice([16, 32, self._dims(source)[1]])
        return self.conv(source, outputs, self._new("conv"), kernel=3, pad_l=1)

    def _pair(self) -> Value:
        """Return a depthwise convolution behind a 1x1."""
        width = self.rng.choice([8, 16])
        first = self.act(self.conv(self._image(), width, self._new("conv")), "relu", self._new("relu"))
        return self.conv(first, width, self._new("conv"), groups=width, kernel=3, pad_l=1)

    def _residual(self) -> Value:
        """Return a result with what two convolutions make of it added, as residual networks do."""
        source = self._image()
        one = self.act(self.conv(source, 16, self._new("conv"), kernel=3, pad_l=1), "relu", self._new("relu"))
        two = self.conv(one, self._dims(source)[1], self._new("conv"), kernel=3, pad_l=1)
        return self.binary("add", *self.rng.sample([source, two], 2), self._new("add"))

    def _function(self) -> Value:
        return self.act(self.rng.choice(self.values), self.rng.choice(_FUNCTIONS), self._new("act"))

    def _norm(self) -> Value:
        return self.norm(self._image(), self._new("norm"))

    def _pooled(self) -> Value:
        alg, one, zero = self.rng.choice(["max", "avg_include_padding"]), (1, 1), (0, 0)
        return self.op("pooling", Pooling(alg, (3, 3), one, zero, one, one), self._new("pool"), src=self._image())

    def _added(self) -> Value:
        first = self.rng.choice(self.values)
        return self.binary(self.rng.choice(["add", "add", "mul"]), first, self.rng.choice(self._like(first)),
                           self._new("binary"))  # fmt: skip

    def _scaled(self) -> Value:
        source = self._image()
        dims = self._dims(source)
        factors = self.constant(self.random(1, dims[1], 1, 1), self._new("factors"))
        return self.binary("mul", source, factors, self._new("scaled"))

    # ------------------------------------------------------------------ parts and views

    def _joined(self) -> Value:
        first, axis = self._image(), self.rng.choice([1, 1, 1, 0, 2])
        dims = self._dims(first)
        fits = [
            value for value in self.values
            if len(self._dims(value)) == 4 and all(a == b for i, (a, b) in enumerate(zip(dims, self._dims(value),
                                                                                          strict=True)) if i != axis)
        ]  # fmt: skip
        parts = [first, *self.rng.choices(fits, k=self.rng.choice([1, 1, 2]))]
        self.rng.shuffle(parts)
        sources = {f"src_{index}": value for index, value in enumerate(parts)}
        return self.op("concat", Concat(axis), self._new("concat"), **sources)

    def _sliced(self) -> Value | None:
        source = self.rng.choice(self.values)
        dims, axis = list(self._dims(source)), self.rng.choice([0, 1, 1, len(self._dims(source)) - 1])
        if dims[axis] < 2:
            return None
        starts, steps = [0] * len(dims), [1] * len(dims)
        half = dims[axis] // 2
        starts[axis], dims[axis] = self.rng.choice([0, half]), half
        return self.op("slice", Slice(tuple(starts), tuple(dims), tuple(steps)), self._new("slice"), src=source)

    def _turned(self) -> Value:
        source = self.rng.choice(self.values)
        order = list(range(len(self._dims(source))))
        while order == sorted(order):
            self.rng.shuffle(order)
        return self.op("permute", Permute(tuple(order)), self._new("permute"), src=source)

    def _flattened(self) -> Value:
        source = self.rng.choice(self.values)
        dims = self._dims(source)
        if len(dims) == 4:
            shape = (*dims[:2], dims[2] * dims[3])
        else:
            shape = next(((*dims[:-1], a, dims[-1] // a) for a in (2, 3, 7) if dims[-1] % a == 0), (*dims, 1))
        return self.op("reshape", Reshape(shape), self._new("reshape"), src=source)

    def _expanded(self) -> Value | None:
        ones = [value for value in self.values if self._dims(value)[0] == 1]
        if not ones:
            return None
        source = self.rng.choice(ones)
        return self.op("expand", Expand((2, *self._dims(source)[1:])), self._new("expand"), src=source)

    # ------------------------------------------------------------------ others

    def _product(self) -> Value:
        source = self.rng.choice(self.values)
        size = self._dims(source)[-1]
        dims = (*(1,) * (len(self._dims(source)) - 2), size, self.rng.choice([size, 8]))
        weights = self.constant(self.random(*dims), self._new("weights"))
        return self.op("matmul", MatMul(), self._new("matmul"), src=source, weights=weights)

    def _rounded(self) -> Value:
        """Return a result that went through bf16, by nodes that have the names which passes give theirs."""
        narrow = self.op("reorder", Reorder("bf16"), src=self.rng.choice(self.values))
        return self.op("reorder", Reorder("f32"), src=narrow)

    def _called(self) -> Value:
        source = self.rng.choice(self.values)
        attrs, _ = host_call("aten.cumsum.default", {"self": source, "dim": len(self._dims(source)) - 1})
        return self.op("aten", attrs, self._new("cumsum"), src_0=source)


def random_graph(seed: int, steps: int = 24) -> Graph:
    """Return the random graph of a seed."""
    return RandomGraph(random.Random(seed)).draw(steps)
