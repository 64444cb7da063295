"""The blocks of a plan file while it is written: flat bytes, each stored once however many plans read it."""

from __future__ import annotations

import torch

from fmtprop.layout import MemoryDesc
from fmtprop.planfile.container import padded


class Blocks:
    """Blocks by the tensor whose bytes they are."""

    def __init__(self) -> None:
        #: the blocks, filled up to the alignment
        self.padded: list[torch.Tensor] = []
        #: the formats of those that are a plan's numbers
        self.formats: dict[int, MemoryDesc] = {}
        self._places: dict[int, int] = {}
        self._owners: list[torch.Tensor] = []  # ids are of objects that live

    def place(self, flat: torch.Tensor, bytes_: torch.Tensor, desc: MemoryDesc | None = None) -> int:
        """Return the place of some bytes, which are those of a plan's constant, in a format."""
        if id(flat) not in self._places:
            self._places[id(flat)] = len(self.padded)
            if desc is not None:
                self.formats[len(self.padded)] = desc
            self._owners.append(flat)
            self.padded.append(padded(bytes_))
        return self._places[id(flat)]

    def known(self, flat: torch.Tensor) -> int | None:
        """Return the place of a constant's bytes, None where no plan in the file has them."""
        return self._places.get(id(flat))
