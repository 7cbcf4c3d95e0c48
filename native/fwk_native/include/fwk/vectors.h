// SIMD vectors of W 32-bit lanes. The same code serves every instruction set that a kernel is built for: GCC's vector
// extensions, and intrinsics where compilers do not find the best instruction. bfloat16 is a uint16_t, the upper half of a
// float32.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 32")

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
typedef int8_t vb __attribute__((vector_size(W), aligned(1)));
typedef uint8_t vub __attribute__((vector_size(W), aligned(1)));

inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }
inline vf as_float(vi x) { return __builtin_convertvector(x, vf); }

// a * b + c with one rounding where the instruction set has FMA. Explicit, because compilers contract some expressions and
// not others, and a row's result must not depend on the tile that computes it.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float reduce_add(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = x[0];
    for (int i = 1; i < W; i++) sum += x[i];
    return sum;
#endif
}

inline int32_t reduce_add(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = x[0];
    for (int i = 1; i < W; i++) sum += x[i];
    return sum;
#endif
}

inline vf vmax(vf a, vf b) {  // b if either is NaN
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

template <class V>
inline V vmax(V a, V b) {
    return a > b ? a : b;
}

inline float reduce_max(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float result = x[0];
    for (int i = 1; i < W; i++) result = x[i] > result ? x[i] : result;
    return result;
#endif
}

// W numbers from memory, of any alignment.
inline vf load(const float* p) { return *(const vf*)p; }
inline vi load(const int32_t* p) { return *(const vi*)p; }
inline vf load(const uint16_t* p) {
#ifdef __AVX512F__  // compilers convert in halves
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)*(const vh*)p), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)*(const vh*)p), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16);
#endif
}

// x rounded to the precision of T, to nearest even.
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

// To memory, rounded to nearest even.
inline void store(float* p, vf x) { *(vf*)p = x; }
inline void store(uint16_t* p, vf x) {
#ifdef __AVX512BF16__
    const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &y, 32);
#else
    *(vh*)p = __builtin_convertvector((vu)rounded<uint16_t>(x) >> 16, vh);
#endif
}

// Scalar conversions, rounding as `store` does but for NaN, which becomes the canonical one.
inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(uint16_t* p, float x) { *p = to_bfloat16(x); }

// W numbers of IEEE half precision.
inline vf from_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    // A multiplication rebiases the exponent from 5 bits to 8, and normalises subnormal numbers.
    const vu bits = __builtin_convertvector(*(const vh*)p, vu);
    const vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

#if defined(__AVX512F__)  // compilers convert vectors of bytes one by one
inline vf from_bytes(const uint8_t* p) { return as_float((vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline vi integers(const int8_t* p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(__AVX2__)
inline vf from_bytes(const uint8_t* p) { return as_float((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline vi integers(const int8_t* p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
inline vf from_bytes(const uint8_t* p) { return as_float(__builtin_convertvector(*(const vub*)p, vi)); }
inline vi integers(const int8_t* p) { return __builtin_convertvector(*(const vb*)p, vi); }
#endif
inline vf from_bytes(const int8_t* p) { return as_float(integers(p)); }

// Partial vectors: load the first n < W numbers and zero the others; store the first n.
template <class T>
inline vf load_partial(const T* p, int64_t n) {
    T all[W] = {};
    memcpy(all, p, n * sizeof(T));
    return load(all);
}
template <class T>
inline void store_partial(T* p, vf x, int64_t n) {
    T all[W];
    store(all, x);
    memcpy(p, all, n * sizeof(T));
}

// f(i, load, store) for each vector of a row of `size` numbers, which starts at number i. The last vector may be partial: its
// load and store are load_partial and store_partial.
template <class F>
inline void for_each_vector(int64_t size, F f) {
    int64_t i = 0;
    for (; i + W <= size; i += W)
        f(i, [](const auto* p) { return load(p); }, [](auto* p, vf x) { store(p, x); });
    if (const int64_t n = size - i)
        f(i, [n](const auto* p) { return load_partial(p, n); }, [n](auto* p, vf x) { store_partial(p, x, n); });
}

// f(pointer to W numbers of x from index `at` on, with zeros from `end` on).
template <class T, class F>
inline auto load_padded(const T* x, int64_t at, int64_t end, F f) {
    if (at + W <= end) return f(x + at);
    T last[W] = {};
    if (at < end) memcpy(last, x + at, (end - at) * sizeof(T));
    return f(last);
}

// e^x for x <= 0, to 1e-7 relative; 0 below -87 (Cephes' polynomial).
inline vf vexp(vf x) {
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

// 2^x; underflows to 0, infinity from 128 on. Minimax polynomials: relative error 2e-9 with six terms (IS_EXACT), 7e-5 with
// three.
template <bool IS_EXACT>
inline vf vexp2(vf x) {
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
    return 1.0f / (1.0f + vexp2<true>(x * -1.44269504088896341f));
#else
    const vi negative = x < vf{};
    const vf e = vexp(negative ? x : -x);
    return (negative ? e : splat(1.0f)) / (1.0f + e);
#endif
}

// sums + the dot product of each word's four unsigned bytes and the four signed bytes of x. MAX_VALUE: bound of the unsigned
// bytes.
template <int MAX_VALUE>
inline vi dot(vi sums, vi bytes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    const __m512i w = (__m512i)bytes, factor = _mm512_set1_epi32(x);
    if (MAX_VALUE < 128)  // two products fit into 16 bits
        return sums + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w, factor), _mm512_set1_epi16(1));
    const __m512i low = _mm512_set1_epi16(255);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, low), _mm512_srai_epi16(_mm512_slli_epi16(factor, 8), 8));
    return sums + (vi)even + (vi)_mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(factor, 8));
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, _mm256_set1_epi32(x));
#elif defined(__AVX2__)
    const __m256i w = (__m256i)bytes, factor = _mm256_set1_epi32(x);
    if (MAX_VALUE < 128)
        return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, factor), _mm256_set1_epi16(1));
    const __m256i low = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(factor, 8), 8));
    return sums + (vi)even + (vi)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(factor, 8));
#else
    UNROLL for (int i = 0; i < 4; i++) sums += (bytes >> 8 * i & 255) * int32_t(int8_t(uint32_t(x) >> 8 * i));
    return sums;
#endif
}

// Magnitude bits of W numbers: without the sign, integers in the order of the absolute values. NaN and infinity are last.
inline vh magnitude_bits(const uint16_t* p) { return *(const vh*)p & 0x7fff; }
inline vi magnitude_bits(const float* p) { return (vi)load(p) & 0x7fffffff; }

// The largest number of those whose magnitude bits these are.
inline float from_magnitude_bits(vi x) {
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

inline float from_magnitude_bits(vh x) {
#if defined(__AVX512F__)
    const __m128i half = _mm_max_epu16(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#elif defined(__AVX2__)
    const __m128i half = (__m128i)x;
#endif
#if defined(__AVX2__)
    // phminposuw finds the smallest of eight.
    const uint16_t bits = ~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1))), 0);
#else
    uint16_t bits = x[0];
    for (int i = 1; i < W; i++) bits = x[i] > bits ? x[i] : bits;
#endif
    return to_float(bits);
}

}  // namespace fwk
