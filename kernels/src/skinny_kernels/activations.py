"""Activations of vectors of numbers, as parts of kernels."""

from __future__ import annotations

from math import pi
from typing import Any

from skinny_kernels.vectors import Emitter

# ``CAP`` is ``c tanh(x / c)``, which keeps numbers between -c and c; the others take no ``c``.
NOT_GATED, SILU, GELU_TANH, GELU, CAP = range(5)
SQRT_HALF = 0.5**0.5
ERFC: tuple[float, ...] = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806)
ERFC += (0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)


def activated(emitter: Emitter, activation: int, g: Any) -> Any:
    """Return silu(g), or gelu(g) by tanh or by erf, of a vector; each is g times a share.

    silu(g) = g s(g) and, by tanh, gelu(g) = g s(2 sqrt(2 / pi) (g + 0.044715 g^3)), where s(z) is
    1 / (1 + e^-z), computed as e^z / (1 + e^z) for z < 0. By erf, gelu(g) is
    g erfc(-g / sqrt(2)) / 2 (Hendrycks and Gimpel, arXiv 1606.08415); erfc has a fractional error
    of 1.2e-7 (Press et al., Numerical Recipes, 6.2: Chebyshev fitting).
    """
    b, ones, zeros = emitter.b, emitter.splat(1.0), emitter.splat(0.0)
    if activation == GELU:
        z = b.fmul(g, emitter.splat(SQRT_HALF))
        negative = b.fcmp_ordered("<", z, zeros)
        size = b.select(negative, b.fsub(zeros, z), z)
        t = b.fdiv(ones, emitter.fma(size, emitter.splat(0.5), ones))
        power = emitter.splat(ERFC[-1])
        for factor in reversed(ERFC[:-1]):
            power = emitter.fma(power, t, emitter.splat(factor))
        raised = emitter.exponential(emitter.fma(b.fsub(zeros, size), size, power))
        half = b.fmul(b.fmul(t, raised), emitter.splat(0.5))
        return b.fmul(g, b.select(negative, half, b.fsub(ones, half)))
    z = g
    if activation == GELU_TANH:
        cubic = emitter.fma(b.fmul(g, g), emitter.splat(0.044715), ones)
        z = b.fmul(b.fmul(g, emitter.splat(4 * SQRT_HALF * pi**-0.5)), cubic)
    negative = b.fcmp_ordered("<", z, zeros)
    t = emitter.exponential(b.select(negative, z, b.fsub(zeros, z)))
    above = b.fmul(g, b.select(negative, t, ones))
    return b.fdiv(above, b.fadd(ones, t))


def capped(emitter: Emitter, x: Any, limit: Any) -> Any:
    """Return ``c tanh(x / c)`` of a vector; ``limit`` repeats c.

    Of z = |x / c|, tanh(z) is (1 - e^-2z) / (1 + e^-2z), and below 1/8, where that cancels,
    z - z^3/3 + 2z^5/15 - 17z^7/315, which is off by 2e-9 of it.
    """
    b, ones = emitter.b, emitter.splat(1.0)
    bits = b.bitcast(x, emitter.integers)
    sign = b.and_(bits, emitter.constant(1 << 31))
    size = b.bitcast(b.xor(bits, sign), emitter.vector)
    z = b.fdiv(size, limit)
    t = emitter.exponential(b.fmul(z, emitter.splat(-2.0)))
    far = b.fdiv(b.fsub(ones, t), b.fadd(ones, t))
    square = b.fmul(z, z)
    series = emitter.splat(-17 / 315)
    for factor in (2 / 15, -1 / 3, 1.0):
        series = emitter.fma(series, square, emitter.splat(factor))
    is_near = b.fcmp_ordered("<", z, emitter.splat(0.125))
    share = b.fmul(b.select(is_near, b.fmul(z, series), far), limit)
    return b.bitcast(b.or_(b.bitcast(share, emitter.integers), sign), emitter.vector)
