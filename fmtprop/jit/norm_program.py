"""The program of group normalization: the instructions for a thread's share of the places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iced_x86 import Register

from fmtprop.jit.assembler import at
from fmtprop.jit.channel_program import (
    AREA,
    CHANNELS,
    DST,
    FACTOR,
    FREE,
    FROM,
    LEFT,
    LEFT_INSIDE,
    MEAN,
    MORE,
    PLACES,
    SAVED,
    SRC,
    ChannelProgram,
)
from fmtprop.jit.isa import Isa
from fmtprop.jit.norms import GroupNormArguments


def group_norm(isa: Isa, width: int, *, bf16: bool) -> bytes:
    """Return the program that normalizes groups of channels, image by image; dst may be src.

    `width`: number of vectors of channels that are treated at a time, at most 4; a divisor of the vectors of a row.
    """
    return _GroupNorm(isa, GroupNormArguments, bf16=bf16).program(width)


class _GroupNorm(ChannelProgram):
    def program(self, width: int) -> bytes:
        with self.preserved(*SAVED, FREE):  # an even number: the stack is aligned for calls
            self.portions(FREE, PLACES, "places")
            self.emit("SUB_R64_RM64", PLACES, FREE)
            self.point(SRC, "src", FREE, "row")
            self.point(DST, "dst", FREE, "row")
            with self.repeat(self.argument("images"), MORE):
                self.find_means(width)
                self._combine(MEAN)
                self.total(FACTOR)
                self._combine(FACTOR)
                self.meet()  # the next image's sums go where these are
                with self.preserved(SRC, DST, PLACES):
                    self.normalize(width)
                for pointer in (SRC, DST):
                    self.add(pointer, self.argument("image"))
        return self.finished()

    def _combine(self, slot: int) -> None:
        """Add up the totals of each group's channels; set their slot to the mean, or to one over the deviation."""
        total, x = self.registers(0, 2)
        self.begin()
        self.move(CHANNELS, self.argument("table"))
        with self.repeat(self.argument("groups"), LEFT):
            self.zero(total)
            self.move(FROM, CHANNELS)
            with self._members(FROM):
                self.v("VBROADCASTSS", x, at(FREE, self.slot(FACTOR)))
                self.v("VADDPS", total, total, x)
            self.v("VDIVPS", total, total, self.argument("divisor"))
            if slot == FACTOR:
                self.invert(total, x)
            with self._members(CHANNELS):
                self.emit("VEX_VMOVSS_M32_XMM", at(FREE, self.slot(slot)), Register.XMM0)

    @contextmanager
    def _members(self, entry: int) -> Iterator[None]:
        """Add a loop over a group's channels: `FREE` points to the channel in the area, `entry` to it in the table."""
        with self.repeat(self.argument("group"), LEFT_INSIDE):
            self.move(FREE, at(entry))
            self.add(FREE, AREA)
            yield
            self.advance(8, entry)
