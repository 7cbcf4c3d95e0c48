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

    // A panel as tiles read it.
    struct Panel {
        const int32_t* words;
        int64_t count;

        Panel(const Matrix& m, int64_t panel, bool) : words((const int32_t*)m.words + panel * m.num_words * PANEL),
                                                      count(m.num_words) {}

        void multiply(int rows, Rows x, int column, float* out, Ahead ahead) const {
            float_tiles<F>(rows, x.first, x.stride, words + column, count, out, ahead);
        }
    };
};

}  // namespace kernel

extern "C" {

void linear(const void* args, fwk::Member& member) {
    using namespace kernel;
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
    if (call.matrix->format == FLOAT32) return run<Floats<Single>, float>(call, member);
    run<Floats<Pair>, uint16_t>(call, member);
}

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
