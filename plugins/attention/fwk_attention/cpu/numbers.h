// Numbers as they are kept, and as products take them.

#pragma once

#include <cmath>
#include <limits>

#include "fwk/vectors.h"

namespace {

using namespace fwk;
using fwk::load;  // overloaded below, as is the next
using fwk::to_float;

constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;

// cap * tanh(x / cap)
inline vf soft_capped(vf x, float cap) {
    const vf y = x / cap;
    const vi negative = y < vf{};
    const vf size = negative ? -y : y;
    const vf e = vexp2<true>(size * (-2.0f * LOG2_E));
    const vf t = (1.0f - e) / (1.0f + e);
    // Near zero the quotient would lose digits that the series has.
    const vf s = size * size;
    const vf series = size * (1.0f + s * (-1.0f / 3.0f + s * (2.0f / 15.0f - s * (17.0f / 315.0f))));
    const vf z = size < splat(0.1f) ? series : t;
    return (negative ? -z : z) * cap;
}

// The largest of N numbers of each of W rows, which begin `stride` numbers apart.
template <int N>
inline vf rows_max_of(const float* rows, int stride) {
    auto row_max_of = [&](int r) {
        vf lane_max = load(rows + r * stride);
#pragma GCC unroll 8
        for (int i = W; i < N; i += W) lane_max = vmax(load(rows + r * stride + i), lane_max);
        return lane_max;
    };
#ifdef __AVX512F__
    auto merge = [](vf a, vf b, auto first, auto second) {
        return vmax((vf)first((__m512)a, (__m512)b), (vf)second((__m512)a, (__m512)b));
    };
    auto by_quarters = [&](vf a, vf b) {
        return merge(a, b, [](__m512 x, __m512 y) { return _mm512_shuffle_f32x4(x, y, 0x88); },
                     [](__m512 x, __m512 y) { return _mm512_shuffle_f32x4(x, y, 0xdd); });
    };
    vf fours[4];  // of four rows each, within every quarter
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        auto pair = [&](int r) {
            return merge(row_max_of(r), row_max_of(r + 1), [](__m512 x, __m512 y) { return _mm512_unpacklo_ps(x, y); },
                         [](__m512 x, __m512 y) { return _mm512_unpackhi_ps(x, y); });
        };
        fours[i] = merge(pair(i * 4), pair(i * 4 + 2),
                         [](__m512 x, __m512 y) { return (__m512)_mm512_unpacklo_pd((__m512d)x, (__m512d)y); },
                         [](__m512 x, __m512 y) { return (__m512)_mm512_unpackhi_pd((__m512d)x, (__m512d)y); });
    }
    return by_quarters(by_quarters(fours[0], fours[1]), by_quarters(fours[2], fours[3]));
#else
    vf maxima{};
    for (int r = 0; r < W; r++) maxima[r] = reduce_max(row_max_of(r));
    return maxima;
#endif
}

struct Int8 {
    int8_t bits;
    static constexpr float LARGEST = 127;
    static inline Int8 of(float x) { return {int8_t(std::nearbyint(x))}; }
};
inline float to_float(Int8 x) { return x.bits; }

struct Fp8 {  // e4m3 without infinities
    uint8_t bits;
    static constexpr float LARGEST = 448;
    // To the nearest, ties to even. Below 2^-6 neighbours lie 2^-9 apart: so do floats around 1.5 * 2^14.
    static inline Fp8 of(float x) {
        const float size = std::fabs(x), shifted = size + 24576.0f, base = 24576.0f;
        uint32_t bits, small, zero, sign;
        memcpy(&bits, &size, 4);
        memcpy(&small, &shifted, 4);
        memcpy(&zero, &base, 4);
        memcpy(&sign, &x, 4);
        const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);  // the biases are 127 and 7
        return {uint8_t((size < 0.015625f ? small - zero : normal) | sign >> 24 & 0x80)};
    }
};
inline vf load(const Int8* from) { return from_bytes((const int8_t*)from); }
inline vf load(const Fp8* from) {
    const vi x = integers((const int8_t*)from);             // the sign is spread over the upper bits
    return (vf)(x << 20 & int32_t(0x87f00000)) * 0x1p120f;  // as below
}
inline float to_float(Fp8 x) {
    const uint32_t bits = uint32_t(x.bits & 0x80) << 24 | uint32_t(x.bits & 0x7f) << 20;
    float y;
    memcpy(&y, &bits, 4);
    return y * 0x1p120f;  // the exponent's bias is 7 here, 127 there
}

template <class S> constexpr bool IS_QUANTISED = sizeof(S) == 1;

// Numbers of the cache of which products make a word when they read them.
template <class S, int N>
struct Stored {
    S numbers[N];
};

struct Floats {  // one number a word
    static inline vf step(vf sum, float a, const int32_t* b) { return sum + a * load((const float*)b); }
    template <class S>
    static inline vf step(vf sum, float a, const Stored<S, 1>* b) { return sum + a * load(b->numbers); }
    static inline float word(const int32_t* a) { float x; memcpy(&x, a, 4); return x; }
    static constexpr int PER_WORD = 1;
    // W numbers, f(i), to words.
    template <class F>
    static void pack(int32_t* to, int i, int, F f) { store((float*)to, f(i)); }
    // n numbers to n words. By vectors in so many words: compilers ask whether both overlap, and n may be what they count in.
    template <class S>
    static void words(const S* from, int32_t* to, int n) {
        float* out = (float*)to;
        int i = 0;
        for (; i + W <= n; i += W) store(out + i, load(from + i));
        for (; i < n; i++) out[i] = to_float(from[i]);
    }
};

#ifdef __AVX512BF16__
struct Pairs {  // two bfloat16 a word
    static inline vf step(vf sum, __m512bh a, const int32_t* b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, a, (__m512bh)_mm512_loadu_si512(b));
    }
    template <class S>
    static inline vf step(vf sum, __m512bh a, const Stored<S, 2>* b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, a, sixteen_words(b->numbers));
    }
    static inline __m512bh word(const int32_t* a) { return (__m512bh)_mm512_set1_epi32(*a); }
    static constexpr int PER_WORD = 2;
    // 2 W numbers, f(i) and f(i + W), to W words; zeros from `end` on.
    template <class F>
    static void pack(int32_t* to, int i, int end, F f) {
        const vf lower = f(i), upper = i + W < end ? f(i + W) : vf{};
        const __m512bh x = _mm512_cvtne2ps_pbh((__m512)upper, (__m512)lower);
        memcpy(to, &x, 64);
    }
    static inline __m512i sixteen(const Int8* from) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
    }
    static inline __m512 floats(const Int8* from) { return _mm512_cvtepi32_ps(sixteen(from)); }
    static inline __m512 floats(const Fp8* from) {
        const __m512i x = sixteen((const Int8*)from);  // the sign is spread over the upper bits
        const __m512i bits = _mm512_and_si512(_mm512_slli_epi32(x, 20), _mm512_set1_epi32(int32_t(0x87f00000)));
        return _mm512_mul_ps((__m512)bits, _mm512_set1_ps(0x1p120f));
    }
    // 2 n quantised numbers, n a multiple of 16, to n words: bfloat16 holds all of them exactly.
    template <class S>
    static inline __m512bh sixteen_words(const S* from) { return _mm512_cvtne2ps_pbh(floats(from + 16), floats(from)); }
    template <class S>
    static void words(const S* from, int32_t* to, int n) {
        for (int i = 0; i < n; i += 16) {
            const __m512bh x = sixteen_words(from + 2 * i);
            memcpy(to + i, &x, 64);
        }
    }
    static void words(const uint16_t* from, int32_t* to, int n) { memcpy(to, from, n * 4); }
};
#endif

}  // namespace
