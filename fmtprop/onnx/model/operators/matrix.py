"""Products of matrices, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import calling
from fmtprop.onnx.model.operators.values import NotInTorchError, axis_of, integer


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise NotInTorchError(str(a.dtype))
    return torch.matmul(a, b)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Multiply matrices and add a third."""
    if transA:
        a = a.t()
    columns = b.shape[0] if transB else b.shape[1]
    if alpha == beta == 1.0 and a.is_floating_point() and (c is None or tuple(c.shape) in ((columns,), (1, columns))):
        return F.linear(a, b if transB else b.t(), None if c is None else c.reshape(columns))
    product = a @ (b.t() if transB else b)
    if alpha != 1.0:
        product = (product * alpha).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1.0 else (c * beta).to(a.dtype))


def _einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *operands)


# ---------------------------------------------------------------- Fourier transforms


def _complex(x: Tensor) -> Tensor:
    """Return complex numbers from their parts along the last axis; real numbers if it has size 1."""
    if x.shape[-1] == 1:
        return x.squeeze(-1)
    return torch.view_as_complex(x.contiguous())


def _dft(
    x: Tensor,
    length: Tensor | None = None,
    axis: Tensor | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    dim = axis_of(-2 if axis is None else integer(axis, "axis"), x.ndim)
    return _transformed(x, length, dim, bool(inverse), bool(onesided))


def _dft_by_attribute(
    x: Tensor, length: Tensor | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Tensor:
    return _transformed(x, length, axis_of(axis, x.ndim), bool(inverse), bool(onesided))


def _transformed(x: Tensor, length: Tensor | None, axis: int, inverse: bool, onesided: bool) -> Tensor:
    n = None if length is None else integer(length, "dft_length")
    if n is not None and n < 1:
        raise ValueError(f"dft_length is {n}; it must be positive")
    signal = _complex(x)
    if inverse and onesided:
        real: Tensor = torch.fft.irfft(signal, n, axis)
        return real.unsqueeze(-1)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(signal, n, axis).resolve_conj())  # of a real signal, half is a view
    if onesided and not signal.is_complex():
        return torch.view_as_real(torch.fft.rfft(signal, n, axis))
    full = torch.fft.fft(signal, n, axis)
    if onesided:
        full = full.narrow(axis, 0, full.shape[axis] // 2 + 1)
    return torch.view_as_real(full.contiguous())


def _stft(
    x: Tensor,
    step: Tensor,
    window: Tensor | None = None,
    length: Tensor | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    hop = integer(step, "frame_step")
    n = integer(length, "frame_length") if length is not None else x.shape[1] if window is None else window.shape[0]
    if hop < 1 or n < 1:
        raise ValueError(f"frame_step is {hop} and frame_length {n}; both must be positive")
    frames = _complex(x if x.ndim == 3 else x.unsqueeze(-1)).unfold(1, n, hop)
    if window is not None:
        frames = frames * window
    if onesided and not frames.is_complex():
        return torch.view_as_real(torch.fft.rfft(frames))
    full = torch.fft.fft(frames)
    return torch.view_as_real((full.narrow(-1, 0, n // 2 + 1) if onesided else full).contiguous())


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "MatMul": _matmul,
    "Gemm": gemm,
    "Einsum": _einsum,
    "Det": calling(torch.linalg.det),
    "DFT": _dft_by_attribute,
    "DFT-20": _dft,
    "STFT": _stft,
}
