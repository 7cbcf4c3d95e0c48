"""Numbers: rounding, and the activations of gates. All is computed in float32."""

from __future__ import annotations

import triton
import triton.language as tl

SILU, GELU, GELU_TANH, RELU, RELU2 = (tl.constexpr(i) for i in range(5))

ACTIVATIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "relu": RELU,
    "relu2": RELU2,
}
"""``ACTIVATION`` of a kernel, by config.json's name."""


@triton.jit
def rounded(x, dtype: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """float32 numbers to the nearest of dtype, ties to even: the interpreter cuts bits off for bfloat16."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), which overflows for no x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of float32 numbers."""
    if ACTIVATION == SILU:
        return x * sigmoid(x)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        y = tl.minimum(tl.maximum(x, -20.0), 20.0)  # beyond, nothing changes; the cube would overflow
        return x * sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # (1 + tanh(z)) / 2 = sigmoid(2 z)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive if ACTIVATION == RELU2 else positive
