"""Instruction sets, and a system that forbids machine code of our own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fmtprop import dnnl
from fmtprop.jit import (
    attention,
    attention_rows,
    average,
    bag,
    batch_norms,
    depthwise,
    dequantize,
    gemv,
    given_norm,
    grouped_convolution,
    lstm_bytes,
    memory,
    no_code,
    norms,
    quantize_rows,
    recurrent,
    rotary,
    round,
    row_norm,
    rows,
    softmax,
    standalone,
    unavailable,
)
from fmtprop.jit.isa import AVX2, AVX512, Isa

_NARROW = pytest.mark.skipif("avx512" not in dnnl.lib().isa, reason="this CPU has no AVX-512")


@pytest.fixture(params=[AVX2, pytest.param(AVX512, marks=_NARROW)], ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isa:
    """Kernels of whole nodes are those of this instruction set."""
    kernels = (attention, attention_rows, bag, batch_norms, depthwise, gemv, given_norm, grouped_convolution, norms)
    for module in (
        standalone,
        *kernels,
        average,
        dequantize,
        lstm_bytes,
        quantize_rows,
        recurrent,
        rotary,
        round,
        row_norm,
        rows,
        softmax,
    ):
        monkeypatch.setattr(module, "isa", lambda: request.param)
    return request.param


@pytest.fixture
def no_executable_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(code: bytes) -> int:
        raise OSError(13, "mprotect refuses")

    monkeypatch.setattr(memory, "place_code", refuse)
    for asked in (no_code, unavailable):
        asked.cache_clear()
    yield
    for asked in (no_code, unavailable):
        asked.cache_clear()
