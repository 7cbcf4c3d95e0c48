// y = x W^T + bias over the panels of a matrix, whatever its numbers are.
//
// A matrix is stored in panels of 32 outputs, so that a vector of words belongs to as many outputs and the same inputs.
// That is also how AMX wants its second operand. Tasks are panels, of many rows also blocks of rows.
#pragma once

#include <algorithm>

#include "fwk/team.h"
#include "matrix.h"
#include "vectors.h"

namespace kernel {

constexpr int64_t FEW = 4;          // rows that each thread prepares for itself
constexpr int64_t ROW_BLOCK = 192;  // rows of a task

thread_local Spare own;

// x as tiles read it.
struct Rows {
    const char* first;
    int64_t stride;  // bytes
    int64_t side;    // rows that lie side by side, word by word

    Rows from(int64_t row) const { return {first + row * stride, stride, side}; }
};

// K: a kind of matrix; how rows of x are prepared for it, a panel opened, and tiles of ROWS x COLUMNS computed.
template <class K, class T>
Rows rows_of(const Linear& call, fwk::Member& member) {
    const Matrix& m = *call.matrix;
    if (K::template reads<T>(call)) return {(const char*)call.x, int64_t(call.x_stride * sizeof(T)), 1};
    const int64_t bytes = K::row_bytes(m);
    const auto prepare = [&](int64_t row, int64_t rows, int64_t side, char* to) {
        K::prepare(m, (const T*)call.x + row * call.x_stride, call.x_stride, rows, side, to + row * bytes);
    };
    if (call.rows <= FEW) {
        char* to = own.take(call.rows * bytes);
        for (int64_t row = 0; row < call.rows; row++) prepare(row, 1, 1, to);
        return {to, bytes, 1};
    }
    const int64_t step = 4;
    member.chunks((call.rows + step - 1) / step, [&](int64_t i) {
        const int64_t end = std::min(call.rows, (i + 1) * step);
        for (int64_t row = i * step; row < end; row += K::SIDE)
            prepare(row, std::min<int64_t>(K::SIDE, end - row), K::SIDE, call.spare);
    });
    return {call.spare, bytes, K::SIDE};
}

// Sums of [rows, PANEL] to y, whose outputs from `first` on they are.
template <class T>
void put(const Linear& call, const float* sums, int64_t first_row, int rows, int64_t first) {
    const int count = int(std::min<int64_t>(PANEL, call.matrix->out_features - first));
    T bias[PANEL] = {}, last[PANEL];
    if (call.bias) memcpy(bias, (const T*)call.bias + first, count * sizeof(T));
    for (int r = 0; r < rows; r++, sums += PANEL) {
        T* y = (T*)call.y + (first_row + r) * call.y_stride + first;
        T* to = count == PANEL ? y : last;
        for (int c = 0; c < PANEL; c += W) narrow(to + c, call.bias ? load(sums + c) + widen(bias + c) : load(sums + c));
        if (to != y) memcpy(y, last, count * sizeof(T));
    }
}

// Where part i of n begins of so many rows, of which those side by side stay together.
inline int64_t part(int64_t rows, int64_t i, int64_t n, int64_t side) {
    return std::min(rows, (rows + side - 1) / side * i / n * side);
}

template <class K, class T>
void run(const Linear& call, fwk::Member& member) {
    const Matrix& m = *call.matrix;
    const Rows x = rows_of<K, T>(call, member);
    const int64_t panels = (m.out_features + PANEL - 1) / PANEL, blocks = (call.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    member.chunks_in_order(panels * blocks, [&](int64_t i, int64_t next) {
        const int64_t panel = i % panels, block = i / panels;
        const int64_t first = part(call.rows, block, blocks, x.side), end = part(call.rows, block + 1, blocks, x.side);
        const int64_t tiles = (end - first + K::ROWS - 1) / K::ROWS;
        // Meanwhile the panel that this thread will probably take next is fetched, a part by each tile of rows: memory
        // takes longer for a panel than a tile does.
        const char* ahead = (const char*)m.words + next % panels * m.num_words * PANEL * 4;
        const int64_t share = (PANEL * 4 + tiles - 1) / tiles;
        const typename K::Panel opened(m, panel, tiles > 1);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = first + part(end - first, tile, tiles, x.side);
            const int64_t last = first + part(end - first, tile + 1, tiles, x.side);
            alignas(64) float sums[K::ROWS * PANEL];
            // Lines to be written to are fetched, too: of many rows they are no longer in a cache.
            for (int64_t r = at; r < last; r++) __builtin_prefetch((T*)call.y + r * call.y_stride + panel * PANEL, 1, 3);
            for (int column = 0; column < PANEL; column += K::COLUMNS)
                opened.multiply(int(last - at), x.from(at), column, sums + column,
                                {ahead + tile * share * m.num_words, share});
            put<T>(call, sums, at, int(last - at), panel * PANEL);
        }
    });
}

}  // namespace kernel
