"""Programs with tiles: the instructions on them, and the space between configuration and release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.program import Program

#: types of both operands of a product -> its instruction
PRODUCTS = {
    ("bf16", "bf16"): "VEX_TDPBF16PS_TMM_TMM_TMM",
    ("s8", "s8"): "VEX_TDPBSSD_TMM_TMM_TMM",
    ("s8", "u8"): "VEX_TDPBSUD_TMM_TMM_TMM",
    ("u8", "s8"): "VEX_TDPBUSD_TMM_TMM_TMM",
    ("u8", "u8"): "VEX_TDPBUUD_TMM_TMM_TMM",
}


class TileProgram(Program):
    """A program that may use tiles.

    The argument ``"tiles"`` is their description (:func:`fmtprop.jit.tiles.configuration`).
    """

    @contextmanager
    def tiles(self) -> Iterator[None]:
        """Configure the tiles before the instructions of the block, and give them back after it.

        oneDNN's kernels leave their own configuration in a thread, and configure again what they use.
        """
        self.emit("VEX_LDTILECFG_M512", self.argument("tiles"))
        yield
        self.emit("VEX_TILERELEASE")

    def zero_tile(self, number: int) -> None:
        """Set a tile to zeros."""
        self.emit("VEX_TILEZERO_TMM", _tile(number))

    def load_tile(self, number: int, pointer: int, step: int, offset: int = 0) -> None:
        """Load a tile from `offset` bytes behind a pointer; register `step` has the bytes from row to row."""
        self.emit("VEX_TILELOADD_TMM_SIBMEM", _tile(number), at(pointer, offset, step))

    def store_tile(self, pointer: int, step: int, number: int, offset: int = 0) -> None:
        """Store a tile, as :meth:`load_tile` loads it."""
        self.emit("VEX_TILESTORED_SIBMEM_TMM", at(pointer, offset, step), _tile(number))

    def add_products(self, sums: int, first: int, second: int, types: tuple[str, str] = ("bf16", "bf16")) -> None:
        """Add the product of two tiles to a tile of sums: of f32 for bf16, of 32-bit integers for bytes.

        Each four bytes of the second operand have the numbers of a column that meet four bytes of a row of the first:
        pairs of bf16, or four bytes.
        """
        self.emit(PRODUCTS[types], *map(_tile, (sums, first, second)))


def _tile(number: int) -> int:
    return int(Register.TMM0) + number
