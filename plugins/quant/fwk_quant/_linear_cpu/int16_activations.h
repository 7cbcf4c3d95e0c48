// Products of x in 16 bits with matrices of 8-bit integers of one scale an output, where AMX computes them.
//
// Rounded to 8 bits, x takes a scale for every few inputs, and what is then to be done with sums of few products takes
// longer than AMX does for them. So here a number of x is 256 h + l, signed bytes both, with one scale for the row: twice
// the products, summed up over all inputs, exactly; numbers down to a hundredth of a row's largest lose no more than by
// bfloat16.
#pragma once

#include "fwk/tiles.h"
#include "integer_tiles.h"

#if defined(FWK_TILES)
namespace kernel {

constexpr int FINE_ROWS = fwk::tiles::SIDE;  // of a block: h of so many, then l of them
constexpr int HIGHEST = 127 * 256 + 127;

// Rows of x, `side` of which lie together: their h, their l, their scales, and for either what the matrix' zero times its
// sum has to be taken off.
struct FineRows {
    int64_t bytes, side;

    FineRows(const Matrix& m, int64_t together) : bytes((m.in_features + 63) / 64 * 64), side(together) {}
    int64_t row_bytes() const { return 2 * bytes + 12; }
    const char* low(const char* first) const { return first + side * bytes; }
    float* scales(const char* first) const { return (float*)(first + 2 * side * bytes); }
    int32_t* starts(const char* first, int part) const { return (int32_t*)scales(first) + side * (1 + part); }
};

template <class T>
void round_fine(const Matrix& m, const T* x, const FineRows& form, int64_t row, char* first) {
    const int64_t size = m.in_features;
    auto top = sizes(x) & 0;
    for (int64_t i = 0; i < size; i += W) top = some(x, i, size, [&](const T* from) { return larger(top, sizes(from)); });
    const float most = largest(top);
    const bool is_usable = most > 1e-30f && most <= 3e38f;
    const vf inverse = splat(is_usable ? HIGHEST / most : 0.0f);
    form.scales(first)[row] = most * (is_usable ? 1.0f / HIGHEST : 0.0f);  // not a number where one of x is not finite
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    char *high = first + row * form.bytes, *low = high + form.side * form.bytes;
    vi sums[2] = {};
    for (int64_t i = 0; i < form.bytes; i += W) {
        const vi whole = some(x, i, size, [&](const T* from) { return (vi)fma(widen(from), inverse, magic) - (vi)magic; });
        const vi upper = (whole + 128) >> 8;
        *(vb*)(high + i) = __builtin_convertvector(upper, vb);
        *(vb*)(low + i) = __builtin_convertvector(whole, vb);
        sums[0] += upper, sums[1] += whole - (upper << 8);
    }
    for (int part : {0, 1}) form.starts(first, part)[row] = -int32_t(m.zero) * sum_of(sums[part]);
}

inline vf fine_outcome(vi high, vi low, vf factor, float scale) {
    return fma(as_float(high), splat(256.0f), as_float(low)) * (factor * splat(scale));
}

// out[R, PANEL] = x[R] times a panel.
template <int R>
void fine_tile(const OpenPanel& panel, const FineRows& form, const char* x, float* out, Ahead ahead) {
    const int64_t words = panel.m.num_words, stride = form.row_bytes();
    const int32_t* w = panel.words;
    vi high[R][C], low[R][C];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) {
        high[r][c] = splat(*form.starts(x + r * stride, 0));
        low[r][c] = splat(*form.starts(x + r * stride, 1));
    }
    for (int64_t k = 0; k < words; k++, w += PANEL) {
        ahead.fetch();
        const vi bytes[C] = {load(w), load(w + W)};
        UNROLL for (int r = 0; r < R; r++) {
            const int32_t upper = four(x + r * stride + k * 4), lower = four(form.low(x + r * stride) + k * 4);
            UNROLL for (int c = 0; c < C; c++) {
                high[r][c] = dot<255>(high[r][c], bytes[c], upper);
                low[r][c] = dot<255>(low[r][c], bytes[c], lower);
            }
        }
    }
    Factors factors;
    panel.read(0, factors);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
        store(out + r * PANEL + c * W, fine_outcome(high[r][c], low[r][c], load(factors.scale + c * W),
                                                    *form.scales(x + r * stride)));
}

template <int R>
void fine_tiles(int rows, const OpenPanel& panel, const FineRows& form, const char* x, float* out, Ahead ahead) {
    if constexpr (R > 1)
        if (rows < R) return fine_tiles<R - 1>(rows, panel, form, x, out, ahead);
    fine_tile<R>(panel, form, x, out, ahead);
}

// out[rows, PANEL] = x[rows] times a panel, to the bit as fine_tile does. beside() comes once for each 64 inputs.
template <class Beside>
inline void fine_block(int rows, const OpenPanel& panel, const FineRows& form, const char* x, float* out,
                       const Beside& beside) {
    namespace tiles = fwk::tiles;
    alignas(64) int32_t sums[2 * FINE_ROWS * PANEL];
    tiles::begin_both(rows, PANEL, tiles::SIDE);
    tiles::steps<tiles::Bytes>(form.bytes / 64, form.bytes, PANEL * 4, [&](int64_t i) {
        beside();
        const int32_t* left = panel.words + i * tiles::SIDE * PANEL;
        return tiles::Operands{x + i * 64, left, left + tiles::SIDE};
    });
    tiles::write(sums, PANEL * 4);
    const float* scales = form.scales(x);
    const int32_t *high = form.starts(x, 0), *low = form.starts(x, 1);
    Factors factors;
    panel.read(0, factors);
    for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < PANEL; c += W)
            store(out + r * PANEL + c,
                  fine_outcome(load(sums + r * PANEL + c) + splat(high[r]),
                               load(sums + (FINE_ROWS + r) * PANEL + c) + splat(low[r]), load(factors.scale + c), scales[r]));
}

struct FineTiles {
    static constexpr int ROWS = INTEGER_ROWS, COLUMNS = PANEL, SIDE = 1;
    static constexpr bool ARE_BLOCKS = false;
    static constexpr int64_t SHARED_ROWS = INT64_MAX;

    static int64_t row_bytes(const Matrix& m) { return FineRows(m, 1).row_bytes(); }

    template <class T>
    static void prepare(const Matrix& m, const T* x, int64_t x_stride, int64_t rows, int64_t side, char* to) {
        const FineRows form(m, side);
        for (int64_t r = 0; r < rows; r++) round_fine(m, x + r * x_stride, form, r, to);
    }

    template <class T>
    static bool reads(const Linear&) {
        return false;
    }

    struct Panel {
        OpenPanel panel;

        Panel(const Matrix& m, int64_t index, bool)
            : panel{m, Rounded(m), index, (const int32_t*)m.words + index * m.num_words * PANEL, nullptr} {}

        void multiply(int rows, Rows x, int, float* out, Ahead ahead) const {
            fine_tiles<ROWS>(rows, panel, FineRows(panel.m, 1), x.first, out, ahead);
        }
    };
};

struct FineBlocks : FineTiles {
    static constexpr int ROWS = FINE_ROWS, SIDE = FINE_ROWS;
    static constexpr bool ARE_BLOCKS = true;
    static constexpr int64_t SHARED_ROWS = 16;

    struct Panel : FineTiles::Panel {
        using FineTiles::Panel::Panel;

        template <class O>
        void multiply_beside(int rows, Rows x, float* out, Next next, O& outcome) const {
            const FineRows form(panel.m, SIDE);
            const int64_t steps = form.bytes / 64, share = (ROWS + steps - 1) / steps;
            Lines lines(next, panel.m.num_words * 2, steps);
            fine_block(rows, panel, form, x.first, out, [&] {
                lines.fetch();
                outcome.put(share);
            });
        }
    };
};

}  // namespace kernel
#endif
