// Products with matrices of bfloat16 by AMX.
#pragma once

#include "fwk/tiles.h"
#include "panels.h"

#if defined(FWK_TILES)
namespace kernel {

// out[rows, PANEL] = x[rows] times a panel; words: a multiple of 16. interleaved() is called once per 16 words.
template <class Interleaved>
inline void float_block(int rows, const char* x, int64_t x_stride, const int32_t* w, int64_t words, float* out,
                        const Interleaved& interleaved) {
    namespace tiles = fwk::tiles;
    static_assert(PANEL == tiles::BLOCK, "a panel is as wide as a block");
    tiles::begin(rows, PANEL, tiles::SIDE);
    tiles::steps<tiles::Pairs>(words / tiles::SIDE, x_stride, PANEL * 4, [&](int64_t i) {
        interleaved();
        const int32_t* left = w + i * tiles::SIDE * PANEL;
        return tiles::Operands{x + i * 64, left, left + tiles::SIDE};
    });
    tiles::write(out, PANEL * 4);
}

}  // namespace kernel
#endif
