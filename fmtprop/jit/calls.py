"""Calls of native functions one after another, with no Python between them.

A call through ctypes takes half a microsecond, and meanwhile the other threads of the run wait. A plan of a hundred
short steps gains 1 to 6 % when they are one call (docs/experiments.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int, c_uint64, c_void_p
from functools import cache
from typing import Any

from fmtprop.jit import denormals
from fmtprop.jit.memory import place_code

#: (function, four arguments), ctypes objects made once; the function returns 0 or an error status
Call = tuple[Callable[..., Any], Any, Any, Any, Any]

_PLACES = ("a", "b", "c", "d")


class _Record(ctypes.Structure):
    """A call as the code reads it."""

    _fields_ = (
        ("function", c_uint64),
        *((name, c_uint64) for name in _PLACES),
        ("status", c_uint64),  # mask of the status bits in the result; 0 for a function without result
    )


class CallList:
    """A list of native functions, called in order until one fails.

    `calls`: functions of a shared library, with pointers or integers; the data behind the pointers must outlive the
    list. `flushes`: whether denormal numbers are zero meanwhile (:mod:`fmtprop.jit.denormals`). Raises OSError if the
    system allows no executable memory.

    One thread at a time may run a list. Python's lock is released for the whole run, so signals (Ctrl-C) are handled
    afterwards.
    """

    def __init__(self, calls: Sequence[Call], *, flushes: bool = False) -> None:
        self._calls = tuple(calls)
        self._records = (_Record * len(calls))(*map(_record, calls))
        start, nbytes = ctypes.addressof(self._records), ctypes.sizeof(self._records)
        self._reached = c_uint64(start + nbytes)
        #: the whole list as a call
        self.call: Call = (
            _routine(flushes),
            *(c_void_p(start), c_void_p(start + nbytes), c_void_p(ctypes.addressof(self._reached)), None),
        )

    @property
    def reached(self) -> Call | None:
        """The call that failed in the last run; None if all succeeded."""
        index = (self._reached.value - ctypes.addressof(self._records)) // ctypes.sizeof(_Record)
        return self._calls[index] if index < len(self._calls) else None


def _record(call: Call) -> _Record:
    function, *arguments = call
    pointer = ctypes.cast(function, c_void_p).value  # type: ignore[arg-type]  # a ctypes function
    return _Record(pointer, *map(_bits, arguments), 0 if function.restype is None else 0xFFFFFFFF)  # type: ignore[attr-defined]


def _bits(argument: Any) -> int:
    """Return the register's value when ctypes passes an argument."""
    if argument is None:
        return 0
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument)
    return (argument.value or 0) & 0xFFFFFFFFFFFFFFFF


@cache
def _routine(flushes: bool) -> Any:
    return CFUNCTYPE(c_int, *[c_void_p] * 4)(place_code(_program(denormals.brackets() if flushes else None)))


def _program(brackets: tuple[int, int] | None) -> bytes:
    """Return ``int run(record, end, reached)``, which calls records until one fails and stores where it stopped.

    Between functions at two addresses, if given: the second is called only if the first returns another number than 0.
    """
    from iced_x86 import Register

    from fmtprop.jit.assembler import Assembler, at
    from fmtprop.jit.isa import AVX2

    a = Assembler(AVX2)  # any instruction set: there are no vectors
    saved = (Register.RBX, Register.RBP, Register.R12, Register.R13, Register.R14)
    for register in saved:
        a.emit("PUSH_R64", register)  # together with the return address, they align the stack for the calls
    a.emit("MOV_R64_RM64", Register.RBX, Register.RDI)
    a.emit("MOV_R64_RM64", Register.RBP, Register.RSI)
    a.emit("MOV_R64_RM64", Register.R12, Register.RDX)
    a.emit("XOR_R32_RM32", Register.R13D, Register.R13D)
    if brackets is not None:
        a.call(brackets[0])
        a.emit("MOV_R32_RM32", Register.R13D, Register.EAX)
    a.label("next")
    a.emit("XOR_R32_RM32", Register.EAX, Register.EAX)
    a.emit("CMP_R64_RM64", Register.RBX, Register.RBP)
    a.branch("JAE_REL32_64", "done")
    for place, register in zip(_PLACES, (Register.RDI, Register.RSI, Register.RDX, Register.RCX), strict=True):
        a.emit("MOV_R64_RM64", register, at(Register.RBX, getattr(_Record, place).offset))
    a.emit("CALL_RM64", at(Register.RBX, _Record.function.offset))
    a.emit("AND_R32_RM32", Register.EAX, at(Register.RBX, _Record.status.offset))
    a.branch("JNE_REL32_64", "done")
    a.immediate("ADD_RM64_IMM8", Register.RBX, ctypes.sizeof(_Record))
    a.branch("JMP_REL32_64", "next")
    a.label("done")
    a.emit("MOV_RM64_R64", at(Register.R12), Register.RBX)
    if brackets is not None:
        a.emit("MOV_R32_RM32", Register.R14D, Register.EAX)
        a.emit("TEST_RM32_R32", Register.R13D, Register.R13D)
        a.branch("JE_REL32_64", "out")
        a.call(brackets[1])
        a.label("out")
        a.emit("MOV_R32_RM32", Register.EAX, Register.R14D)
    for register in reversed(saved):
        a.emit("POP_R64", register)
    a.emit("RETNQ")
    return a.code()
