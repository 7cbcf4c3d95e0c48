// Layout of a layer's cache in tiles: [num_blocks, num_kv_heads, 2 (K, V), numbers of a block]. A word is as many numbers
// as one lane of a product takes: a float, or a pair of bfloat16. K is [words of a head][block_size], V is
// [block_size / numbers of a word][head_size], in words, as the products want them: nothing is laid out anew when it is
// read. In rows (blocks or heads that are no multiple of 16, or a cache that another backend shares):
// [num_blocks, 2 (K, V), num_kv_heads, block_size, head_size], and tiles are made of them. Quantised numbers are bytes,
// followed by a float for each token that they are to be multiplied with.

#pragma once

#include "numbers.h"
#include "tasks.h"

namespace {

// Where the numbers of one layer are. S: a number of the cache, P: how products are computed.
template <class S, class P>
struct Cache {
    S* base;
    const Layer& layer;
    int size = int(layer.head_size), words = (size + P::PER_WORD - 1) / P::PER_WORD;
    int64_t numbers = layer.block_size * size;
    int64_t half = numbers + (IS_QUANTISED<S> ? layer.block_size * 4 : 0);  // elements of K or of V of a block and head

    S* at(int64_t block, int64_t head, bool is_value) const {
        const int64_t heads = layer.num_kv_heads;
        return base + (block * 2 * heads + (layer.is_tiled ? head * 2 + is_value : is_value * heads + head)) * half;
    }
    S* scales(S* block) const { return block + numbers; }  // one float for each token, not always aligned
    // Put a token's numbers where they belong in a block's K or V.
    void place(const S* row, S* to, int64_t offset, bool is_value) const {
        constexpr int N = P::PER_WORD;
        if (!layer.is_tiled) {
            memcpy(to + offset * size, row, size * sizeof(S));
        } else if (is_value) {
            to += offset / N * size * N + offset % N;
            for (int i = 0; i < size; i++) to[i * N] = row[i];
        } else {
            to += offset * N;
            for (int i = 0; i < size; i += N, to += layer.block_size * N) memcpy(to, row + i, N * sizeof(S));
        }
    }
    template <class T>
    void put(const T* x, int64_t block, int64_t offset, int64_t head, bool is_value) const {
        S* to = at(block, head, is_value);
        if constexpr (IS_QUANTISED<S>) {
            float numbers[size];
            for (int i = 0; i < size; i++) numbers[i] = to_float(x[i]);
            int32_t max_bits = 0;  // bits without the sign: what is not a number has the largest
            for (int i = 0; i < size; i++) {
                int32_t bits;
                memcpy(&bits, numbers + i, 4);
                max_bits = std::max(max_bits, bits & 0x7fffffff);
            }
            float max_abs;
            memcpy(&max_abs, &max_bits, 4);
            float scale = max_abs / S::LARGEST;
            if (scale < 1e-30f) scale = 1e-30f;
            memcpy(scales(to) + offset * 4, &scale, 4);
            if (scale - scale != 0) memset(numbers, 0, sizeof(numbers));  // the scale says all there is to say
            S row[size];
            for (int i = 0; i < size; i++)
                row[i] = S::of(std::min(std::max(numbers[i] / scale, -S::LARGEST), S::LARGEST));
            place(row, to, offset, is_value);
        } else {
            place(x, to, offset, is_value);
        }
    }
};

}  // namespace
