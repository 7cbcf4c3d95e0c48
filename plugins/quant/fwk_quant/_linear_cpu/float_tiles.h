// Products with matrices of float32 or bfloat16. A word of a matrix is one float, or two bfloat16 of neighbouring inputs.
#pragma once

#include "panels.h"

namespace kernel {

constexpr int FLOAT_ROWS = W == 16 ? 12 : 6;  // rows of a tile kept in registers
constexpr int SIDE = W == 16 ? 4 : 1;         // rows that are interleaved word by word, when there are many

struct Single {  // float32
    static constexpr int PARTS = 1;
    static inline vf part(vi word, int) { return (vf)word; }
    static inline float number(const char* x) {
        float y;
        memcpy(&y, x, 4);
        return y;
    }
    static inline vf add(vf sum, float x, vf w) { return fma(splat(x), w, sum); }
};

#if defined(__AVX512BF16__)
struct Pair {  // bfloat16, multiplied two at a time
    static constexpr int PARTS = 1;
    static inline __m512bh part(vi word, int) { return (__m512bh)word; }
    static inline __m512bh number(const char* x) {
        int32_t y;
        memcpy(&y, x, 4);
        return (__m512bh)_mm512_set1_epi32(y);
    }
    static inline vf add(vf sum, __m512bh x, __m512bh w) { return (vf)_mm512_dpbf16_ps((__m512)sum, x, w); }
};
#else
struct Pair {  // bfloat16, widened; x has become float32
    static constexpr int PARTS = 2;
    static inline vf part(vi word, int i) { return i ? (vf)(word & int32_t(0xffff0000)) : (vf)(word << 16); }
    static inline float number(const char* x) { return Single::number(x); }
    static inline vf add(vf sum, float x, vf w) { return fma(splat(x), w, sum); }
};
#endif

#if defined(__AVX512F__)
// Interleave the words of four rows, `stride` bytes apart, as far as whole vectors go. Returns the number of words.
inline int64_t four_side_by_side(const char* x, int64_t stride, int64_t words, char* to) {
    static_assert(SIDE == 4, "as many rows as words of a vector");
    int64_t k = 0;
    for (; k + SIDE <= words; k += SIDE, x += 16, to += SIDE * 16) {
        __m128 row[SIDE];
        UNROLL for (int r = 0; r < SIDE; r++) row[r] = _mm_loadu_ps((const float*)(x + r * stride));
        _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
        UNROLL for (int j = 0; j < SIDE; j++) _mm_storeu_ps((float*)(to + j * 16), row[j]);
    }
    return k;
}
#endif

// out[R, C * W] = x[R, words] times the panel's columns; S rows of x lie side by side.
// Every sum goes over the inputs in order, so that a row's result does not depend on the other rows.
template <class F, int S, int R>
void float_tile(const char* x, int64_t x_stride, const int32_t* w, int64_t words, float* out, Prefetch prefetch) {
    vf sum[R][C];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = vf{};
    for (int64_t k = 0; k < words; k++, w += PANEL) {
        prefetch.fetch();
        UNROLL for (int p = 0; p < F::PARTS; p++) {
            const auto w0 = F::part(load(w), p), w1 = F::part(load(w + W), p);
            UNROLL for (int r = 0; r < R; r++) {
                const auto number = F::number(x + r / S * S * x_stride + ((k * F::PARTS + p) * S + r % S) * 4);
                sum[r][0] = F::add(sum[r][0], number, w0);
                sum[r][1] = F::add(sum[r][1], number, w1);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) store(out + r * PANEL + c * W, sum[r][c]);
}

template <class F, int S, int R = FLOAT_ROWS>
void float_tiles(int rows, const char* x, int64_t x_stride, const int32_t* w, int64_t words, float* out,
                 Prefetch prefetch) {
    if constexpr (R > 1)
        if (rows < R) return float_tiles<F, S, R - 1>(rows, x, x_stride, w, words, out, prefetch);
    float_tile<F, S, R>(x, x_stride, w, words, out, prefetch);
}

}  // namespace kernel
