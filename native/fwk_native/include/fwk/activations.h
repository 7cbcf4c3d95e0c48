// Activation functions of feed-forward networks.
#pragma once

#include <cmath>
#include <cstdint>

#include "fwk/vectors.h"

namespace fwk {

enum Activation { SILU, GELU_TANH, GELU, CLAMPED_SWIGLU };

inline vf gelu(vf x) {
    for (int i = 0; i < W; i++) x[i] *= 0.5f + 0.5f * std::erf(x[i] * 0.70710678118654752f);
    return x;
}

inline vf activated(vf x, int64_t activation) {
    switch (activation) {
        case SILU: return x * sigmoid(x);
        case GELU_TANH: return x * sigmoid(1.59576912160573071f * (x + 0.044715f * x * x * x));
        default: return gelu(x);
    }
}

// What a gated network makes of gate and up: the activation, rounded to T, times up; or a function of both.
template <class T>
inline vf gated(vf gate, vf up, int64_t activation) {
    if (activation != CLAMPED_SWIGLU) return rounded<T>(activated(gate, activation)) * up;
    const vf limit = splat(7.0f);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate * sigmoid(1.702f * gate) * (up + 1.0f);
}

}  // namespace fwk
