// Products with bfloat16 matrices that are losslessly compressed to 12 bits per number.
//
// The exponents of a layer's weights span a small range, as Zhang et al. found ("70% Size, 100% Accuracy", DFloat11, 2025), who
// use a variable-length code. Here the code has a fixed length of 4 bits, so that vectors are decompressed at memory
// bandwidth: within a panel code 15 is the largest exponent, 14 the next, and code 0 is exponent 0 (zeros). Weights with a
// smaller exponent than code 1 are stored as zero and listed separately (`Rare`): usually at most one in ten thousand.
//
// Four words of an output (eight inputs) become three. In halves of 16 bits, the first is
//     sign 0, fraction 1 (7 bits), sign 1, fraction 0 (7 bits)
// of words 0 and 1, the second the same of words 2 and 3, and the third has their codes, 0 in the lowest bits.
#pragma once

#include <algorithm>

#include "float_tiles.h"
#include "matrix.h"

namespace kernel {

constexpr int QUAD = 4;         // words that are compressed together
constexpr int PACKED_QUAD = 3;  // words of a compressed quad
constexpr int CODES = 16;

inline uint16_t swapped(uint16_t x) { return uint16_t(x << 8 | x >> 8); }

constexpr uint16_t EXPONENT = 0x7f80, REST = 0x807f;

// The largest exponent that is rare where `top` is the largest, both in their place among a number's bits.
inline uint16_t rare_until(uint16_t top) { return uint16_t(std::max(top - ((CODES - 1) << 7), 0)); }

inline bool is_rare(uint16_t x, uint16_t until) { return (x & EXPONENT) > 0 && (x & EXPONENT) <= until; }

inline uint16_t unpack_one(const uint16_t* x, int64_t step, int j, const uint16_t* exponents) {  // number j of 4
    const uint16_t side = x[j / 2 * step];
    return ((j % 2 ? swapped(side) : side) & REST) | exponents[x[2 * step] >> 4 * j & 15];
}

typedef uint16_t vw __attribute__((vector_size(W * 4), aligned(2)));  // the halves of W words

// Words of QUAD columns of a panel: `count` numbers from each of `outputs` rows, and zeros.
inline void take_quad(const uint16_t* rows, int64_t stride, int outputs, int64_t count, uint32_t (*words)[PANEL]) {
#if defined(__AVX512F__)
    if (outputs == PANEL && count == 2 * QUAD) {
        for (int first = 0; first < PANEL; first += W, rows += W * stride) {
            __m512i row[QUAD];  // of every fourth output, one to a lane
            UNROLL for (int r = 0; r < QUAD; r++) {
                const auto four = [&](int lane) { return _mm_loadu_si128((const __m128i*)(rows + (lane * QUAD + r) * stride)); };
                row[r] = _mm512_inserti32x4(_mm512_castsi128_si512(four(0)), four(1), 1);
                row[r] = _mm512_inserti32x4(_mm512_inserti32x4(row[r], four(2), 2), four(3), 3);
            }
            UNROLL for (int half = 0; half < 2; half++) {
                const auto pairs = [&](int r) {
                    return half ? _mm512_unpackhi_epi32(row[r], row[r + 1]) : _mm512_unpacklo_epi32(row[r], row[r + 1]);
                };
                _mm512_storeu_si512(&words[2 * half][first], _mm512_unpacklo_epi64(pairs(0), pairs(2)));
                _mm512_storeu_si512(&words[2 * half + 1][first], _mm512_unpackhi_epi64(pairs(0), pairs(2)));
            }
        }
        return;
    }
#endif
    memset(words, 0, QUAD * PANEL * 4);
    for (int o = 0; o < outputs; o++) {
        uint32_t some[QUAD] = {};
        memcpy(some, rows + o * stride, count * 2);
        for (int j = 0; j < QUAD; j++) words[j][o] = some[j];
    }
}

// Three words of W outputs from the halves of four, PANEL words apart. Returns which of them are rare.
inline vw compress_quad(const uint16_t* from, uint16_t top, uint16_t until, uint16_t* to) {
    vw rest[QUAD], codes = {}, rare = {};
    UNROLL for (int j = 0; j < QUAD; j++) {
        const vw x = *(const vw*)(from + j * 2 * PANEL), exponent = x & EXPONENT;
        const vw is_in = (vw)(exponent > until), is_out = ~is_in & (vw)(exponent > 0);
        rest[j] = x & REST & ~is_out;
        codes |= ((((exponent - top) >> 7) + (CODES - 1)) & 15 & is_in) << (4 * j);
        rare |= is_out;
    }
    *(vw*)to = rest[0] | rest[1] << 8 | rest[1] >> 8;
    *(vw*)(to + 2 * PANEL) = rest[2] | rest[3] << 8 | rest[3] >> 8;
    *(vw*)(to + 4 * PANEL) = codes;
    return rare;
}

inline bool is_any(vw x) {
    uint64_t parts[W / 2], all = 0;
    memcpy(parts, &x, sizeof x);
    for (uint64_t part : parts) all |= part;
    return all;
}

// First call (no words): write a panel's exponent table and count its rare weights. Second call: write its words and rare
// weights.
inline void compress_panel(const Compress& call, int64_t panel) {
    const int outputs = int(std::min<int64_t>(PANEL, call.out_features - panel * PANEL));
    const uint16_t* weight = call.weight + panel * PANEL * call.stride;
    uint16_t* exponents = call.exponents + panel * 2 * CODES;
    if (!call.words) {
        uint16_t top = 0;
        for (int o = 0; o < outputs; o++)
            for (int64_t i = 0; i < call.in_features; i++)
                top = std::max(top, uint16_t(weight[o * call.stride + i] & EXPONENT));
        const uint16_t until = rare_until(top);
        for (int code = 1; code < CODES; code++) {
            exponents[code] = uint16_t(std::max(top - ((CODES - 1 - code) << 7), 0));
            exponents[CODES + code] = exponents[code];  // of the five bits that are looked at, the first is the next code's
        }
        exponents[0] = exponents[CODES] = 0;
        int64_t count = 0;
        for (int o = 0; o < outputs; o++) {
            int32_t of_row = 0;
            for (int64_t i = 0; i < call.in_features; i++) of_row += is_rare(weight[o * call.stride + i], until);
            count += of_row;
        }
        call.rare_counts[panel] = count;
        return;
    }
    Rare* rare = call.rare + call.rare_starts[panel];
    const uint16_t top = exponents[CODES - 1], until = rare_until(top);
    uint16_t* to = (uint16_t*)(call.words + panel * call.num_words * PANEL);
    for (int64_t first = 0; first < call.in_features; first += 2 * QUAD, to += PACKED_QUAD * PANEL * 2) {
        const int64_t count = std::min<int64_t>(2 * QUAD, call.in_features - first);
        uint32_t words[QUAD][PANEL];
        take_quad(weight + first, call.stride, outputs, count, words);
        vw found = {};
        for (int i = 0; i < 2 * PANEL; i += 2 * W) found |= compress_quad((const uint16_t*)words + i, top, until, to + i);
        if (!is_any(found)) continue;
        for (int64_t i = 0; i < count; i++)
            for (int o = 0; o < outputs; o++) {
                const uint16_t number = weight[o * call.stride + first + i];
                if (is_rare(number, until)) *rare++ = {int32_t(first + i), uint16_t(o), number};
            }
    }
}

// Decompress one row.
inline void decompress_row(const Matrix& m, int64_t row, uint16_t* to) {
    const int64_t panel = row / PANEL, output = row % PANEL;
    const uint16_t* words = (const uint16_t*)((const int32_t*)m.words + panel * m.num_words * PANEL + output);
    const uint16_t* exponents = m.exponents + panel * 2 * CODES;
    for (int64_t i = 0; i < m.in_features; i++) {
        const int64_t word = i / 2;
        to[i] = unpack_one(words + word / QUAD * PACKED_QUAD * PANEL * 2 + i % 2, PANEL * 2, int(word % QUAD), exponents);
    }
    for (int64_t i = m.rare_starts[panel]; i < m.rare_starts[panel + 1]; i++)
        if (m.rare[i].output == output) to[m.rare[i].input] = m.rare[i].value;
}

#if defined(__AVX512BF16__)
// Four vectors of words from three.
inline void unpack_quad(const int32_t* w, __m512i exponents, __m512bh* to) {
    const __m512i bytes = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    const __m512i rest = _mm512_set1_epi16(int16_t(REST)), codes = _mm512_loadu_si512(w + 2 * PANEL);
    const __m512i s0 = _mm512_loadu_si512(w), s1 = _mm512_loadu_si512(w + PANEL);
    const __m512i sides[] = {s0, _mm512_shuffle_epi8(s0, bytes), s1, _mm512_shuffle_epi8(s1, bytes)};
    UNROLL for (int j = 0; j < QUAD; j++) {
        const __m512i exponent = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * j), exponents);
        to[j] = (__m512bh)_mm512_ternarylogic_epi32(sides[j], rest, exponent, 0xea);  // sides & rest | exponent
    }
}

// out[R, C * W] = x[R, words] times the panel's columns, whose decompressed words are stored to `wide` unless null.
template <int S, int R>
void bf12_tile(const char* x, int64_t x_stride, const int32_t* w, const uint16_t* exponents, int64_t words, float* out,
                Prefetch prefetch, int32_t* wide) {
    const __m512i table = _mm512_loadu_si512(exponents);
    vf sum[R][C];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = vf{};
    for (int64_t k = 0; k < words; k += QUAD, w += PACKED_QUAD * PANEL) {
        UNROLL for (int i = 0; i < PACKED_QUAD; i++) prefetch.fetch();
        __m512bh own[C][QUAD];
        UNROLL for (int c = 0; c < C; c++) unpack_quad(w + c * W, table, own[c]);
        if (wide)
            UNROLL for (int j = 0; j < QUAD; j++, wide += PANEL)
                UNROLL for (int c = 0; c < C; c++) _mm512_storeu_si512(wide + c * W, (__m512i)own[c][j]);
        UNROLL for (int j = 0; j < QUAD; j++) UNROLL for (int r = 0; r < R; r++) {
            const auto number = Pair::number(x + r / S * S * x_stride + ((k + j) * S + r % S) * 4);
            UNROLL for (int c = 0; c < C; c++) sum[r][c] = Pair::add(sum[r][c], number, own[c][j]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) store(out + r * PANEL + c * W, sum[r][c]);
}

template <int S, int R = FLOAT_ROWS>
void bf12_tiles(int rows, const char* x, int64_t x_stride, const int32_t* w, const uint16_t* exponents, int64_t words,
                 float* out, Prefetch prefetch, int32_t* wide) {
    if constexpr (R > 1)
        if (rows < R) return bf12_tiles<S, R - 1>(rows, x, x_stride, w, exponents, words, out, prefetch, wide);
    bf12_tile<S, R>(x, x_stride, w, exponents, words, out, prefetch, wide);
}
#endif

}  // namespace kernel
