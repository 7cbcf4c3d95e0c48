// Products of 8-bit integers with matrices of integers by AMX, for so many rows that opening a panel pays.
#pragma once

#include "fwk/tiles.h"
#include "integer_tiles.h"

#if defined(FWK_TILES)
namespace kernel {

// out[rows, PANEL] = x[rows] times a panel that is open, to the bit as integer_tile does: a group's products by AMX,
// the rest as there.
template <int BITS, bool IS_WHOLE>
void integer_block(int rows, const OpenPanel& panel, const char* x, float* out, Ahead ahead) {
    namespace tiles = fwk::tiles;
    const Matrix& m = panel.m;
    const Rounded form = panel.form;
    const int64_t stride = form.size(), words = m.group / 4, fetches = words / Bits<BITS>::COUNT * Bits<BITS>::WORDS;
    const int64_t step = std::min<int64_t>(words, tiles::SIDE);
    const bool has_starts = m.zero_kind == CONSTANT;
    const int32_t* w = panel.words;
    const Factors* factors = panel.factors - 1;
    alignas(64) int32_t products[tiles::BLOCK * PANEL];
    memset(out, 0, rows * PANEL * sizeof(float));
    for (int64_t g = 0, left = 1; g < form.groups; g++, w += words * PANEL) {
        if (--left == 0) factors++, left = m.scale_every;
        tiles::begin(rows, PANEL, int(step));
        tiles::steps<tiles::Bytes>(words / step, stride, PANEL * 4, [&](int64_t i) {
            const int32_t* left = w + i * step * PANEL;
            return tiles::Operands{x + g * m.group + i * step * 4, left, left + tiles::SIDE};
        });
        tiles::write(products, PANEL * 4);
        for (int64_t i = 0; i < fetches; i++) ahead.fetch();
        for (int r = 0; r < rows; r++) {
            const char* row = x + r * stride;
            const float scale = form.scales(row)[g], total = form.sums(row)[g];
            const vi start = has_starts ? splat(form.starts(row)[g]) : vi{};
            UNROLL for (int c = 0; c < PANEL; c += W) {
                float* to = out + r * PANEL + c;
                const vi sums = load(products + r * PANEL + c) + start;
                store(to, with_group<IS_WHOLE>(load(to), sums, factors, c, has_starts, total, scale));
            }
        }
    }
    if (!IS_WHOLE) return;
    for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < PANEL; c += W) {
            float* to = out + r * PANEL + c;
            store(to, scaled(load(to), factors, c, has_starts, *form.total(x + r * stride)));
        }
}

}  // namespace kernel
#endif
