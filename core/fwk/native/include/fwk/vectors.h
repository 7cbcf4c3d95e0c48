// Vectors of floats, W at a time: the same code for every instruction set a kernel is built for.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace fwk {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float vf __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2)));

inline vf splat(float x) { return x - vf{}; }

inline float sum_of(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = x[0];
    for (int i = 1; i < W; i++) sum += x[i];
    return sum;
#endif
}

inline vf larger(vf a, vf b) {  // where one is not a number: b
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float max_of(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// W numbers from memory: float32, or bfloat16 (uint16_t), which is the upper half of a float.
inline vf load(const float* p) { return *(const vf*)p; }
inline vf load(const uint16_t* p) {
#ifdef __AVX512F__  // compilers convert in halves
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)*(const vh*)p), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16);
#endif
}

// What is left of x when it is stored as T: to the nearest, ties to even.
template <class T>
inline vf rounded(vf x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
#ifdef __AVX512BF16__
    const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
    return load((const uint16_t*)&y);
#endif
    const vu bits = (vu)x;
    const vi is_nan = x != x;
    return is_nan ? x : (vf)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// To memory, rounded.
inline void store(float* p, vf x) { *(vf*)p = x; }
inline void store(uint16_t* p, vf x) {
#ifdef __AVX512BF16__
    const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &y, 32);
#else
    *(vh*)p = __builtin_convertvector((vu)rounded<uint16_t>(x) >> 16, vh);
#endif
}

// The first n < W numbers, the others zero; and their way back.
template <class T>
inline vf load_some(const T* p, int64_t n) {
    T all[W] = {};
    memcpy(all, p, n * sizeof(T));
    return load(all);
}
template <class T>
inline void store_some(T* p, vf x, int64_t n) {
    T all[W];
    store(all, x);
    memcpy(p, all, n * sizeof(T));
}

// f(i, load, store) for the vectors of a row of `size` numbers from number i on, whose load and store know how many
// numbers there are.
template <class F>
inline void over_row(int64_t size, F f) {
    int64_t i = 0;
    for (; i + W <= size; i += W)
        f(i, [](const auto* p) { return load(p); }, [](auto* p, vf x) { store(p, x); });
    if (const int64_t n = size - i)
        f(i, [n](const auto* p) { return load_some(p, n); }, [n](auto* p, vf x) { store_some(p, x, n); });
}

// e^x for x <= 0, to 1e-7 relative; 0 below -87 (Cephes' polynomial).
inline vf exp_of(vf x) {
    const vf low = splat(-87.0f);
    const vi tiny = x < low;
    x = tiny ? low : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = x * 1.44269504088896341f + magic;
    const vi whole = (vi)n << 23;
    n -= magic;
    const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (vf)((vi)(p * r * r + r + 1.0f) + whole);
    return tiny ? vf{} : p;
}

// 2^x; 0 far below, infinity from 128 on. Minimax polynomials: relative error 2e-9 of six terms, 7e-5 of three.
template <bool IS_EXACT>
inline vf exp2_of(vf x) {
#ifdef __AVX512F__
    const __m512 y = (__m512)x;
    const vf f = (vf)_mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
    vf p;
    if constexpr (IS_EXACT) {
        p = f * 0.0002170225486f + 0.0012439688f;
        p = p * f + 0.009678840977f;
        p = p * f + 0.05548334199f;
        p = p * f + 0.2402298363f;
        p = p * f + 0.6931469838f;
        p = p * f + 1.0f;
    } else {
        p = f * 0.0780245168f + 0.2260671637f;
        p = p * f + 0.6958335376f;
        p = p * f + 0.9999252187f;
    }
    return (vf)_mm512_scalef_ps((__m512)p, y);
#else
    const vf low = splat(-126.0f), high = splat(128.0f);
    const vi tiny = x < low;
    x = tiny ? low : x > high ? high : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = x + magic;
    const vi whole = (vi)n << 23;
    const vf f = x - (n - magic);
    vf p = f * 0.0001534581161f + 0.001339993122f;
    p = p * f + 0.009618488959f;
    p = p * f + 0.05550328777f;
    p = p * f + 0.2402264689f;
    p = p * f + 0.6931472057f;
    p = p * f + 1.0f;
    p = (vf)((vi)p + whole);
    return tiny ? vf{} : p;
#endif
}

// 1 / (1 + e^-x)
inline vf sigmoid(vf x) {
#ifdef __AVX512F__
    return 1.0f / (1.0f + exp2_of<true>(x * -1.44269504088896341f));
#else
    const vi negative = x < vf{};
    const vf e = exp_of(negative ? x : -x);
    return (negative ? e : splat(1.0f)) / (1.0f + e);
#endif
}

}  // namespace fwk
