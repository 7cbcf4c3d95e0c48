// Products with matrices of bfloat16 by AMX.
#pragma once

#include "fwk/tiles.h"
#include "vectors.h"

#if defined(FWK_TILES)
namespace kernel {

// out[rows, PANEL] = x[rows] times a panel; words: a multiple of 16.
inline void float_block(int rows, const char* x, int64_t x_stride, const int32_t* w, int64_t words, float* out,
                        Ahead ahead) {
    namespace tiles = fwk::tiles;
    static_assert(PANEL == tiles::BLOCK, "a panel is as wide as a block");
    tiles::begin(rows, PANEL, tiles::SIDE);
    for (int64_t k = 0; k < words; k += tiles::SIDE, x += 64, w += tiles::SIDE * PANEL) {
        tiles::step<tiles::Pairs>(x, x_stride, w, w + tiles::SIDE, PANEL * 4);
        for (int i = 0; i < tiles::SIDE; i++) ahead.fetch();
    }
    tiles::write(out, PANEL * 4);
}

}  // namespace kernel
#endif
