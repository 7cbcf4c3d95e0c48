// y = x W^T + bias over the panels of a matrix, whatever its numbers are.
//
// A matrix is stored in panels of 32 outputs, so that a vector of words belongs to as many outputs and the same inputs.
// That is also how AMX wants its second operand. Tasks are panels, of many rows also blocks of rows.
//
// A line of memory that another core wrote comes from there: in some 25 ns from a core of the same cache, in 150 from
// another. So threads share little here: each prepares the rows it needs itself, if that is little work beside its own,
// and of many rows each of two has its half, but for AMX, where that would be to wait for each panel twice.
#pragma once

#include <algorithm>

#include "fwk/thread_pool.h"
#include "matrix.h"
#include "vectors.h"

namespace kernel {

constexpr int64_t FEW = 4;          // rows that are not put side by side
constexpr int64_t OWN_PANELS = 8;   // of so many for each thread, each prepares its rows itself
constexpr int64_t ROW_BLOCK = 192;  // rows of a task, at most
constexpr int64_t ROW_HALF = 32;    // rows of one of two threads, at least
constexpr int64_t BLOCK_BYTES = 1 << 20;  // of a task's rows of blocks, at most: they are to stay in the second cache

thread_local Spare own;

// x as tiles read it.
struct Rows {
    const char* first;
    int64_t stride;  // bytes
    int64_t side;    // rows that lie side by side, word by word

    Rows from(int64_t row) const { return {first + row * stride, stride, side}; }
};

// Rows of x from `first` on as K wants them, so many side by side.
template <class K, class T>
void prepare(const Linear& call, int64_t first, int64_t end, int64_t side, char* to) {
    const Matrix& m = *call.matrix;
    const int64_t bytes = K::row_bytes(m);
    for (int64_t row = first; row < end; row += side, to += side * bytes)
        K::prepare(m, (const T*)call.x + row * call.x_stride, call.x_stride, std::min(side, end - row), side, to);
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

// Sums of a block that are put a few rows at a time, while tiles multiply the next one.
template <class T>
struct Outcome {
    const Linear& call;
    const float* sums;  // as if they began with row 0
    int64_t row, end, first;

    void begin(const float* from, int64_t first_row, int64_t end_row, int64_t first_output) {
        sums = from - first_row * PANEL;
        row = first_row, end = end_row, first = first_output;
    }

    void put(int64_t most) {
        const int64_t count = std::min(most, end - row);
        if (count <= 0) return;
        kernel::put<T>(call, sums + row * PANEL, row, int(count), first);
        row += count;
    }
};

// Where part i of n begins of so many rows, of which those side by side stay together.
inline int64_t part(int64_t rows, int64_t i, int64_t n, int64_t side) {
    return std::min(rows, (rows + side - 1) / side * i / n * side);
}

// Tiles multiply so fast that panels are to be read once, for as many rows as there is room for.
template <class K>
int64_t num_blocks(int64_t rows, int64_t bytes, int size) {
    if (K::ARE_BLOCKS) return (rows * bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    return size == 2 && rows >= 2 * ROW_HALF ? (blocks + 1) / 2 * 2 : blocks;
}

// What threads do of a call: panels by blocks of rows. K: a kind of matrix; how rows of x are prepared for it, a panel
// opened, and tiles of ROWS x COLUMNS computed.
template <class K, class T>
struct Work {
    const Linear& call;
    const Matrix& m = *call.matrix;
    const bool is_read = K::template reads<T>(call), is_few = call.rows <= FEW;
    const int64_t side = is_read || is_few ? 1 : K::SIDE;
    const int64_t stride = is_read ? call.x_stride * int64_t(sizeof(T)) : K::row_bytes(m);
    const int64_t panels = (m.out_features + PANEL - 1) / PANEL, blocks;
    const bool is_shared;
    int64_t prepared = -1;  // the block whose rows this thread has

    Work(const Linear& given, int size)
        : call(given), blocks(num_blocks<K>(call.rows, stride, size)),
          is_shared(!is_read && !is_few && (panels < OWN_PANELS * size || call.rows >= K::SHARED_ROWS)) {}

    void share(fwk::PoolThread& thread) {
        if (!is_shared) return;
        const int64_t step = std::max<int64_t>(side, 4);
        thread.parallel_for_ordered((call.rows + step - 1) / step, [&](int64_t i, int64_t) {
            prepare<K, T>(call, i * step, std::min(call.rows, (i + 1) * step), side, call.spare + i * step * stride);
        });
    }

    struct Task {  // some rows by a panel
        int64_t panel, first, end, tiles;
        Rows x;
    };

    Task task(int64_t i) {
        const int64_t block = i / panels;
        const int64_t first = part(call.rows, block, blocks, side), end = part(call.rows, block + 1, blocks, side);
        return {i % panels, first, end, (end - first + K::ROWS - 1) / K::ROWS, rows(block, first, end)};
    }

    // Rows of a block.
    Rows rows(int64_t block, int64_t first, int64_t end) {
        const Rows x{is_read ? (const char*)call.x : call.spare, stride, side};
        if (is_read || is_shared) return x.from(first);
        char* to = own.take((end - first + side - 1) / side * side * stride);
        if (block != prepared) prepare<K, T>(call, first, end, side, to);
        prepared = block;
        return {to, stride, side};
    }
};

template <class K, class T>
void run(const Linear& call, fwk::PoolThread& thread) {
    Work<K, T> work(call, thread.size);
    const Matrix& m = work.m;
    const int64_t panels = work.panels, side = work.side;
    work.share(thread);
    thread.parallel_for_ordered(panels * work.blocks, [&](int64_t i, int64_t next) {
        const auto [panel, first, end, tiles, x] = work.task(i);
        // Meanwhile the panel that this thread will probably take next is fetched, a part by each tile of rows: memory
        // takes longer for a panel than a tile does.
        const char* ahead = (const char*)m.words + next % panels * m.num_words * PANEL * 4;
        const int64_t share = (PANEL * 4 + tiles - 1) / tiles;
        const typename K::Panel opened(m, panel, tiles > 1);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = part(end - first, tile, tiles, side), last = part(end - first, tile + 1, tiles, side);
            alignas(64) float sums[K::ROWS * PANEL];
            // Lines to be written to are fetched, too: of many rows they are no longer in a cache.
            for (int64_t r = at; r < last; r++)
                __builtin_prefetch((T*)call.y + (first + r) * call.y_stride + panel * PANEL, 1, 3);
            for (int column = 0; column < PANEL; column += K::COLUMNS)
                opened.multiply(int(last - at), x.from(at), column, sums + column,
                                {ahead + tile * share * m.num_words, share});
            put<T>(call, sums, first + at, int(last - at), panel * PANEL);
        }
    });
}

// The same by blocks, with what is to be done with one's sums beside the products of the next.
template <class K, class T>
void run_blocks(const Linear& call, fwk::PoolThread& thread) {
    Work<K, T> work(call, thread.size);
    const Matrix& m = work.m;
    const int64_t panels = work.panels, side = work.side;
    work.share(thread);
    alignas(64) float memory[2][K::ROWS * PANEL];
    float *sums = memory[0], *others = memory[1];
    Outcome<T> outcome{call};
    const auto compute = [&](int64_t i, int64_t next) {
        const auto [panel, first, end, tiles, x] = work.task(i);
        const char* ahead = (const char*)m.words + next % panels * m.num_words * PANEL * 4;
        const typename K::Panel opened(m, panel, tiles > 1);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = part(end - first, tile, tiles, side), last = part(end - first, tile + 1, tiles, side);
            opened.multiply_beside(int(last - at), x.from(at), sums, {ahead, tile, tiles}, outcome);
            outcome.begin(sums, first + at, first + last, panel * PANEL);
            std::swap(sums, others);
        }
    };
    thread.parallel_for_ordered(panels * work.blocks, compute, [&] { outcome.put(K::ROWS); });
}

}  // namespace kernel
