"""Functions of one number, as vector instructions.

Each takes a register with 16 or 8 numbers and returns one with the results. All map 0 to 0, so that the padding of
blocked formats stays zero, and treat infinities and NaN as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2

from fmtprop.jit.assembler import Assembler

__all__ = ["FUNCTIONS"]

#: exp(r) = 1 + r + r^2 (...) for |r| <= ln(2) / 2: found by iterated weighted least squares, off by 3.1e-9 at most
_EXP = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)

#: as an f32 number: the rest makes e^x wrong by 2.7e-9 |x|, relatively
_LN2 = 0.693147182464599609375

#: beyond, e^x is an infinity or 0 in f32, and still fits the arithmetic on exponents
_FAR = 174.0

#: erf(z) = z P(z^2) / Q(z^2) for |z| <= 4, constant terms last, with the coefficients of Eigen's and XLA's
_ERF_P = (
    *(-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05),
    *(-7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def _clamp(a: Assembler, x: int, limit: float) -> int:
    """Return x between -limit and limit; one of the two where x is NaN."""
    y = a.vector()
    if a.isa.nbytes == 64:
        a.v("VRANGEPS", y, x, a.number(limit), immediate=0b0010)  # of the smaller magnitude, with the sign of x
        return y
    a.v("VMINPS", y, x, a.number(limit))
    a.v("VMAXPS", y, y, a.number(-limit))
    return y


def _polynomial(a: Assembler, x: int, coefficients: tuple[float, ...]) -> int:
    """Return a polynomial's value, by Horner's rule; the constant term comes last."""
    p = a.vector()
    first, *rest = coefficients
    a.v("VMOVUPS", p, a.number(first))
    for coefficient in rest:
        a.v("VFMADD213PS", p, x, a.number(coefficient))
    return p


def _exp_of_negative(a: Assembler, x: int) -> int:
    """Return e^-x: 2^n e^-r, where x = r - n ln 2; where x is NaN it is some number."""
    r, n = _clamp(a, x, _FAR), a.vector()
    a.v("VMULPS", n, r, a.number(-log2(2.718281828459045)))
    if a.isa.nbytes == 64:
        a.v("VRNDSCALEPS", n, n, immediate=8)
    else:
        a.v("VROUNDPS", n, n, immediate=8)
    a.v("VFMADD231PS", r, n, a.number(_LN2))
    signed = tuple(c * (-1) ** power for power, c in reversed(list(enumerate((1.0, 1.0, *_EXP)))))
    p = _polynomial(a, r, signed)
    if a.isa.nbytes == 64:
        a.v("VSCALEFPS", p, p, n)
        return p
    half = r  # 2^n may be no f32 number where p 2^n is one: by two factors
    a.v("VCVTPS2DQ", n, n)
    a.v("VPSRAD", half, n, immediate=1)
    a.v("VPSUBD", n, n, half)
    for exponent in (half, n):
        a.v("VPADDD", exponent, exponent, a.integer(127))
        a.v("VPSLLD", exponent, exponent, immediate=23)
        a.v("VMULPS", p, p, exponent)
    return p


def swish(a: Assembler, x: int) -> int:
    """Return x / (1 + e^-x)."""
    e = _exp_of_negative(a, x)
    a.v("VADDPS", e, e, a.number(1.0))
    a.v("VDIVPS", e, x, e)
    return e


def gelu_erf(a: Assembler, x: int) -> int:
    """Return x (1 + erf(x / sqrt(2))) / 2."""
    h, square = a.vector(), a.vector()
    a.v("VMULPS", h, x, a.number(0.7071067811865476))
    z = _clamp(a, h, 4.0)
    a.v("VMULPS", square, z, z)
    p, q = _polynomial(a, square, _ERF_P), _polynomial(a, square, _ERF_Q)
    a.v("VMULPS", p, p, z)
    a.v("VDIVPS", p, p, q)
    a.v("VMINPS", p, p, a.number(1.0))
    a.v("VMAXPS", p, p, a.number(-1.0))
    a.v("VMULPS", h, x, a.number(0.5))
    a.v("VFMADD213PS", p, h, h)
    return p


#: oneDNN's name of an algorithm -> how it is computed
FUNCTIONS: Mapping[str, Callable[[Assembler, int], int]] = {"swish": swish, "gelu_erf": gelu_erf}
