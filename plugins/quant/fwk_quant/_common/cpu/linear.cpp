// Linear layers: y = x W^T + bias, for weights packed once.
//
// A matrix is stored in panels of 32 outputs: [panels, words, 32] words of 32 bits, so that a vector of words belongs to
// as many outputs and the same inputs. That is also how AMX wants its second operand.

#include <algorithm>

#include "floats.h"
#include "fwk/team.h"

extern "C" {

enum Format { FLOAT32 = 0, BFLOAT16 = 1 };

struct Matrix {
    const void* words;
    int64_t out_features, in_features, num_words;  // num_words: of a panel's column
    int64_t format;
};

struct Linear {
    const Matrix* matrix;
    const void* x;     // [rows, in_features], of the type of y
    void* y;           // [rows, out_features]
    const void* bias;  // [out_features] of the type of y, or null
    char* spare;       // [rows, row_bytes(matrix)], for more than FEW rows
    int64_t rows, x_stride, y_stride;  // strides in elements
};

struct LinearRows {
    const Matrix* matrix;  // of float32 or bfloat16
    const int64_t* indices;
    void* y;  // [count, in_features]
    int64_t count;
};

}  // extern "C"

namespace kernel {

constexpr int64_t FEW = 4;        // rows that each thread prepares for itself
constexpr int64_t ROW_BLOCK = 96;  // rows of a task

thread_local Spare own;

// What a tile needs of x's rows; stride in words.
struct Rows {
    const int32_t* words;
    int64_t stride;
};

template <class T>
struct Task {
    const Linear& call;
    const Matrix& matrix = *call.matrix;

    // One panel of a block of rows: sums of [rows, PANEL] to y.
    void put(const float* sums, int64_t first_row, int rows, int64_t first) const {
        const int count = int(std::min<int64_t>(PANEL, matrix.out_features - first));
        const T* bias = (const T*)call.bias;
        for (int r = 0; r < rows; r++, sums += PANEL) {
            T* y = (T*)call.y + (first_row + r) * call.y_stride + first;
            T last[PANEL];
            T* to = count == PANEL ? y : last;
            for (int c = 0; c < PANEL; c += W) {
                vf sum = load(sums + c);
                if (bias && count == PANEL) sum += widen(bias + first + c);
                if (bias && count < PANEL) {
                    T some[W] = {};
                    for (int i = c; i < std::min(count, c + W); i++) some[i - c] = bias[first + i];
                    sum += widen(some);
                }
                narrow(to + c, sum);
            }
            if (to != y) memcpy(y, last, count * sizeof(T));
        }
    }

    template <class F>
    void floats(Rows x, int64_t first_row, int64_t end_row, int64_t panel, int64_t step) const {
        const int64_t num_panels = (matrix.out_features + PANEL - 1) / PANEL, size = matrix.num_words * PANEL;
        const int32_t* w = (const int32_t*)matrix.words + panel * size;
        const int32_t* ahead = panel + step < num_panels ? w + step * size : w;
        const int64_t groups = (end_row - first_row + FLOAT_ROWS - 1) / FLOAT_ROWS;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = first_row + (end_row - first_row) * g / groups;
            const int rows = int(first_row + (end_row - first_row) * (g + 1) / groups - at);
            alignas(64) float sums[FLOAT_ROWS * PANEL];
            for (int p = 0; p < PASSES; p++)
                float_tiles<F>(rows, x.words + at * x.stride, x.stride, w + p * C * W, matrix.num_words, sums + p * C * W,
                               g + 1 == groups ? ahead : w);
            put(sums, at, rows, panel * PANEL);
        }
    }
};

inline int64_t row_words(const Matrix& matrix) {
    return matrix.format == BFLOAT16 && !HAS_PAIRS ? 2 * matrix.num_words : matrix.num_words;
}

template <class T>
void prepare(const Linear& call, int64_t row, int32_t* to) {
    const Matrix& matrix = *call.matrix;
    const T* x = (const T*)call.x + row * call.x_stride;
    const int64_t bytes = row_words(matrix) * 4;
    if (matrix.format == BFLOAT16 && !HAS_PAIRS) {
        memset(to, 0, bytes);
        for (int64_t i = 0; i < matrix.in_features; i++) {
            uint32_t wide = uint32_t(((const uint16_t*)x)[i]) << 16;
            memcpy(to + i, &wide, 4);
        }
    } else {
        memset((char*)to + matrix.in_features * sizeof(T), 0, bytes - matrix.in_features * sizeof(T));
        memcpy(to, x, matrix.in_features * sizeof(T));
    }
}

template <class T>
bool is_ready(const Linear& call) {
    const Matrix& matrix = *call.matrix;
    const bool is_same = matrix.format == FLOAT32 || (matrix.format == BFLOAT16 && HAS_PAIRS);
    return is_same && matrix.num_words * 4 == int64_t(matrix.in_features * sizeof(T)) && call.x_stride * sizeof(T) % 4 == 0;
}

template <class T>
Rows rows_of(const Linear& call, fwk::Member& member) {
    if (is_ready<T>(call)) return {(const int32_t*)call.x, int64_t(call.x_stride * sizeof(T) / 4)};
    const int64_t words = row_words(*call.matrix);
    if (call.rows <= FEW) {
        int32_t* to = (int32_t*)own.take(call.rows * words * 4);
        for (int64_t row = 0; row < call.rows; row++) prepare<T>(call, row, to + row * words);
        return {to, words};
    }
    int32_t* to = (int32_t*)call.spare;
    const int64_t step = 4;
    member.chunks((call.rows + step - 1) / step, [&](int64_t i) {
        for (int64_t row = i * step; row < std::min(call.rows, (i + 1) * step); row++)
            prepare<T>(call, row, to + row * words);
    });
    return {to, words};
}

template <class T, class F>
void run_floats(const Linear& call, fwk::Member& member) {
    const Rows x = rows_of<T>(call, member);
    const int64_t num_panels = (call.matrix->out_features + PANEL - 1) / PANEL;
    const int64_t blocks = (call.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const Task<T> task{call};
    member.chunks(num_panels * blocks, [&](int64_t i) {
        const int64_t panel = i / blocks, block = i % blocks;
        const int64_t first = call.rows * block / blocks, end = call.rows * (block + 1) / blocks;
        task.template floats<F>(x, first, end, panel, blocks == 1 ? member.size : 1);
    });
}

}  // namespace kernel

extern "C" {

void linear(const void* args, fwk::Member& member) {
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
    if (call.matrix->format == FLOAT32) return kernel::run_floats<float, kernel::Single>(call, member);
    kernel::run_floats<uint16_t, kernel::Pair>(call, member);
}

// Rows of a matrix as they were before it was packed.
void linear_rows(const void* args, fwk::Member& member) {
    const LinearRows& call = *(const LinearRows*)args;
    const Matrix& matrix = *call.matrix;
    const int64_t bytes = matrix.in_features * (matrix.format == FLOAT32 ? 4 : 2);
    member.chunks(call.count, [&](int64_t i) {
        const int64_t row = call.indices[i], size = matrix.num_words * kernel::PANEL;
        const int32_t* words = (const int32_t*)matrix.words + row / kernel::PANEL * size + row % kernel::PANEL;
        char* to = (char*)call.y + i * bytes;
        for (int64_t at = 0; at < bytes; at += 4, words += kernel::PANEL)
            memcpy(to + at, words, std::min<int64_t>(4, bytes - at));
    });
}

int64_t linear_row_bytes(const Matrix* matrix) { return kernel::row_words(*matrix) * 4; }

}  // extern "C"
