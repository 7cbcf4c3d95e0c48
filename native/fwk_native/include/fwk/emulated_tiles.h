// What AMX does, computed: the operations of tiles.h as Intel's manual defines them (Software Developer's Manual, volume
// 2: LDTILECFG, TILELOADD, TDPBF16PS, TDPBSUD). What would be a fault ends the process with a line that says which.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fwk::tiles {

struct Tile {
    int rows = 0, bytes = 0;  // both 0: there is none
    uint8_t data[16][64] = {};
};

struct Machine {
    bool is_configured = false;
    Tile tiles[8];
};
static thread_local Machine machine;
static std::atomic<int64_t> in_use{0};  // threads that have not given their tiles back
extern "C" int64_t emulated_tiles_in_use() { return in_use; }

inline void demand(bool is_allowed, const char* fault) {
    if (is_allowed) return;
    fprintf(stderr, "emulated tiles: %s\n", fault);
    abort();
}

inline void release() {
    in_use -= machine.is_configured;
    machine = {};
}

inline void configure(const void* layout) {
    uint8_t bytes[64];
    memcpy(bytes, layout, 64);
    release();
    demand(bytes[0] == 1, "a palette that is not 1");
    for (int i = 1; i < 64; i++)
        demand(!bytes[i] || (i >= 16 && i < 32) || (i >= 48 && i < 56), "a reserved byte is not zero");
    for (int i = 0; i < 8; i++) {
        Tile& tile = machine.tiles[i];
        tile.bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
        tile.rows = bytes[48 + i];
        demand(tile.bytes <= 64 && tile.rows <= 16, "a tile that is too large");
        demand(!tile.bytes == !tile.rows, "a tile with rows of no bytes, or bytes of no row");
    }
    machine.is_configured = true;
    in_use++;
}

template <int TILE>
inline Tile& tile() {
    demand(machine.is_configured, "used before they are configured");
    demand(machine.tiles[TILE].rows > 0, "a tile that is not configured");
    return machine.tiles[TILE];
}

template <int TILE>
inline void zero() {
    memset(tile<TILE>().data, 0, sizeof(Tile::data));
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
    Tile& to = tile<TILE>();
    memset(to.data, 0, sizeof(to.data));
    for (int r = 0; r < to.rows; r++) memcpy(to.data[r], (const char*)from + r * stride, to.bytes);
}

inline void compiler_barrier() {}

template <int TILE>
inline void store(void* to, int64_t stride) {
    const Tile& from = tile<TILE>();
    for (int r = 0; r < from.rows; r++) memcpy((char*)to + r * stride, from.data[r], from.bytes);
}

template <class X>
inline X get(const Tile& tile, int row, int i) {
    X x;
    memcpy(&x, tile.data[row] + i * sizeof(X), sizeof(X));
    return x;
}

template <class X>
inline void put(Tile& tile, int row, int i, X x) {
    memcpy(tile.data[row] + i * sizeof(X), &x, sizeof(X));
}

template <int SUMS, int ROWS, int COLUMNS>
inline void check_shapes() {
    static_assert(SUMS != ROWS && SUMS != COLUMNS && ROWS != COLUMNS, "a fault");
    const Tile &sums = tile<SUMS>(), &rows = tile<ROWS>(), &columns = tile<COLUMNS>();
    demand(sums.bytes % 4 == 0 && rows.bytes % 4 == 0 && columns.bytes % 4 == 0, "rows that are no whole words");
    demand(sums.rows == rows.rows && sums.bytes == columns.bytes && rows.bytes == 4 * columns.rows,
           "tiles of different shapes multiplied");
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// Of a tile's bfloat16, as floats; denormal numbers are taken for zero.
struct Wide {
    float numbers[16][32];

    explicit Wide(const Tile& tile) {
        for (int r = 0; r < tile.rows; r++)
            for (int i = 0; i < tile.bytes / 2; i++) {
                const uint32_t bits = uint32_t(get<uint16_t>(tile, r, i)) << 16;
                memcpy(&numbers[r][i], &bits, 4);
                numbers[r][i] = flushed(numbers[r][i]);
            }
    }
};

struct Pairs {
    // Even and odd numbers of a step are summed apart, each by fused multiply-adds from zero; then both, and then with
    // what was there.
    template <int SUMS, int ROWS, int COLUMNS>
    static inline void multiply() {
        check_shapes<SUMS, ROWS, COLUMNS>();
        Tile& sums = tile<SUMS>();
        const int steps = tile<COLUMNS>().rows;
        const Wide rows(tile<ROWS>()), columns(tile<COLUMNS>());
        for (int m = 0; m < sums.rows; m++)
            for (int n = 0; n < sums.bytes / 4; n++) {
                float parts[2] = {0, 0};
                for (int k = 0; k < steps; k++)
                    for (int i = 0; i < 2; i++) {
                        const float sum = std::fma(rows.numbers[m][2 * k + i], columns.numbers[k][2 * n + i], parts[i]);
                        parts[i] = flushed(sum);
                    }
                put(sums, m, n, flushed(flushed(get<float>(sums, m, n)) + flushed(parts[0] + parts[1])));
            }
    }
};

struct Bytes {
    template <int SUMS, int ROWS, int COLUMNS>
    static inline void multiply() {
        check_shapes<SUMS, ROWS, COLUMNS>();
        Tile &sums = tile<SUMS>(), &rows = tile<ROWS>(), &columns = tile<COLUMNS>();
        for (int m = 0; m < sums.rows; m++)
            for (int n = 0; n < sums.bytes / 4; n++) {
                uint32_t sum = get<uint32_t>(sums, m, n);
                for (int k = 0; k < columns.rows; k++)
                    for (int i = 0; i < 4; i++)
                        sum += uint32_t(get<int8_t>(rows, m, 4 * k + i) * get<uint8_t>(columns, k, 4 * n + i));
                put(sums, m, n, sum);
            }
    }
};

}  // namespace fwk::tiles
