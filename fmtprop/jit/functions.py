"""Functions of one number, as vector instructions.

Each takes a register of 16 or 8 numbers and oneDNN's parameters of the algorithm, and returns a register of results.
Those of `FUNCTIONS` map 0 to 0, so the padding of blocked formats stays zero. All treat infinities and NaN as PyTorch
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import e, log2, pi, sqrt

from fmtprop.jit.assembler import Assembler

#: exp(r) = 1 + r + r^2 (...) for |r| <= ln(2) / 2: fitted by iterated weighted least squares, error at most 3.1e-9
_EXP = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)

#: e^-r = c ((r - a)^2 + b) for |r| <= ln(2) / 64: fitted in the same way, error at most 5.3e-8
_NEAR_A, _NEAR_B, _NEAR_C = 1.0000219345092773, 0.9999706757176563, 0.49999633444159025

#: c 2^(k / 32), for x = a multiple of ln(2) / 32, plus a small r
_ROOTS = tuple(_NEAR_C * 2.0 ** (k / 32) for k in range(32))

#: adding it rounds a number to a multiple of 1/32; the last five bits of the sum are k
_TO_32NDS = 1.5 * 2**18

#: ln(2) rounded to f32; the rounding gives e^x a relative error of 2.7e-9 |x|
_LN2 = 0.693147182464599609375

#: for larger |x|, e^x is infinite or 0 in f32; up to here the arithmetic on exponents does not overflow
_OVERFLOW = 174.0

#: e^-x is taken for 0 from here on, where it is a little less than the second number: so nothing is denormal, which
#: takes a hundred times as long
_SMALLEST, _NOTHING = 86.0, 4.6e-38

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

#: tanh(z) = z P(z^2) / Q(z^2) for |z| below the limit, where it becomes 1: Eigen's and XLA's coefficients, constant
#: terms last
_TANH_P = (
    *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
    *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_TANH_LIMIT = 7.90531110763549805


def _clamp(a: Assembler, x: int, limit: float) -> int:
    """Return x clamped to -limit and limit; a NaN gives one of the two."""
    y = a.vector()
    if a.isa.nbytes == 64:
        a.v("VRANGEPS", y, x, a.number(limit), immediate=0b0010)  # the smaller magnitude, with the sign of x
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


def _one_and_exp_of_negative(a: Assembler, x: int) -> int:
    """Return 1 + e^-x; a NaN gives an arbitrary number."""
    y, power = _factors(a, _clamp(a, x, _OVERFLOW))
    a.v("VFMADD213PS", y, power, a.number(1.0))
    return y


def exp_of_negative(a: Assembler, x: int) -> int:
    """Return e^-x for x >= 0: 0 where this is below 5e-38, NaN for NaN."""
    limited, nothing = a.vector(), a.vector()
    a.v("VMOVUPS", limited, a.number(_SMALLEST))
    a.v("VMINPS", limited, limited, x)  # if an operand is NaN, the last one is returned
    y, power = _factors(a, limited)
    a.v("VMULPS", y, y, power)
    a.v("VMOVUPS", nothing, a.number(_NOTHING))
    a.v("VMAXPS", y, nothing, y)
    a.v("VSUBPS", y, y, nothing)
    return y


def _factors(a: Assembler, x: int) -> tuple[int, int]:
    """Return two factors of e^-x; x is lost."""
    return _by_roots(a, x) if a.isa.nbytes == 64 else _by_exponents(a, x)


def _by_roots(a: Assembler, r: int) -> tuple[int, int]:
    """Return e^-r and 2^n, where r - n ln 2 is the given number and n is a multiple of 1/32.

    The 32 fractional powers fit in two registers, and r is so small that a quadratic polynomial is enough.
    """
    shifted, n = a.vector(), a.vector()
    a.v("VMOVUPS", shifted, a.number(_TO_32NDS))
    a.v("VFMADD231PS", shifted, r, a.number(-log2(e)))
    a.v("VSUBPS", n, shifted, a.number(_TO_32NDS))
    a.v("VFMADD231PS", r, n, a.number(_LN2))
    a.v("VADDPS", r, r, a.number(-_NEAR_A))
    a.v("VFMADD213PS", r, r, a.number(_NEAR_B))
    power = shifted  # its last five bits select the power
    a.v("VPERMI2PS", power, a.loaded(a.lookup(_ROOTS[:16])), a.lookup(_ROOTS[16:]))
    a.v("VSCALEFPS", power, power, n)  # times 2^floor(n)
    return r, power


def _by_exponents(a: Assembler, r: int) -> tuple[int, int]:
    """Return e^-r and 2^n, where r - n ln 2 is the given number and n is an integer; a part of 2^n is in the first."""
    n = a.vector()
    a.v("VMULPS", n, r, a.number(-log2(e)))
    a.v("VROUNDPS", n, n, immediate=8)
    a.v("VFMADD231PS", r, n, a.number(_LN2))
    signed = tuple(c * (-1) ** power for power, c in reversed(list(enumerate((1.0, 1.0, *_EXP)))))
    p, half = _polynomial(a, r, signed), r
    a.v("VCVTPS2DQ", n, n)  # p 2^n can be an f32 number although 2^n is not: multiply by two factors
    a.v("VPSRAD", half, n, immediate=1)
    a.v("VPSUBD", n, n, half)
    for exponent in (half, n):
        a.v("VPADDD", exponent, exponent, a.integer(127))
        a.v("VPSLLD", exponent, exponent, immediate=23)
    a.v("VMULPS", p, p, half)
    return p, n


def swish(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return x / (1 + e^-x)."""
    y = _one_and_exp_of_negative(a, x)
    a.v("VDIVPS", y, x, y)
    return y


def gelu_erf(a: Assembler, x: int, alpha: float, beta: float) -> int:
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


def gelu_tanh(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is x / (1 + e^-y) for twice tanh's argument y."""
    y = a.vector()
    a.v("VMULPS", y, x, x)
    a.v("VMULPS", y, y, a.number(2 * 0.044715 * sqrt(2 / pi)))
    a.v("VADDPS", y, y, a.number(2 * sqrt(2 / pi)))
    a.v("VMULPS", y, y, x)
    y = _one_and_exp_of_negative(a, y)
    a.v("VDIVPS", y, x, y)
    return y


def relu(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return the larger of x and 0."""
    y = a.vector()
    a.v("VXORPS", y, y, y)
    a.v("VMAXPS", y, y, x)  # if an operand is NaN, the last one is returned
    return y


def clip(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return x limited to alpha and beta."""
    y, high = a.vector(), a.vector()
    a.v("VMOVUPS", y, a.number(alpha))
    a.v("VMOVUPS", high, a.number(beta))
    a.v("VMAXPS", y, y, x)  # if an operand is NaN, the last one is returned
    a.v("VMINPS", y, high, y)
    return y


def hardswish(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return x (alpha x + beta), the factor limited to 0 and 1."""
    y, zero, one = a.vector(), a.vector(), a.vector()
    a.v("VMOVUPS", y, a.number(alpha))
    a.v("VFMADD213PS", y, x, a.number(beta))
    a.v("VXORPS", zero, zero, zero)
    a.v("VMOVUPS", one, a.number(1.0))
    a.v("VMAXPS", y, zero, y)  # if an operand is NaN, the last one is returned
    a.v("VMINPS", y, one, y)
    a.v("VMULPS", y, y, x)
    return y


def linear(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return alpha x."""
    y = a.vector()
    a.v("VMULPS", y, x, a.number(alpha))
    return y


def sigmoid(a: Assembler, x: int) -> int:
    """Return 1 / (1 + e^-x)."""
    y, power = _factors(a, _clamp_numbers(a, x, _OVERFLOW))
    a.v("VFMADD213PS", y, power, a.number(1.0))
    a.v("VMOVUPS", power, a.number(1.0))
    a.v("VDIVPS", y, power, y)
    return y


def tanh(a: Assembler, x: int, alpha: float, beta: float) -> int:
    """Return tanh(x)."""
    z, square = _clamp_numbers(a, x, _TANH_LIMIT), a.vector()
    a.v("VMULPS", square, z, z)
    p, q = _polynomial(a, square, _TANH_P), _polynomial(a, square, _TANH_Q)
    a.v("VMULPS", p, p, z)
    a.v("VDIVPS", p, p, q)
    return p


def _clamp_numbers(a: Assembler, x: int, limit: float) -> int:
    """Return x clamped to -limit and limit; a NaN stays one."""
    y, low = a.vector(), a.vector()
    a.v("VMOVUPS", y, a.number(limit))
    a.v("VMOVUPS", low, a.number(-limit))
    a.v("VMINPS", y, y, x)  # if an operand is NaN, the last one is returned
    a.v("VMAXPS", y, low, y)
    return y


#: oneDNN's name of an algorithm -> function that adds its instructions
FUNCTIONS: Mapping[str, Callable[[Assembler, int, float, float], int]] = {
    "swish": swish,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "clip": clip,
    "hardswish": hardswish,
    "linear": linear,
    "tanh": tanh,
}
