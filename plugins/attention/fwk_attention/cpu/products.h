// Products of a few rows with a tile of keys or values, in registers.

#pragma once

#include "numbers.h"
#include "tasks.h"

namespace {

constexpr int TILE = 128;  // keys at a time, at most
constexpr int ROWS = 6;  // rows of a product kept in registers at a time
constexpr int COLS = W == 16 ? 4 : 2;  // vectors of a product's row kept in registers at a time
// Rows that prefetch the next tile, redundantly: the memory system drops prefetches it has no slot for.
constexpr int PREFETCH_ROWS = 24;

// E below: int32_t, a word; or Stored, what products make one of.
template <class E>
struct Columns {  // vectors of columns of K
    const E* const* at;    // where each starts
    const E* const* next;  // the same of the tile that comes next
    int stride;            // words from row to row
};

inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// put(row, C vectors) for each row of A[R, words] K. Not inlined, to avoid register spills in the loop.
template <class P, int R, int C, class E, class F>
__attribute__((noinline)) void score(int row, const int32_t* a, int lda, Columns<E> keys, int words, F put) {
    vf sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sum[r][i] = vf{};
    constexpr int HALF = ROWS / 2;  // rows that one register and a multiple of another reach
    const int32_t* const other = a + HALF * lda;
    const bool prefetches = R < ROWS || row < PREFETCH_ROWS;
    for (int k = 0; k < words; k++) {
#pragma GCC unroll 8
        for (int i = 0; i < C && prefetches; i++) fetch(keys.next[i] + k * keys.stride);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const auto x = P::word((r < HALF ? a : other) + r % HALF * int64_t(lda) + k);
#pragma GCC unroll 8
            for (int i = 0; i < C; i++) sum[r][i] = P::step(sum[r][i], x, keys.at[i] + k * keys.stride);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) put(row + r, sum[r]);
}

template <class P, int C, class E, class F, int R = ROWS>
void score_rows(int rows, const int32_t* a, int lda, Columns<E> keys, int words, F put, int row = 0) {
    for (; row + R <= rows; row += R) score<P, R, C>(row, a + row * lda, lda, keys, words, put);
    if constexpr (R > 1)
        if (row < rows) score_rows<P, C, E, F, R - 1>(rows, a, lda, keys, words, put, row);
}

template <class E>
struct Values {  // some rows of words of V, one after another, and the same of the tile that comes next
    const E *at, *next;
    int rows;
};

// O[R, C * W] += weights[R, ...] V; for the first tile O is not read.
template <class P, int R, int C, class E>
void accumulate_pv(int row, const int32_t* weights, const Values<E>* values, int num_values, int ldv, float* o, int ldo,
           bool is_first) {
    const bool prefetches = R < ROWS || row < PREFETCH_ROWS;
    vf sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sum[r][i] = is_first ? vf{} : load(o + r * ldo + i * W);
    for (; num_values--; values++) {
        const E *b = values->at, *next = values->next;
        for (int k = 0; k < values->rows; k++, b += ldv, next += ldv, weights++) {
#pragma GCC unroll 8
            for (int i = 0; i < C && prefetches; i++) fetch(next + i * W);
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

template <class P, int C, class E, int R = ROWS>
void accumulate_pv_rows(int rows, const int32_t* weights, const Values<E>* values, int num_values, int ldv, float* o, int ldo,
                bool is_first, int row = 0) {
    for (; row + R <= rows; row += R) {
        const int32_t* own = weights + row * (TILE / P::PER_WORD);
        accumulate_pv<P, R, C>(row, own, values, num_values, ldv, o + row * ldo, ldo, is_first);
    }
    if constexpr (R > 1)
        if (row < rows) accumulate_pv_rows<P, C, E, R - 1>(rows, weights, values, num_values, ldv, o, ldo, is_first, row);
}

}  // namespace
