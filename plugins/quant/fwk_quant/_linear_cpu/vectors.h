// Vectors of 32-bit words, and what each instruction set does with them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 32")

namespace kernel {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float vf __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2)));
typedef int8_t vb __attribute__((vector_size(W), aligned(1)));
typedef uint8_t vub __attribute__((vector_size(W), aligned(1)));

constexpr int PANEL = 32;  // outputs that are stored, and mostly computed, together
constexpr int C = 2;       // vectors of a tile's row kept in registers

inline vf load(const float* p) { return *(const vf*)p; }
inline vi load(const int32_t* p) { return *(const vi*)p; }
inline void store(float* p, vf x) { *(vf*)p = x; }
inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }
inline vf as_float(vi x) { return __builtin_convertvector(x, vf); }

// a * b + c in one rounding where the machine does that: said, so that compilers have no choice from tile to tile.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// bfloat16 is the upper half of a float.
inline vf widen(const uint16_t* p) {
#if defined(__AVX512F__)  // compilers convert in halves
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)*(const vh*)p), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16);
#endif
}
inline vf widen(const float* p) { return load(p); }

inline void narrow(uint16_t* p, vf x) {  // to the nearest, ties to even
#if defined(__AVX512BF16__)
    const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &y, 32);
#else
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const vi is_nan = x != x;
    *(vh*)p = __builtin_convertvector(is_nan ? (vu)splat(0x7fc0) : rounded, vh);
#endif
}
inline void narrow(float* p, vf x) { store(p, x); }

inline void narrow_one(uint16_t* p, float x) {
    uint16_t all[W];
    narrow(all, splat(x));
    *p = all[0];
}
inline void narrow_one(float* p, float x) { *p = x; }

inline float widen_one(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline float widen_one(float x) { return x; }

// IEEE half precision.
inline vf from_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    // The exponent is moved from 5 bits to 8 by a product, which also sees to subnormal numbers.
    const vu bits = __builtin_convertvector(*(const vh*)p, vu);
    const vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

inline vf from_bytes(const uint8_t* p) { return as_float(__builtin_convertvector(*(const vub*)p, vi)); }
inline vf from_bytes(const int8_t* p) { return as_float(__builtin_convertvector(*(const vb*)p, vi)); }

// sums + the products of each word's four unsigned bytes and x's four signed ones. HIGHEST: of the unsigned bytes.
template <int HIGHEST>
inline vi dot(vi sums, vi bytes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    const __m512i w = (__m512i)bytes, factor = _mm512_set1_epi32(x);
    if (HIGHEST < 128)  // two products fit into 16 bits
        return sums + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w, factor), _mm512_set1_epi16(1));
    const __m512i low = _mm512_set1_epi16(255);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, low), _mm512_srai_epi16(_mm512_slli_epi16(factor, 8), 8));
    return sums + (vi)even + (vi)_mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(factor, 8));
#elif defined(__AVX2__)
    const __m256i w = (__m256i)bytes, factor = _mm256_set1_epi32(x);
    if (HIGHEST < 128)
        return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, factor), _mm256_set1_epi16(1));
    const __m256i low = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(factor, 8), 8));
    return sums + (vi)even + (vi)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(factor, 8));
#else
    UNROLL for (int i = 0; i < 4; i++) sums += (bytes >> 8 * i & 255) * int32_t(int8_t(uint32_t(x) >> 8 * i));
    return sums;
#endif
}

// Bits of numbers without their signs, which are in the order of their magnitudes; what is not finite comes last.
inline vh sizes(const uint16_t* p) { return *(const vh*)p & 0x7fff; }
inline vi sizes(const float* p) { return (vi)load(p) & 0x7fffffff; }

template <class V>
inline V larger(V a, V b) {
    return a > b ? a : b;
}

// The number with the largest of such bits.
inline float largest(vi x) {
#if defined(__AVX512F__)
    const int32_t bits = _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t bits = x[0];
    for (int i = 1; i < W; i++) bits = x[i] > bits ? x[i] : bits;
#endif
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline float largest(vh x) {
#if defined(__AVX512F__)
    const __m128i half = _mm_max_epu16(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#elif defined(__AVX2__)
    const __m128i half = (__m128i)x;
#endif
#if defined(__AVX2__)
    // There is an instruction for the smallest of eight.
    const uint16_t bits = ~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1))), 0);
#else
    uint16_t bits = x[0];
    for (int i = 1; i < W; i++) bits = x[i] > bits ? x[i] : bits;
#endif
    return widen_one(bits);
}

inline int32_t sum_of(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = x[0];
    for (int i = 1; i < W; i++) sum += x[i];
    return sum;
#endif
}

// f(where W numbers of x lie from `at` on); zeros from `end` on.
template <class T, class F>
inline auto some(const T* x, int64_t at, int64_t end, F f) {
    if (at + W <= end) return f(x + at);
    T last[W] = {};
    if (at < end) memcpy(last, x + at, (end - at) * sizeof(T));
    return f(last);
}

// What will be read next: a tile brings `bytes` (up to two cache lines) of it nearer for each row of words that it reads.
struct Ahead {
    const char* at;
    int64_t bytes;

    void fetch() {
        __builtin_prefetch(at, 0, 2);
        if (bytes > 64) __builtin_prefetch(at + 64, 0, 2);
        at += bytes;
    }
};

// A panel that will be read next, of which each of so many tiles brings a part nearer.
struct Next {
    const char* panel;
    int64_t tile, tiles;
};

// A tile's part of so many lines of it, in so many steps. While lines come from memory, others come slowly from the second
// cache, too: so of few tiles the first, whose own panel may still be on its way, fetches none.
struct Lines {
    int64_t count = 0;
    const char* at = nullptr;

    Lines(Next next, int64_t lines, int64_t steps) {
        const int64_t idle = next.tiles <= 4 ? next.tiles / 2 : 0, parts = (next.tiles - idle) * steps;
        if (next.tile < idle) return;
        count = (lines + parts - 1) / parts;
        at = next.panel + (next.tile - idle) * steps * count * 64;
    }

    void fetch() {
        for (int64_t i = 0; i < count; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// Memory of one thread, kept between calls.
struct Spare {
    char* memory = nullptr;
    size_t size = 0;
    ~Spare() { free(memory); }
    char* take(size_t wanted) {
        if (wanted > size) {
            free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = (char*)aligned_alloc(4096, size);
            if (!memory) abort();
        }
        return memory;
    }
};

}  // namespace kernel
