"""Functions of one quantized number, by a table: a byte of the result for each byte of the source.

No model has this op. It stands for element-wise nodes between two grids (:class:`~fmtprop.ir.grid.Grid`), where a table
of 256 bytes is the function itself: nothing is computed, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Category, Cost, Grid, OpDef, Operand, Sample, TensorType
from fmtprop.ir.facets import Numbers
from fmtprop.ops.building import Tensors
from fmtprop.ops.quantization import to_bytes, to_reals

#: numbers of a byte
_BYTE = 256


@dataclass(frozen=True)
class Lookup(Attrs):
    """Attributes of a function by a table."""

    #: `src`, `dst`: scale, least and largest multiple of each grid, and whether its bytes must be signed
    src: tuple[float, int, int, bool]
    dst: tuple[float, int, int, bool]
    #: for each byte of the source, read without sign, the byte of the result, without sign
    table: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.table) != _BYTE or not all(0 <= entry < _BYTE for entry in self.table):
            raise ShapeError(f"a table has {_BYTE} bytes, got {len(self.table)} numbers: {self.table[:8]}…")

    @classmethod
    def of(cls, src: Grid, dst: Grid, results: torch.Tensor) -> Lookup:
        """Return the table of a function.

        `results`: its results for :func:`numbers_of` the source's grid, in this order.
        """
        table = to_bytes(results.flatten(), dst).view(torch.uint8)
        read, made = ((grid.scale, grid.low, grid.high, grid.signed) for grid in (src, dst))
        return cls(read, made, tuple(table.tolist()))

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids of source and result."""
        return {
            name: Grid((scale,), low, high, signed=signed)
            for name, (scale, low, high, signed) in (("src", self.src), ("dst", self.dst))
        }


def numbers_of(grid: Grid) -> torch.Tensor:
    """Return the numbers for which the bytes of a grid stand, in the order of the bytes without sign."""
    bytes_ = torch.arange(_BYTE, dtype=torch.int32).to(torch.uint8)
    return to_reals(bytes_ if grid.stored.value == "u8" else bytes_.view(torch.int8), grid)


def infer(attrs: Lookup, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type."""
    return (types["src"],)


def reference(attrs: Lookup, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    grids = attrs.grids
    found = torch.tensor(attrs.table, dtype=torch.int32).to(torch.uint8)[
        to_bytes(tensors["src"], grids["src"]).view(torch.uint8).long()
    ]
    stored = found if grids["dst"].stored.value == "u8" else found.view(torch.int8)
    return (to_reals(stored, grids["dst"]),)


def samples() -> Iterable[Sample]:
    """Yield a sigmoid from signed to unsigned numbers."""
    src, dst = Grid((0.0625,), -128, 127), Grid((1 / 256,), 0, 255)
    yield Sample("sigmoid", Lookup.of(src, dst, numbers_of(src).sigmoid()), {"src": TensorType((2, 17, 5, 7))})


LOOKUP = OpDef(
    name="lookup",
    attrs=Lookup,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    numbers=Numbers(bytes=lambda attrs: Bytes.TABULATED, loses=lambda attrs: frozenset({"nan"})),
    elementwise=True,
    cost=Cost(lambda attrs, gathered: 1.0, pytorch=0.05),
    samples=samples,
)
