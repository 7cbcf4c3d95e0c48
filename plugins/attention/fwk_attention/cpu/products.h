// Products of a few rows with a tile of keys or values, in registers.

#pragma once

#include "numbers.h"
#include "tasks.h"

namespace {

constexpr int TILE = 128;  // keys at a time, at most
constexpr int ROWS = 6;    // rows of a product kept in registers at a time
constexpr int COLS = W == 16 ? 4 : 2;  // vectors of a product's row kept in registers at a time

struct Columns {  // vectors of columns of K
    const int32_t* const* at;    // where each starts
    const int32_t* const* next;  // the same of the tile that comes next
    int stride;                  // words from row to row
};

inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// S[R, C * W] = A[R, words] K
template <class P, int R, int C>
void score(const int32_t* a, int lda, Columns keys, float* s, int words) {
    vf sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sum[r][i] = vf{};
    for (int k = 0; k < words; k++) {
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) fetch(keys.next[i] + k * keys.stride);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const auto x = P::word(a + r * lda + k);
#pragma GCC unroll 8
            for (int i = 0; i < C; i++) sum[r][i] = P::step(sum[r][i], x, keys.at[i] + k * keys.stride);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) store(s + r * TILE + i * W, sum[r][i]);
}

template <class P, int C, int R = ROWS>
void score_rows(int rows, const int32_t* a, int lda, Columns keys, float* s, int words) {
    for (; rows >= R; rows -= R, a += R * lda, s += R * TILE) score<P, R, C>(a, lda, keys, s, words);
    if constexpr (R > 1)
        if (rows) score_rows<P, C, R - 1>(rows, a, lda, keys, s, words);
}

struct Values {  // some rows of words of V, one after another, and the same of the tile that comes next
    const int32_t *at, *next;
    int rows;
};

// O[R, C * W] = O * factor + weights[R, ...] V, or without the former when it is the first.
template <class P, int R, int C>
void weigh(const int32_t* weights, const Values* values, int num_values, int ldv, float* o, int ldo,
           const float* factors, bool is_first) {
    vf sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sum[r][i] = is_first ? vf{} : load(o + r * ldo + i * W) * factors[r];
    for (; num_values--; values++) {
        const int32_t *b = values->at, *next = values->next;
        for (int k = 0; k < values->rows; k++, b += ldv, next += ldv, weights++) {
#pragma GCC unroll 8
            for (int i = 0; i < C; i++) fetch(next + i * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const auto x = P::word(weights + r * (TILE / P::PER_WORD));
#pragma GCC unroll 8
                for (int i = 0; i < C; i++) sum[r][i] = P::step(sum[r][i], x, b + i * W);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) store(o + r * ldo + i * W, sum[r][i]);
}

template <class P, int C, int R = ROWS>
void weigh_rows(int rows, const int32_t* weights, const Values* values, int num_values, int ldv, float* o, int ldo,
                const float* factors, bool is_first) {
    for (; rows >= R; rows -= R, weights += R * (TILE / P::PER_WORD), o += R * ldo, factors += R)
        weigh<P, R, C>(weights, values, num_values, ldv, o, ldo, factors, is_first);
    if constexpr (R > 1)
        if (rows) weigh_rows<P, C, R - 1>(rows, weights, values, num_values, ldv, o, ldo, factors, is_first);
}

}  // namespace
