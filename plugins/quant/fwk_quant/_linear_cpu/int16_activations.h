// Products of x in 16 bits with matrices of 8-bit integers of one scale an output, where AMX computes them.
//
// With 8-bit activations x needs a scale per group of inputs, and applying the scales to sums of few products takes longer than
// the AMX products. So here a number of x is 256 h + l with signed bytes h and l, and one scale per row: twice the products,
// accumulated exactly over all inputs. Numbers down to a hundredth of a row's maximum are as precise as in bfloat16.
#pragma once

#include "fwk/tiles.h"
#include "integer_tiles.h"

#if defined(FWK_TILES)
namespace kernel {

constexpr int INT16_ROWS = fwk::tiles::SIDE;  // of a block: h of each row, then l
constexpr int MAX_VALUE = 127 * 256 + 127;

// Layout of `side` rows of x: h of all, l of all, scales, and for h and l the correction for the zero point of the matrix:
// minus the zero point times their sum.
struct Int16Rows {
    int64_t bytes, side;

    Int16Rows(const Matrix& m, int64_t together) : bytes((m.in_features + 63) / 64 * 64), side(together) {}
    int64_t row_bytes() const { return 2 * bytes + 12; }
    const char* low(const char* first) const { return first + side * bytes; }
    float* scales(const char* first) const { return (float*)(first + 2 * side * bytes); }
    int32_t* starts(const char* first, int part) const { return (int32_t*)scales(first) + side * (1 + part); }
};

template <class T>
void quantise_int16(const Matrix& m, const T* x, const Int16Rows& form, int64_t row, char* first) {
    const int64_t size = m.in_features;
    auto top = magnitude_bits(x) & 0;
    for (int64_t i = 0; i < size; i += W)
        top = load_padded(x, i, size, [&](const T* from) { return vmax(top, magnitude_bits(from)); });
    const float max_abs = from_magnitude_bits(top);
    const bool is_usable = max_abs > 1e-30f && max_abs <= 3e38f;
    const vf inverse = splat(is_usable ? MAX_VALUE / max_abs : 0.0f);
    form.scales(first)[row] = max_abs * (is_usable ? 1.0f / MAX_VALUE : 0.0f);  // not a number where one of x is not finite
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    char *high = first + row * form.bytes, *low = high + form.side * form.bytes;
    vi sums[2] = {};
    for (int64_t i = 0; i < form.bytes; i += W) {
        const vi whole =
            load_padded(x, i, size, [&](const T* from) { return (vi)fma(load(from), inverse, magic) - (vi)magic; });
        const vi upper = (whole + 128) >> 8;
        *(vb*)(high + i) = __builtin_convertvector(upper, vb);
        *(vb*)(low + i) = __builtin_convertvector(whole, vb);
        sums[0] += upper, sums[1] += whole - (upper << 8);
    }
    for (int part : {0, 1}) form.starts(first, part)[row] = -int32_t(m.zero) * reduce_add(sums[part]);
}

inline vf int16_result(vi high, vi low, vf factor, float scale) {
    return fma(as_float(high), splat(256.0f), as_float(low)) * (factor * splat(scale));
}

// out[R, PANEL] = x[R] times a panel.
template <int R>
void int16_tile(const OpenPanel& panel, const Int16Rows& form, const char* x, float* out, Prefetch prefetch) {
    const int64_t words = panel.m.num_words, stride = form.row_bytes();
    const int32_t* w = panel.words;
    vi high[R][WHOLE], low[R][WHOLE];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < WHOLE; c++) {
        high[r][c] = splat(*form.starts(x + r * stride, 0));
        low[r][c] = splat(*form.starts(x + r * stride, 1));
    }
    for (int64_t k = 0; k < words; k++, w += PANEL) {
        prefetch.fetch();
        vi bytes[WHOLE];
        UNROLL for (int c = 0; c < WHOLE; c++) bytes[c] = load(w + c * W);
        UNROLL for (int r = 0; r < R; r++) {
            const int32_t upper = four(x + r * stride + k * 4), lower = four(form.low(x + r * stride) + k * 4);
            UNROLL for (int c = 0; c < WHOLE; c++) {
                high[r][c] = dot<255>(high[r][c], bytes[c], upper);
                low[r][c] = dot<255>(low[r][c], bytes[c], lower);
            }
        }
    }
    Factors factors;
    panel.read(0, factors);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < WHOLE; c++)
        store(out + r * PANEL + c * W, int16_result(high[r][c], low[r][c], load(factors.scale + c * W),
                                                    *form.scales(x + r * stride)));
}

template <int R>
void int16_tiles(int rows, const OpenPanel& panel, const Int16Rows& form, const char* x, float* out, Prefetch prefetch) {
    if constexpr (R > 1)
        if (rows < R) return int16_tiles<R - 1>(rows, panel, form, x, out, prefetch);
    int16_tile<R>(panel, form, x, out, prefetch);
}

// out[rows, PANEL] = x[rows] times a panel, with the same bits as int16_tile. interleaved() is called once per 64 inputs.
template <class Interleaved>
inline void int16_block(int rows, const OpenPanel& panel, const Int16Rows& form, const char* x, float* out,
                       const Interleaved& interleaved) {
    namespace tiles = fwk::tiles;
    alignas(64) int32_t sums[2 * INT16_ROWS * PANEL];
    tiles::begin_both(rows, PANEL, tiles::SIDE);
    tiles::steps<tiles::Bytes>(form.bytes / 64, form.bytes, PANEL * 4, [&](int64_t i) {
        interleaved();
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
                  int16_result(load(sums + r * PANEL + c) + splat(high[r]),
                               load(sums + (INT16_ROWS + r) * PANEL + c) + splat(low[r]), load(factors.scale + c), scales[r]));
}

struct Int16Tiles {
    static constexpr int ROWS = INTEGER_ROWS, COLUMNS = PANEL, SIDE = 1;
    static constexpr bool ARE_BLOCKS = false;
    static constexpr int64_t SHARED_ROWS = INT64_MAX;

    static int64_t row_bytes(const Matrix& m) { return Int16Rows(m, 1).row_bytes(); }

    template <class T>
    static void prepare(const Matrix& m, const T* x, int64_t x_stride, int64_t rows, int64_t side, char* to) {
        const Int16Rows form(m, side);
        for (int64_t r = 0; r < rows; r++) quantise_int16(m, x + r * x_stride, form, r, to);
    }

    template <class T>
    static bool reads(const Linear&) {
        return false;
    }

    struct Panel {
        OpenPanel panel;

        Panel(const Matrix& m, int64_t index, bool)
            : panel{m, Rounded(m), index, (const int32_t*)m.words + index * m.num_words * PANEL, nullptr} {}

        void multiply(int rows, Rows x, int, float* out, Prefetch prefetch) const {
            int16_tiles<ROWS>(rows, panel, Int16Rows(panel.m, 1), x.first, out, prefetch);
        }
    };
};

struct Int16Blocks : Int16Tiles {
    static constexpr int ROWS = INT16_ROWS, SIDE = INT16_ROWS;
    static constexpr bool ARE_BLOCKS = true;
    static constexpr int64_t SHARED_ROWS = 16;

    struct Panel : Int16Tiles::Panel {
        using Int16Tiles::Panel::Panel;

        template <class O>
        void multiply_interleaved(int rows, Rows x, float* out, NextPanel next, O& pending) const {
            const Int16Rows form(panel.m, SIDE);
            const int64_t steps = form.bytes / 64, share = (ROWS + steps - 1) / steps;
            PanelPrefetch lines(next, panel.m.num_words * 2, steps);
            int16_block(rows, panel, form, x.first, out, [&] {
                lines.fetch();
                pending.put(share);
            });
        }
    };
};

}  // namespace kernel
#endif
