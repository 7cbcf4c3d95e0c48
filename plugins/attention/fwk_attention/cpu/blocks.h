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
    static constexpr int KEYS = TILE;  // of a tile
};

#if defined(FWK_TILES) && defined(__AVX512BF16__)
template <>
struct Blocks<Pairs> {
    static constexpr bool ARE_USED = true;
    static constexpr int KEYS = 64;            // of a tile
    static constexpr int ROWS = tiles::BLOCK;  // that are multiplied at a time, at most
    static constexpr int VALUE_WORDS = GROUP;  // of a step over keys: those of two groups

    // Words of a step over a head: the largest divisor of `words` up to tiles::SIDE.
    static int step_of(int words) {
        int step = std::min(words, tiles::SIDE);
        while (words % step) step--;
        return step;
    }

    // S[rows, groups * GROUP] = A[rows, words] K. prefetch(group, piece): prefetch part of the next
    // operands.
    template <class F>
    static void score(int rows, const int32_t* a, int words, const Columns<int32_t>& keys, int groups, float* s,
                      const F& prefetch) {
        const int step = step_of(words);
        if (rows <= tiles::SIDE) {
            tiles::lay_strips(rows, step, VALUE_WORDS);
            for (int g = 0; g < groups; g += 4)
                with_count(groups - g, [&](auto n) {
                    score_strip<n.value>(a, words, step, keys, g, s + g * GROUP, prefetch);
                });
            return;
        }
        for (int g = 0; g < groups; g += 2) {
            const int last = std::min(g + 1, groups - 1);
            tiles::begin(rows, (last + 1 - g) * GROUP, step);
            tiles::steps<tiles::Pairs>(words / step, words * 4, keys.stride * 4, [&](int64_t i) {
                const int64_t k = i * step, at = k * keys.stride;
                for (int j = 0; j < step; j += 8) {
                    prefetch(g, k + j);
                    if (last > g) prefetch(last, k + j);
                }
                return tiles::Operands{a + k, keys.at[g] + at, keys.at[last] + at};
            });
            tiles::write(s + g * GROUP, KEYS * 4);
        }
    }

    // O[rows, wide] += weights[rows, ...] V; for the first tile O is not read. values: [words, wide]. An odd number of groups
    // is padded with one of zeros, in values and weights. prefetch: as above.
    template <class F>
    static void accumulate_pv(int rows, const int32_t* weights, const int32_t* values, int groups, int wide, int words,
                      float* o, bool is_first, const F& prefetch) {
        const int steps = (groups + 1) / 2;
        if (rows <= tiles::SIDE) {
            tiles::lay_strips(rows, step_of(words), VALUE_WORDS);
            for (int at = 0; at < wide; at += 4 * tiles::SIDE)
                with_count((wide - at) / tiles::SIDE, [&](auto n) {
                    accumulate_pv_strip<n.value>(weights, values, steps, wide, at, o + at, is_first, prefetch);
                });
            return;
        }
        for (int at = 0; at < wide; at += tiles::BLOCK) {
            tiles::begin(rows, std::min(wide - at, tiles::BLOCK), VALUE_WORDS);
            if (!is_first) tiles::read(o + at, wide * 4);
            tiles::steps<tiles::Pairs>(steps, KEYS / 2 * 4, wide * 4, [&](int64_t i) {
                for (int j = 0; j < tiles::SIDE; j += 8) prefetch(2 * i, at / 2 + j), prefetch(2 * i + 1, at / 2 + j);
                const int32_t* v = values + i * VALUE_WORDS * wide + at;
                return tiles::Operands{weights + i * VALUE_WORDS, v, v + tiles::SIDE};
            });
            tiles::write(o + at, wide * 4);
        }
    }

  private:
    // f(n) with the constant n = min(count, 4).
    template <class F>
    static void with_count(int count, const F& f) {
        if (count >= 4) f(std::integral_constant<int, 4>());
        else if (count == 3) f(std::integral_constant<int, 3>());
        else if (count == 2) f(std::integral_constant<int, 2>());
        else f(std::integral_constant<int, 1>());
    }

    template <int N, class F>
    static void score_strip(const int32_t* a, int words, int step, const Columns<int32_t>& keys, int first, float* s,
                          const F& prefetch) {
        tiles::zero_strip<N>();
        tiles::strip_steps<tiles::Pairs, N, false>(
            words / step, words * 4, keys.stride * 4, [&](int64_t i) { return a + i * step; },
            [&](int64_t i, int n) {
                for (int j = 0; j < step; j += 8) prefetch(first + n, i * step + j);
                return keys.at[first + n] + i * step * keys.stride;
            });
        tiles::write_strip<N>(s, KEYS * 4);
    }

    template <int N, class F>
    static void accumulate_pv_strip(const int32_t* weights, const int32_t* values, int steps, int wide, int at, float* o,
                          bool is_first, const F& prefetch) {
        if (is_first) tiles::zero_strip<N>();
        else tiles::read_strip<N>(o, wide * 4);
        tiles::strip_steps<tiles::Pairs, N, true>(
            steps, KEYS / 2 * 4, wide * 4, [&](int64_t i) { return weights + i * VALUE_WORDS; },
            [&](int64_t i, int n) {
                const int from = at + n * tiles::SIDE;
                prefetch(2 * i, from / 2), prefetch(2 * i + 1, from / 2);
                return values + i * VALUE_WORDS * wide + from;
            });
        tiles::write_strip<N>(o, wide * 4);
    }
};
#endif

}  // namespace
