// GEMM driver: y = x W^T + bias over the panels of a matrix of any format.
//
// A matrix is stored in panels of 32 outputs, so that a vector of words belongs to as many outputs and the same inputs.
// That is also how AMX wants its second operand. Tasks are panels, of many rows also blocks of rows.
//
// A cache line that another core wrote costs a cache-to-cache transfer: some 25 ns within a shared cache, 150 ns otherwise. So
// threads share little: each prepares the rows it needs itself if that is little work compared to its products, and of many
// rows each of two threads has one half. AMX is the exception, where the halves would read each panel twice.
#pragma once

#include <algorithm>

#include "fwk/thread_pool.h"
#include "matrix.h"
#include "panels.h"

namespace kernel {

constexpr int64_t MAX_ROW_MAJOR = 4;          // rows up to which x stays row-major
constexpr int64_t MIN_OWN_PANELS = 8;         // panels per thread from which each thread prepares its rows itself
constexpr int64_t MAX_TASK_ROWS = 192;        // rows of a task, at most
constexpr int64_t MIN_HALF_ROWS = 32;         // rows of one of two threads, at least
constexpr int64_t MAX_BLOCK_BYTES = 1 << 20;  // of a task's rows with AMX, at most: they have to stay in the L2 cache

thread_local ThreadMemory own_rows;

// x as tiles read it.
struct Rows {
    const char* first;
    int64_t stride;  // bytes
    int64_t side;    // rows that lie side by side, word by word

    Rows from(int64_t row) const { return {first + row * stride, stride, side}; }
};

// Rows [first, end) of x in the layout K reads, `side` rows interleaved.
template <class K, class T>
void prepare(const Linear& call, int64_t first, int64_t end, int64_t side, char* to) {
    const Matrix& m = *call.matrix;
    const int64_t bytes = K::row_bytes(m);
    for (int64_t row = first; row < end; row += side, to += side * bytes)
        K::prepare(m, (const T*)call.x + row * call.x_stride, call.x_stride, std::min(side, end - row), side, to);
}

// Write sums [rows, PANEL] to y, from output `first` on, with bias.
template <class T>
void put(const Linear& call, const float* sums, int64_t first_row, int rows, int64_t first) {
    const int count = int(std::min<int64_t>(PANEL, call.matrix->out_features - first));
    T bias[PANEL] = {}, last[PANEL];
    if (call.bias) memcpy(bias, (const T*)call.bias + first, count * sizeof(T));
    for (int r = 0; r < rows; r++, sums += PANEL) {
        T* y = (T*)call.y + (first_row + r) * call.y_stride + first;
        T* to = count == PANEL ? y : last;
        for (int c = 0; c < PANEL; c += W) store(to + c, call.bias ? load(sums + c) + load(bias + c) : load(sums + c));
        if (to != y) memcpy(y, last, count * sizeof(T));
    }
}

// Sums of a finished block. They are written a few rows at a time, interleaved with the AMX products of the next block.
template <class T>
struct PendingOutput {
    const Linear& call;
    const float* sums;  // as if they began with row 0
    int64_t row, end, first;

    void begin(const float* from, int64_t first_row, int64_t end_row, int64_t first_output) {
        sums = from - first_row * PANEL;
        row = first_row, end = end_row, first = first_output;
    }

    void put(int64_t max_rows) {
        const int64_t count = std::min(max_rows, end - row);
        if (count <= 0) return;
        kernel::put<T>(call, sums + row * PANEL, row, int(count), first);
        row += count;
    }
};

// Start of part i of n of the rows. Interleaved rows are not split.
inline int64_t part(int64_t rows, int64_t i, int64_t n, int64_t side) {
    return std::min(rows, (rows + side - 1) / side * i / n * side);
}

// Row blocks of a call. AMX is bound by reading panels, so its blocks are as large as the L2 cache allows.
template <class K>
int64_t num_blocks(int64_t rows, int64_t bytes, int size) {
    if (K::ARE_BLOCKS) return (rows * bytes + MAX_BLOCK_BYTES - 1) / MAX_BLOCK_BYTES;
    const int64_t blocks = (rows + MAX_TASK_ROWS - 1) / MAX_TASK_ROWS;
    return size == 2 && rows >= 2 * MIN_HALF_ROWS ? (blocks + 1) / 2 * 2 : blocks;
}

// The tasks of a call: panels by row blocks. K: a kind of matrix, which says how rows of x are prepared, a panel is opened and
// tiles of ROWS x COLUMNS are computed.
template <class K, class T>
struct Work {
    const Linear& call;
    const Matrix& m = *call.matrix;
    const bool is_read = K::template reads<T>(call), is_row_major = call.rows <= MAX_ROW_MAJOR;
    const int64_t side = is_read || is_row_major ? 1 : K::SIDE;
    const int64_t stride = is_read ? call.x_stride * int64_t(sizeof(T)) : K::row_bytes(m);
    const int64_t panels = (m.out_features + PANEL - 1) / PANEL, blocks;
    const bool is_prepared_jointly;
    int64_t prepared = -1;  // the block whose rows this thread has prepared

    Work(const Linear& given, int size)
        : call(given), blocks(num_blocks<K>(call.rows, stride, size)),
          is_prepared_jointly(!is_read && !is_row_major && (panels < MIN_OWN_PANELS * size || call.rows >= K::SHARED_ROWS)) {}

    void share(fwk::PoolThread& thread) {
        if (!is_prepared_jointly) return;
        const int64_t step = std::max<int64_t>(side, 4);
        thread.parallel_for_ordered((call.rows + step - 1) / step, [&](int64_t i, int64_t) {
            prepare<K, T>(call, i * step, std::min(call.rows, (i + 1) * step), side, call.scratch + i * step * stride);
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
        const Rows x{is_read ? (const char*)call.x : call.scratch, stride, side};
        if (is_read || is_prepared_jointly) return x.from(first);
        char* to = own_rows.take((end - first + side - 1) / side * side * stride);
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
        // Prefetch the panel that this thread will probably take next, one part per tile of rows: reading a panel from memory
        // takes longer than computing a tile.
        const char* prefetch = (const char*)m.words + next % panels * m.num_words * PANEL * 4;
        const int64_t share = (PANEL * 4 + tiles - 1) / tiles;
        const typename K::Panel opened(m, panel, tiles > 1);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = part(end - first, tile, tiles, side), last = part(end - first, tile + 1, tiles, side);
            alignas(64) float sums[K::ROWS * PANEL];
            // Prefetch the output for writing (write-allocate): with many rows it is no longer in a cache.
            for (int64_t r = at; r < last; r++)
                __builtin_prefetch((T*)call.y + (first + r) * call.y_stride + panel * PANEL, 1, 3);
            for (int column = 0; column < PANEL; column += K::COLUMNS)
                opened.multiply(int(last - at), x.from(at), column, sums + column,
                                {prefetch + tile * share * m.num_words, share});
            put<T>(call, sums, first + at, int(last - at), panel * PANEL);
        }
    });
}

// `run` for AMX: the sums of a block are written while the products of the next block are computed.
template <class K, class T>
void run_blocks(const Linear& call, fwk::PoolThread& thread) {
    Work<K, T> work(call, thread.size);
    const Matrix& m = work.m;
    const int64_t panels = work.panels, side = work.side;
    work.share(thread);
    alignas(64) float memory[2][K::ROWS * PANEL];
    float *sums = memory[0], *others = memory[1];
    PendingOutput<T> pending{call};
    const auto compute = [&](int64_t i, int64_t next) {
        const auto [panel, first, end, tiles, x] = work.task(i);
        const char* prefetch = (const char*)m.words + next % panels * m.num_words * PANEL * 4;
        const typename K::Panel opened(m, panel, tiles > 1);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = part(end - first, tile, tiles, side), last = part(end - first, tile + 1, tiles, side);
            opened.multiply_interleaved(int(last - at), x.from(at), sums, {prefetch, tile, tiles}, pending);
            pending.begin(sums, first + at, first + last, panel * PANEL);
            std::swap(sums, others);
        }
    };
    thread.parallel_for_ordered(panels * work.blocks, compute, [&] { pending.put(K::ROWS); });
}

}  // namespace kernel
