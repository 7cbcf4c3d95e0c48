// Linear layers of float32 and bfloat16.

#include "driver.h"
#include "float_tiles.h"

namespace kernel {

template <class F>
struct Floats {
    static constexpr int ROWS = FLOAT_ROWS;

    static int64_t row_bytes(const Matrix& m) { return m.num_words * F::PARTS * 4; }

    template <class T>
    static void prepare(const Matrix& m, const T* x, char* to) {
        if (F::PARTS == 1) {
            memset(to + row_bytes(m) - 4, 0, 4);
            memcpy(to, x, m.in_features * sizeof(T));
            return;
        }
        memset(to + row_bytes(m) - 8, 0, 8);
        for (int64_t i = 0; i < m.in_features; i++) {
            const float wide = widen_one(x[i]);
            memcpy(to + i * 4, &wide, 4);
        }
    }

    // Whether rows of x are read where they lie.
    template <class T>
    static bool reads(const Linear& call) {
        return F::PARTS == 1 && call.matrix->num_words * 4 == int64_t(call.matrix->in_features * sizeof(T));
    }

    static void tiles(int rows, const Matrix& m, Rows x, int64_t panel, int column, float* out, const int32_t* ahead) {
        const int32_t* w = (const int32_t*)m.words + panel * m.num_words * PANEL + column;
        float_tiles<F>(rows, x.first, x.stride, w, m.num_words, out, ahead);
    }
};

}  // namespace kernel

extern "C" {

struct LinearRows {
    const Matrix* matrix;
    const int64_t* indices;
    void* y;  // [count, in_features]
    int64_t count;
};

void linear(const void* args, fwk::Member& member) {
    using namespace kernel;
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
    if (call.matrix->format == FLOAT32) return run<Floats<Single>, float>(call, member);
    run<Floats<Pair>, uint16_t>(call, member);
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

// Bytes of a row of x once it is prepared.
int64_t linear_row_bytes(const Matrix* matrix) {
    using namespace kernel;
    return matrix->format == FLOAT32 ? Floats<Single>::row_bytes(*matrix) : Floats<Pair>::row_bytes(*matrix);
}

}  // extern "C"
