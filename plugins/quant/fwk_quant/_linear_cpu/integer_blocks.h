// Products of 8-bit integers with matrices of integers by AMX, for enough rows to amortise opening a panel.
#pragma once

#include "fwk/tiles.h"
#include "integer_tiles.h"

#if defined(FWK_TILES)
namespace kernel {

// Adds products of a group to sums, [rows, PANEL] each.
template <bool IS_WHOLE>
inline void add_group(int rows, const OpenPanel& panel, const char* x, int64_t group, const Factors* factors,
                      const int32_t* products, float* sums) {
    const Rounded form = panel.form;
    const int64_t stride = form.size() / 4;
    const bool has_starts = panel.m.zero_kind == CONSTANT;
    const float *scale = form.scales(x) + group, *total = form.sums(x) + group;
    vf factor[WHOLE], offset[WHOLE];
    UNROLL for (int c = 0; c < WHOLE; c++) {
        factor[c] = load(factors->scale + c * W);
        offset[c] = load(factors->offset + c * W);
    }
    for (int r = 0; r < rows; r++, products += PANEL, sums += PANEL, scale += stride, total += stride) {
        const vi start = has_starts ? splat(*(const int32_t*)total) : vi{};
        UNROLL for (int c = 0; c < WHOLE; c++) {
            const vi whole = load(products + c * W) + start;
            store(sums + c * W,
                  with_group<IS_WHOLE>(load(sums + c * W), whole, factor[c], offset[c], has_starts, *total, *scale));
        }
    }
}

// out[rows, PANEL] = x[rows] times an open panel, with the same bits as integer_tile. AMX computes the products of a group
// while vector instructions apply the scales of the group before. interleaved() is called once per group.
template <int BITS, bool IS_WHOLE, class Interleaved>
inline void integer_block(int rows, const OpenPanel& panel, const char* x, float* out, const Interleaved& interleaved) {
    namespace tiles = fwk::tiles;
    const Matrix& m = panel.m;
    const Rounded form = panel.form;
    const int64_t stride = form.size(), words = m.group / 4;  // at most those of a step
    alignas(64) int32_t memory[2][tiles::BLOCK * PANEL];
    int32_t *products = memory[0], *before = memory[1];
    const auto factors = [&](int64_t g) { return panel.factors + g / m.scale_every; };
    memset(out, 0, rows * PANEL * sizeof(float));
    for (int64_t g = 0; g < form.groups; g++) {
        tiles::begin(rows, PANEL, int(words));
        tiles::steps<tiles::Bytes>(1, stride, PANEL * 4, [&](int64_t) {
            const int32_t* left = panel.words + g * words * PANEL;
            return tiles::Operands{x + g * m.group, left, left + tiles::SIDE};
        });
        interleaved();
        if (g > 0) add_group<IS_WHOLE>(rows, panel, x, g - 1, factors(g - 1), before, out);
        tiles::write(products, PANEL * 4);
        std::swap(products, before);
    }
    add_group<IS_WHOLE>(rows, panel, x, form.groups - 1, factors(form.groups - 1), before, out);
    if (!IS_WHOLE) return;
    const bool has_starts = m.zero_kind == CONSTANT;
    for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < PANEL; c += W) {
            float* to = out + r * PANEL + c;
            store(to, scaled(load(to), load(panel.factors->scale + c), load(panel.factors->offset + c), has_starts,
                             *form.total(x + r * stride)));
        }
}

}  // namespace kernel
#endif
