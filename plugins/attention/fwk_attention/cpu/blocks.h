// Products of rows with a tile of keys or values by AMX, in bfloat16.
//
// A row's sums depend neither on how many rows there are nor on where keys lie: a step, within which AMX adds in an
// order of its own, always takes as many words.

#pragma once

#include "fwk/tiles.h"
#include "products.h"

namespace {

template <class P>
struct Blocks {
    static constexpr bool ARE_USED = false;
};

#if defined(FWK_TILES) && defined(__AVX512BF16__)
template <>
struct Blocks<Pairs> {
    static constexpr bool ARE_USED = true;
    static constexpr int VALUE_WORDS = GROUP / 2;  // of a step over keys: those of a group, which lie in one block

    // Words of a step over a head: so many that none are left over.
    static int step_of(int words) {
        int step = std::min(words, tiles::SIDE);
        while (words % step) step--;
        return step;
    }

    // S[rows, groups * GROUP] = A[rows, words] K
    static void score(int rows, const int32_t* a, int words, const Columns& keys, int groups, float* s) {
        const int step = step_of(words);
        for (int row = 0; row < rows; row += tiles::BLOCK) {
            for (int g = 0; g < groups; g += 2) {
                const int last = std::min(g + 1, groups - 1);
                tiles::begin(std::min(rows - row, tiles::BLOCK), (last + 1 - g) * GROUP, step);
                const int64_t stride = keys.stride;
                tiles::steps<tiles::Pairs>(words / step, words * 4, stride * 4, [&](int64_t i) {
                    const int64_t k = i * step, at = k * stride;
                    for (int j = 0; j < step && row == 0; j++) {
                        fetch(keys.next[g] + at + j * stride);
                        fetch(keys.next[last] + at + j * stride);
                    }
                    return tiles::Operands{a + row * words + k, keys.at[g] + at, keys.at[last] + at};
                });
                tiles::write(s + row * TILE + g * GROUP, TILE * 4);
            }
        }
    }

    // O[rows, wide] = O + weights[rows, ...] V, or without the former when it is the first. values: whole groups.
    static void weigh(int rows, const int32_t* weights, const Values* values, int groups, int wide, float* o,
                      bool is_first) {
        for (int row = 0; row < rows; row += tiles::BLOCK) {
            for (int at = 0; at < wide; at += tiles::BLOCK) {
                float* sums = o + row * wide + at;
                tiles::begin(std::min(rows - row, tiles::BLOCK), std::min(wide - at, tiles::BLOCK), VALUE_WORDS);
                if (!is_first) tiles::read(sums, wide * 4);
                tiles::steps<tiles::Pairs>(groups, TILE / 2 * 4, wide * 4, [&](int64_t g) {
                    for (int i = 0; i < VALUE_WORDS && row == 0; i++) {
                        fetch(values[g].next + i * wide + at);
                        fetch(values[g].next + i * wide + at + tiles::SIDE);
                    }
                    const int32_t* v = values[g].at + at;
                    return tiles::Operands{weights + row * (TILE / 2) + g * VALUE_WORDS, v, v + tiles::SIDE};
                });
                tiles::write(sums, wide * 4);
            }
        }
    }
};
#endif

}  // namespace
