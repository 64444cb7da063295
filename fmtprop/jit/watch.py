"""Comparison of words in memory with their earlier values: two instructions for each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from fmtprop.jit.memory import place_code


class _Word(ctypes.Structure):
    _fields_ = (("address", c_uint64), ("value", c_uint64))


class Words:
    """Words of four bytes, and their values when the watch was made.

    `addresses`: addresses of the words. The memory must live as long as the watch is asked. Raises OSError if the
    system allows no executable memory.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        words = [_Word(address, c_uint32.from_address(address).value) for address in addresses]
        self._words = (_Word * len(words))(*words)
        start = ctypes.addressof(self._words)
        self._routine, self._range = _routine(), (start, start + ctypes.sizeof(self._words))

    @property
    def has_changed(self) -> bool:
        """Whether a word has another value now."""
        return bool(self._routine(*self._range))


@cache
def _routine() -> Any:
    return CFUNCTYPE(c_int, c_void_p, c_void_p)(place_code(_program()))


def _program() -> bytes:
    """Return ``int changed(word, end)``, which returns 1 at the first word that differs, else 0."""
    from iced_x86 import Register

    from fmtprop.jit.assembler import Assembler, at
    from fmtprop.jit.isa import AVX2

    a = Assembler(AVX2)  # any instruction set: there are no vectors
    a.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
    a.label("next")
    a.emit("CMP_R64_RM64", Register.RDI, Register.RSI)
    a.branch("JAE_REL32_64", "done")
    a.emit("MOV_R64_RM64", Register.RDX, at(Register.RDI, _Word.address.offset))
    a.emit("MOV_R32_RM32", Register.ECX, at(Register.RDX))
    a.emit("CMP_R32_RM32", Register.ECX, at(Register.RDI, _Word.value.offset))
    a.branch("JNE_REL32_64", "changed")
    a.immediate("ADD_RM64_IMM8", Register.RDI, ctypes.sizeof(_Word))
    a.branch("JMP_REL32_64", "next")
    a.label("changed")
    a.immediate("MOV_R32_IMM32", Register.EAX, 1)
    a.label("done")
    a.emit("RETNQ")
    return a.code()
