// Linear layers of float32 and bfloat16.

#include "driver.h"
#include "float_blocks.h"
#include "float_tiles.h"
#include "screen.h"
#include "bf12.h"

namespace kernel {

template <class F>
struct Floats {
    static constexpr int ROWS = FLOAT_ROWS, COLUMNS = C * W, SIDE = kernel::SIDE;
    static constexpr bool ARE_BLOCKS = false;
    static constexpr int64_t SHARED_ROWS = INT64_MAX;

    // Words of a row of x.
    static int64_t words_of(const Matrix& m) {
        return m.format == BFLOAT16_IN_12 ? m.num_words / PACKED_QUAD * QUAD : m.num_words;
    }

    static int64_t row_bytes(const Matrix& m) { return words_of(m) * F::PARTS * 4; }

    // Interleave `rows` rows word by word, `side` rows apart.
    template <class T>
    static void prepare(const Matrix& m, const T* x, int64_t x_stride, int64_t rows, int64_t side, char* to) {
        constexpr int64_t COUNT = F::PARTS == 1 ? 4 / sizeof(T) : 1;  // numbers of a word
        const int64_t size = m.in_features, words = words_of(m) * F::PARTS, step = side * 4;
        int64_t done = 0;
#if defined(__AVX512F__)
        if (F::PARTS == 1 && rows == SIDE) done = four_side_by_side((const char*)x, x_stride * sizeof(T), size / COUNT, to);
#endif
        for (int64_t r = 0; r < rows; r++, x += x_stride, to += 4) {
            int64_t k = done;
            for (; k < size / COUNT; k++) put_word(x + k * COUNT, to + k * step);
            for (int64_t i = k; i < words; i++) memset(to + i * step, 0, 4);
            if (size % COUNT) memcpy(to + k * step, x + k * COUNT, size % COUNT * sizeof(T));
        }
    }

    template <class T>
    static void put_word(const T* x, char* to) {
        if (F::PARTS == 1) memcpy(to, x, 4);
        else *(float*)to = to_float(*x);
    }

    // Whether rows of x are read where they lie.
    template <class T>
    static bool reads(const Linear& call) {
        return (SIDE == 1 || call.rows <= ROWS) && F::PARTS == 1 && is_whole<T>(*call.matrix);
    }

    // Whether a row of x needs no padding to the words of the matrix.
    template <class T>
    static bool is_whole(const Matrix& m) {
        return words_of(m) * 4 == int64_t(m.in_features * sizeof(T));
    }

    // A panel as tiles read it.
    struct Panel {
        const int32_t* words;
        int64_t count;

        Panel(const Matrix& m, int64_t panel, bool) : words((const int32_t*)m.words + panel * m.num_words * PANEL),
                                                      count(m.num_words) {}

        void multiply(int rows, Rows x, int column, float* out, Prefetch prefetch) const {
            if (x.side == 1) return float_tiles<F, 1>(rows, x.first, x.stride, words + column, count, out, prefetch);
            float_tiles<F, SIDE>(rows, x.first, x.stride, words + column, count, out, prefetch);
        }
    };
};

#if defined(__AVX512BF16__) && !defined(FWK_TILES)
#define FWK_BF12 1

thread_local ThreadMemory unpacked;

struct Bf12 : Floats<Pair> {
    struct Panel {
        const int32_t* words;
        const uint16_t* exponents;
        const Rare *rare, *end;
        int64_t count;
        int32_t* wide;                // for several tiles, the decompressed words: the first tile stores them for the others
        mutable bool is_wide = false;

        Panel(const Matrix& m, int64_t panel, bool is_repeated)
            : words((const int32_t*)m.words + panel * m.num_words * PANEL), exponents(m.exponents + panel * 2 * CODES),
              rare(m.rare + m.rare_starts[panel]), end(m.rare + m.rare_starts[panel + 1]), count(words_of(m)),
              wide(is_repeated ? (int32_t*)unpacked.take(count * PANEL * 4) : nullptr) {}

        void multiply(int rows, Rows x, int, float* out, Prefetch prefetch) const {
            if (x.side == 1) tiles<1>(rows, x, out, prefetch);
            else tiles<SIDE>(rows, x, out, prefetch);
        }

        template <int S>
        void tiles(int rows, Rows x, float* out, Prefetch prefetch) const {
            const Prefetch slower{prefetch.at, prefetch.bytes * PACKED_QUAD / QUAD};  // there are more words
            if (is_wide) float_tiles<Pair, S>(rows, x.first, x.stride, wide, count, out, slower);
            else bf12_tiles<S>(rows, x.first, x.stride, words, exponents, count, out, prefetch, wide);
            is_wide = wide;
            for (const Rare* one = rare; one < end; one++) {
                const char* numbers = x.first + one->input / 2 * S * 4 + one->input % 2 * 2;
                const float value = to_float(one->value);
                float* to = out + one->output;
                for (int left = rows; left > 0; left -= S, numbers += S * x.stride)
                    for (int r = 0; r < std::min(S, left); r++, to += PANEL) {
                        uint16_t number;
                        memcpy(&number, numbers + r * 4, 2);
                        *to += to_float(number) * value;
                    }
            }
        }
    };
};
#endif

#if defined(FWK_TILES)
// bfloat16 by AMX, for single rows too: AMX has its own order of summation, and all rows must use the same.
struct FloatBlocks : Floats<Single> {
    static constexpr int ROWS = fwk::tiles::BLOCK, COLUMNS = PANEL, SIDE = 1;
    static constexpr bool ARE_BLOCKS = true;

    template <class T>
    static bool reads(const Linear& call) {
        return is_whole<T>(*call.matrix);
    }

    struct Panel : Floats<Single>::Panel {
        using Floats<Single>::Panel::Panel;

        void multiply(int rows, Rows x, int, float* out, Prefetch) const {
            float_block(rows, x.first, x.stride, words, count, out, [] {});
        }

        template <class O>
        void multiply_interleaved(int rows, Rows x, float* out, NextPanel next, O& pending) const {
            const int64_t steps = count / fwk::tiles::SIDE, share = (ROWS + steps - 1) / steps;
            PanelPrefetch lines(next, count * 2, steps);
            float_block(rows, x.first, x.stride, words, count, out, [&] {
                lines.fetch();
                pending.put(share);
            });
        }
    };
};
typedef FloatBlocks Bfloats;
#else
typedef Floats<Pair> Bfloats;
#endif

#if defined(FWK_BF12)
thread_local ThreadMemory decompressed;

// Decompress a panel of bf12 to bfloat16.
const int32_t* decompress_panel(const Matrix& m, int64_t panel) {
    const int32_t* from = (const int32_t*)m.words + panel * m.num_words * PANEL;
    const __m512i table = _mm512_loadu_si512(m.exponents + panel * 2 * CODES);
    const int64_t count = m.num_words / PACKED_QUAD * QUAD;
    int32_t* words = (int32_t*)decompressed.take(count * PANEL * 4);
    for (int32_t* to = words; to < words + count * PANEL; from += PACKED_QUAD * PANEL, to += QUAD * PANEL)
        for (int c = 0; c < PANEL; c += W) {
            __m512bh own[QUAD];
            unpack_quad(from + c, table, own);
            for (int j = 0; j < QUAD; j++) _mm512_storeu_si512(to + j * PANEL + c, (__m512i)own[j]);
        }
    for (int64_t i = m.rare_starts[panel]; i < m.rare_starts[panel + 1]; i++) {
        const Rare& rare = m.rare[i];
        memcpy((char*)(words + rare.input / 2 * PANEL + rare.output) + rare.input % 2 * 2, &rare.value, 2);
    }
    return words;
}
#endif

// A panel of any format as numbers: f(number), where number(i, c) is a vector of those of input i.
template <class F>
void with_numbers(const Matrix& m, int64_t panel, F f) {
    const int32_t* words = (const int32_t*)m.words + panel * m.num_words * PANEL;
    if (m.format == FLOAT32) return f([=](int64_t i, int c) { return (vf)load(words + i * PANEL + c * W); });
#if defined(FWK_BF12)
    if (m.format == BFLOAT16_IN_12) words = decompress_panel(m, panel);
#endif
    f([=](int64_t i, int c) {
        const vi word = load(words + i / 2 * PANEL + c * W);
        return (vf)(i % 2 ? word & int32_t(0xffff0000) : word << 16);
    });
}

}  // namespace kernel

extern "C" {

void linear(const void* args, fwk::PoolThread& thread) {
    using namespace kernel;
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
    if (call.matrix->format == FLOAT32) return run<Floats<Single>, float>(call, thread);
#if defined(FWK_TILES)
    const fwk::tiles::Region region;
    run_blocks<FloatBlocks, uint16_t>(call, thread);
#else
#if defined(FWK_BF12)
    if (call.matrix->format == BFLOAT16_IN_12) return run<Bf12, uint16_t>(call, thread);
#endif
    run<Floats<Pair>, uint16_t>(call, thread);
#endif
}

void linear_screen(const void* args, fwk::PoolThread& thread) {
    using namespace kernel;
    const Screen& screen = *(const Screen*)args;
    thread.parallel_for((screen.matrix->out_features + PANEL - 1) / PANEL, [&](int64_t panel) {
        with_numbers(*screen.matrix, panel, [&](auto number) { screen_panel(screen, panel, number); });
    });
}

void linear_largest(const void* args, fwk::PoolThread& thread) {
    using namespace kernel;
    const Largest& call = *(const Largest*)args;
    if (call.linear.rows == 0) return;
    if (call.linear.matrix->format == FLOAT32) return run_largest<Floats<Single>, float>(call, thread);
#if defined(FWK_TILES)
    const fwk::tiles::Region region;
#endif
#if defined(FWK_BF12)
    if (call.linear.matrix->format == BFLOAT16_IN_12) return run_largest<Bf12, uint16_t>(call, thread);
#endif
    run_largest<Bfloats, uint16_t>(call, thread);
}

// Rows up to which `linear_largest` skips panels; 0 where products of 8-bit integers are slow.
int64_t linear_screened_rows() {
#if defined(__AVX2__)
    return kernel::SCREENED_ROWS;
#else
    return 0;
#endif
}

// Whether bfloat16 weights may be compressed to 12 bits.
int64_t linear_has_bf12() {
#if defined(FWK_BF12)
    return 1;
#else
    return 0;
#endif
}

void linear_compress(const void* args, fwk::PoolThread& thread) {
    using namespace kernel;
    const Compress& call = *(const Compress*)args;
    thread.parallel_for((call.out_features + PANEL - 1) / PANEL, [&](int64_t panel) { compress_panel(call, panel); });
}

void linear_rows(const void* args, fwk::PoolThread& thread) {
    const LinearRows& call = *(const LinearRows*)args;
    const Matrix& matrix = *call.matrix;
    if (matrix.format == BFLOAT16_IN_12) {
        thread.parallel_for_ordered(call.count, [&](int64_t i, int64_t) {
            kernel::decompress_row(matrix, call.indices[i], (uint16_t*)call.y + i * matrix.in_features);
        });
        return;
    }
    const int64_t bytes = matrix.in_features * (matrix.format == FLOAT32 ? 4 : 2);
    thread.parallel_for_ordered(call.count, [&](int64_t i, int64_t) {
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
