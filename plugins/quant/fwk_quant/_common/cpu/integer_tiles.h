// Products of 8-bit integers with matrices of 8, 6 or 4 bits in groups of inputs.
//
// x is rounded to 8 bits, with a scale for each group of a row; integers of a group are multiplied and added up
// exactly, and their sum takes part in a float32 sum over the groups, in order.
#pragma once

#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "vectors.h"

namespace kernel {

constexpr int INTEGER_ROWS = W == 16 ? 6 : 3;  // rows of a tile kept in registers
constexpr int64_t MOST = 256;                  // inputs of a group

inline int64_t num_groups(const Matrix& m) { return (m.in_features + m.group - 1) / m.group; }

// A row of x: its integers, room for a vector, then a scale and the sum of the integers for each group.
struct Rounded {
    int64_t bytes, groups;
    explicit Rounded(const Matrix& m) : bytes((m.in_features + m.group + 127) / 64 * 64), groups(num_groups(m)) {}
    int64_t size() const { return (bytes + groups * 8 + 63) / 64 * 64; }
    const float* scales(const char* row) const { return (const float*)(row + bytes); }
    const int32_t* sums(const char* row) const { return (const int32_t*)(row + bytes) + groups; }
};

template <class T>
void round_row(const Matrix& m, const T* x, char* to) {
    const Rounded form(m);
    float* scales = (float*)form.scales(to);
    int32_t* sums = (int32_t*)form.sums(to);
    alignas(64) float values[MOST + W];
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int64_t g = 0; g < form.groups; g++) {
        const int64_t start = g * m.group, count = std::min(m.group, m.in_features - start);
        const int64_t padded = (m.group + W - 1) / W * W, whole = count / W * W;
        vf top = vf{}, poison = vf{};
        memset(values + whole, 0, (padded - whole) * sizeof(float));
        for (int64_t i = 0; i < whole; i += W) store(values + i, widen(x + start + i));
        if (whole < count) {
            T last[W] = {};
            memcpy(last, x + start + whole, (count - whole) * sizeof(T));
            store(values + whole, widen(last));
        }
        for (int64_t i = 0; i < padded; i += W) {
            const vf v = load(values + i), size = (vf)((vi)v & 0x7fffffff);
            poison += v * 0.0f;  // not a number where v is not finite
            top = size > top ? size : top;
        }
        float most = 0, bad = 0;
        for (int i = 0; i < W; i++) {
            most = std::max(most, top[i]);
            bad += poison[i];
        }
        const bool is_usable = most > 1e-30f && most <= 3e38f;
        const float inverse = is_usable ? 127.0f / most : 0.0f;
        vi sum = vi{};
        for (int64_t i = 0; i < padded; i += W) {
            const vi q = (vi)fma(load(values + i), splat(inverse), magic) - (vi)magic;
            sum += q;
            *(vb*)(to + start + i) = __builtin_convertvector(q, vb);
        }
        int32_t total = 0;
        for (int i = 0; i < W; i++) total += sum[i];
        scales[g] = (is_usable ? most / 127.0f : 0.0f) + bad;
        sums[g] = total;
    }
}

// Four integers of neighbouring inputs from x.
inline int32_t four(const char* x) {
    int32_t y;
    memcpy(&y, x, 4);
    return y;
}

// Words of a group, and what they hold: number i of step k is multiplied by x's four integers at (k * COUNT + i) * 4.
template <int BITS>
struct Bits;

template <>
struct Bits<8> {
    static constexpr int WORDS = 1, COUNT = 1, HIGHEST = 255;
    static inline vi get(const int32_t* w, int) { return load(w); }
};

template <>
struct Bits<4> {
    static constexpr int WORDS = 1, COUNT = 2, HIGHEST = 15;
    static inline vi get(const int32_t* w, int i) { return (i ? load(w) >> 4 : load(w)) & 0x0f0f0f0f; }
};

template <>
struct Bits<6> {
    static constexpr int WORDS = 3, COUNT = 4, HIGHEST = 63;
    static inline vi get(const int32_t* w, int i) {
        const vi low = Bits<4>::get(w + i / 2 * PANEL, i % 2), high = load(w + 2 * PANEL) >> 2 * i & 0x03030303;
        return low | high << 4;
    }
};

// Of a group's outputs from `column` on: the scales, and what times the sum of x's integers comes on top.
struct Factors {
    vf scale[C], offset[C];
};

// at: the entry of scales and zeros; nest: that of the float16 which several share.
__attribute__((noinline)) inline Factors factors(const Matrix& m, int64_t at, int64_t nest) {
    Factors f;
    for (int c = 0; c < C; c++, at += W, nest += W) {
        const auto number = [&](const void* from, const int8_t* bytes) {
            if (m.scale_kind == SINGLE) return load((const float*)from + at);
            if (m.scale_kind == HALF) return from_half((const uint16_t*)from + at);
            return from_half((const uint16_t*)from + nest) * from_bytes(bytes + at);
        };
        f.scale[c] = number(m.scales, m.scale_bytes);
        f.offset[c] = vf{};
        if (m.zero_kind == BYTES) f.offset[c] = -f.scale[c] * from_bytes((const uint8_t*)m.zeros + at);
        if (m.zero_kind == OFFSETS) f.offset[c] = number(m.zeros, m.zero_bytes);
    }
    return f;
}

// out[R, C * W] = x[R] times the columns of a panel, from `column` on. ahead: what is read next, brought nearer meanwhile.
template <int BITS, int R>
void integer_tile(const Matrix& m, const char* x, int64_t panel, int column, float* out, const int32_t* ahead) {
    typedef Bits<BITS> B;
    const Rounded form(m);
    const int64_t stride = form.size(), steps = m.num_words / B::WORDS, group_steps = m.group / (4 * B::COUNT);
    const int64_t scaled = (form.groups + m.scale_every - 1) / m.scale_every, nests = (scaled + m.nest - 1) / m.nest;
    const int32_t* w = (const int32_t*)m.words + panel * m.num_words * PANEL + column;
    vf sum[R][C];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = vf{};
    for (int64_t g = 0; g < form.groups; g++) {
        vi products[R][C];
        UNROLL for (int r = 0; r < R; r++) {
            const int32_t start = m.zero_kind == CONSTANT ? -int32_t(m.zero) * form.sums(x + r * stride)[g] : 0;
            UNROLL for (int c = 0; c < C; c++) products[r][c] = splat(start);
        }
        const int64_t first = g * group_steps, end = std::min(first + group_steps, steps);
        for (int64_t k = first; k < end; k++, w += B::WORDS * PANEL) {
            UNROLL for (int i = 0; i < B::WORDS * PANEL; i += 16) prefetch(ahead + i);
            ahead += B::WORDS * PANEL;
            UNROLL for (int i = 0; i < B::COUNT; i++) {
                vi bytes[C];
                UNROLL for (int c = 0; c < C; c++) bytes[c] = B::get(w + c * W, i);
                UNROLL for (int r = 0; r < R; r++) {
                    const int32_t numbers = four(x + r * stride + (k * B::COUNT + i) * 4);
                    UNROLL for (int c = 0; c < C; c++)
                        products[r][c] = dot<B::HIGHEST>(products[r][c], bytes[c], numbers);
                }
            }
        }
        const int64_t entry = panel * scaled + g / m.scale_every, nest = panel * nests + g / m.scale_every / m.nest;
        const Factors f = factors(m, entry * PANEL + column, nest * PANEL + column);
        UNROLL for (int r = 0; r < R; r++) {
            const float scale = form.scales(x + r * stride)[g], total = float(form.sums(x + r * stride)[g]);
            UNROLL for (int c = 0; c < C; c++) {
                vf part = as_float(products[r][c]) * f.scale[c];
                if (m.zero_kind != CONSTANT) part = fma(f.offset[c], splat(total), part);
                sum[r][c] = fma(part, splat(scale), sum[r][c]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) store(out + r * PANEL + c * W, sum[r][c]);
}

template <int BITS, int R = INTEGER_ROWS>
void integer_tiles(int rows, const Matrix& m, const char* x, int64_t panel, int column, float* out,
                   const int32_t* ahead) {
    if constexpr (R > 1)
        if (rows < R) return integer_tiles<BITS, R - 1>(rows, m, x, panel, column, out, ahead);
    integer_tile<BITS, R>(m, x, panel, column, out, ahead);
}

}  // namespace kernel
