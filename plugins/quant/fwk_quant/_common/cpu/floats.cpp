// Linear layers of float32 and bfloat16.

#include "driver.h"
#include "float_blocks.h"
#include "float_tiles.h"

namespace kernel {

template <class F>
struct Floats {
    static constexpr int ROWS = FLOAT_ROWS, COLUMNS = C * W, SIDE = kernel::SIDE;

    static int64_t row_bytes(const Matrix& m) { return m.num_words * F::PARTS * 4; }

    template <class T>
    static void prepare(const Matrix& m, const T* x, char* to, int64_t step) {
        const int64_t words = m.num_words * F::PARTS;
        int64_t k = 0;
        if (F::PARTS == 1) {
            constexpr int64_t COUNT = 4 / sizeof(T);  // numbers of a word
            for (; k < m.in_features / COUNT; k++) memcpy(to + k * step, x + k * COUNT, 4);
            for (int64_t i = k; i < words; i++) memset(to + i * step, 0, 4);
            memcpy(to + k * step, x + k * COUNT, (m.in_features - k * COUNT) * sizeof(T));
            return;
        }
        for (; k < m.in_features; k++) {
            const float wide = widen_one(x[k]);
            memcpy(to + k * step, &wide, 4);
        }
        for (; k < words; k++) memset(to + k * step, 0, 4);
    }

    // Whether rows of x are read where they lie.
    template <class T>
    static bool reads(const Linear& call) {
        return (SIDE == 1 || call.rows <= ROWS) && F::PARTS == 1 && is_whole<T>(*call.matrix);
    }

    // Whether the words of a row of x are those of the matrix, with none to be filled up.
    template <class T>
    static bool is_whole(const Matrix& m) {
        return m.num_words * 4 == int64_t(m.in_features * sizeof(T));
    }

    // A panel as tiles read it.
    struct Panel {
        const int32_t* words;
        int64_t count;

        Panel(const Matrix& m, int64_t panel, bool) : words((const int32_t*)m.words + panel * m.num_words * PANEL),
                                                      count(m.num_words) {}

        void multiply(int rows, Rows x, int column, float* out, Ahead ahead) const {
            if (x.side == 1) return float_tiles<F, 1>(rows, x.first, x.stride, words + column, count, out, ahead);
            float_tiles<F, SIDE>(rows, x.first, x.stride, words + column, count, out, ahead);
        }
    };
};

#if defined(FWK_TILES)
// Of bfloat16, also for a single row: the order in which a row is summed is AMX's own, and is to be that of all rows.
struct FloatBlocks : Floats<Single> {
    static constexpr int ROWS = fwk::tiles::BLOCK, COLUMNS = PANEL, SIDE = 1;

    template <class T>
    static bool reads(const Linear& call) {
        return is_whole<T>(*call.matrix);
    }

    struct Panel : Floats<Single>::Panel {
        using Floats<Single>::Panel::Panel;

        void multiply(int rows, Rows x, int, float* out, Ahead ahead) const {
            float_block(rows, x.first, x.stride, words, count, out, ahead);
        }
    };
};
typedef FloatBlocks Bfloats;
#else
typedef Floats<Pair> Bfloats;
#endif

}  // namespace kernel

extern "C" {

void linear(const void* args, fwk::Member& member) {
    using namespace kernel;
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
    if (call.matrix->format == FLOAT32) return run<Floats<Single>, float>(call, member);
#if defined(FWK_TILES)
    const fwk::tiles::Region region;
#endif
    run<Bfloats, uint16_t>(call, member);
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
    return matrix->format == FLOAT32 ? Floats<Single>::row_bytes(*matrix) : Bfloats::row_bytes(*matrix);
}

}  // extern "C"
