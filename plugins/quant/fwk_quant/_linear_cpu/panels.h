// Panels of a packed matrix: their width and the prefetch of those that come next.
#pragma once

#include "fwk/thread_memory.h"
#include "fwk/vectors.h"

namespace kernel {

using namespace fwk;

constexpr int PANEL = 32;  // outputs that are stored, and mostly computed, together
constexpr int C = 2;       // vectors of a tile's row kept in registers
constexpr int WHOLE = PANEL / W;  // vectors of a panel's row: C with AVX-512, more where AMX is emulated without it

// Software prefetch of the next panel to L2: a tile fetches `bytes` (up to two cache lines) for each row of words it reads.
struct Prefetch {
    const char* at;
    int64_t bytes;

    void fetch() {
        __builtin_prefetch(at, 0, 2);
        if (bytes > 64) __builtin_prefetch(at + 64, 0, 2);
        at += bytes;
    }
};

// The panel that will be read next, and this tile's index: each of `tiles` tiles prefetches a part of it.
struct NextPanel {
    const char* panel;
    int64_t tile, tiles;
};

// A tile's part of the panel's cache lines, spread over its steps. Prefetches from memory also delay reads from L2, so with few
// tiles the first ones, whose own panel may still be in flight, prefetch none.
struct PanelPrefetch {
    int64_t count = 0;
    const char* at = nullptr;

    PanelPrefetch(NextPanel next, int64_t lines, int64_t steps) {
        const int64_t idle = next.tiles <= 4 ? next.tiles / 2 : 0, parts = (next.tiles - idle) * steps;
        if (next.tile < idle) return;
        count = (lines + parts - 1) / parts;
        at = next.panel + (next.tile - idle) * steps * count * 64;
    }

    void fetch() {
        for (int64_t i = 0; i < count; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

}  // namespace kernel
