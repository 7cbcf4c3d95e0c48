// Products of 8-bit integers with matrices of 8, 6 or 4 bits in groups of inputs.
//
// x is rounded to 8 bits, with a scale for each group of a row; integers of a group are multiplied and added up
// exactly, and their sum takes part in a float32 sum over the groups, in order.
#pragma once

#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "panels.h"

namespace kernel {

constexpr int INTEGER_ROWS = W == 16 ? 6 : 4;  // rows of a tile kept in registers

inline int64_t num_groups(const Matrix& m) { return (m.in_features + m.group - 1) / m.group; }

// A row of x: its integers, room for a vector, then for each group a scale, and what goes with the group's zeros: where
// the matrix has one zero for all, what their products add up to (an integer), else the sum of x's integers (a float).
// Last is the sum of these sums times their scales.
struct Rounded {
    int64_t bytes, groups;
    explicit Rounded(const Matrix& m) : bytes((m.in_features + m.group + 127) / 64 * 64), groups(num_groups(m)) {}
    int64_t size() const { return (bytes + groups * 8 + 4 + 63) / 64 * 64; }
    float* scales(const char* row) const { return (float*)(row + bytes); }
    float* sums(const char* row) const { return scales(row) + groups; }
    int32_t* starts(const char* row) const { return (int32_t*)sums(row); }
    float* total(const char* row) const { return sums(row) + groups; }
};

// Three passes over the groups, to avoid the latency of one group's maximum.
template <class T>
void round_row(const Matrix& m, const T* x, char* to) {
    const Rounded form(m);
    const int64_t group = m.group, size = m.in_features;
    float *scales = form.scales(to), *inverses = form.sums(to);
    for (int64_t g = 0; g < form.groups; g++) {
        const int64_t start = g * group, end = std::min(start + group, size);
        auto top = magnitude_bits(x + start) & 0;
        for (int64_t i = start; i < end; i += W)
            top = load_padded(x, i, end, [&](const T* from) { return vmax(top, magnitude_bits(from)); });
        scales[g] = from_magnitude_bits(top);
    }
    for (int64_t g = 0; g < form.groups; g++) {
        const float max_abs = scales[g];
        const bool is_usable = max_abs > 1e-30f && max_abs <= 3e38f;
        inverses[g] = is_usable ? 127.0f / max_abs : 0.0f;
        scales[g] = max_abs * (is_usable ? 1 / 127.0f : 0.0f);  // not a number where one of x is not finite
    }
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    float whole_sum = 0;
    for (int64_t g = 0; g < form.groups; g++) {
        const int64_t start = g * group, end = std::min(start + group, size);
        const vf inverse = splat(inverses[g]);
        vi sum = vi{};
        for (int64_t i = start; i < start + group; i += W) {
            const vi bits = load_padded(x, i, end, [&](const T* from) { return (vi)fma(load(from), inverse, magic); });
            *(vb*)(to + i) = __builtin_convertvector(bits, vb);
            sum += bits - (vi)magic;
        }
        const int32_t total = reduce_add(sum);
        if (m.zero_kind == CONSTANT) form.starts(to)[g] = -int32_t(m.zero) * total;
        else form.sums(to)[g] = float(total);
        whole_sum += scales[g] * float(total);
    }
    *form.total(to) = whole_sum;
}

// Four integers of neighbouring inputs from x.
inline int32_t four(const char* x) {
    int32_t y;
    memcpy(&y, x, 4);
    return y;
}

// Words of a group, and what they hold: number i of step k is multiplied by x's four integers at (k * COUNT + i) * 4.
template <int BITS>
struct Bits;

template <>
struct Bits<8> {
    static constexpr int WORDS = 1, COUNT = 1, MAX_VALUE = 255;
    static inline vi get(const int32_t* w, int) { return load(w); }
};

template <>
struct Bits<4> {
    static constexpr int WORDS = 1, COUNT = 2, MAX_VALUE = 15;
    static inline vi get(const int32_t* w, int i) { return (i ? load(w) >> 4 : load(w)) & 0x0f0f0f0f; }
};

template <>
struct Bits<6> {
    static constexpr int WORDS = 3, COUNT = 4, MAX_VALUE = 63;
    static inline vi get(const int32_t* w, int i) {
        const vi low = Bits<4>::get(w + i / 2 * PANEL, i % 2), high = load(w + 2 * PANEL);
        return low | ((i < 2 ? high << (4 - 2 * i) : high >> (2 * i - 4)) & 0x30303030);
    }
};

template <>
struct Bits<5> {
    static constexpr int WORDS = 5, COUNT = 8, MAX_VALUE = 31;
    static inline vi get(const int32_t* w, int i) {
        const vi low = Bits<4>::get(w + i / 2 * PANEL, i % 2), high = load(w + 4 * PANEL);
        return low | ((i < 4 ? high << (4 - i) : high >> (i - 4)) & 0x10101010);
    }
};

// Scales and offsets of a panel as float32. The offset multiplies the sum of x's integers.
struct Factors {
    float scale[PANEL], offset[PANEL];
};

// Where a panel's scales and offsets are, by entry, of N vectors of columns from `column` on. NESTED: the float16 that entries
// share is converted once for all of them.
template <int N>
struct FactorReader {
    const Matrix& m;
    const int column;
    int64_t at, nest, left = 1;  // of the next entry; entries until the next float16
    vf scales[N], offsets[N];    // NESTED: the float16s

    FactorReader(const Matrix& matrix, int64_t panel, int64_t count, int first)
        : m(matrix), column(first), at(panel * count), nest(panel * ((count + matrix.nest - 1) / matrix.nest)) {}

    void next(vf* scale, vf* offset) {
        if (m.scale_kind == NESTED && --left == 0) {
            UNROLL for (int c = 0; c < N; c++) {
                scales[c] = from_half((const uint16_t*)m.scales + nest * PANEL + column + c * W);
                if (m.zero_kind == OFFSETS) offsets[c] = from_half((const uint16_t*)m.zeros + nest * PANEL + column + c * W);
            }
            left = m.nest;
            nest++;
        }
        const int64_t first = at++ * PANEL + column;
        UNROLL for (int c = 0; c < N; c++) {
            const int64_t i = first + c * W;
            scale[c] = number(m.scales, m.scale_bytes, scales[c], i);
            if (m.zero_kind == BYTES) offset[c] = -scale[c] * from_bytes((const uint8_t*)m.zeros + i);
            if (m.zero_kind == OFFSETS) offset[c] = number(m.zeros, m.zero_bytes, offsets[c], i);
        }
    }

  private:
    vf number(const void* from, const int8_t* bytes, vf shared, int64_t i) const {
        if (m.scale_kind == NESTED) return shared * from_bytes(bytes + i);
        return m.scale_kind == SINGLE ? load((const float*)from + i) : from_half((const uint16_t*)from + i);
    }
};

// Those of one entry.
inline void read_factors(const Matrix& m, int64_t at, int64_t nest, Factors& to) {
    FactorReader<WHOLE> reader(m, 0, 0, 0);
    reader.at = at, reader.nest = nest;
    vf scale[WHOLE], offset[WHOLE] = {};
    reader.next(scale, offset);
    UNROLL for (int c = 0; c < WHOLE; c++) store(to.scale + c * W, scale[c]), store(to.offset + c * W, offset[c]);
}

// Whether a tile unpacks integers to bytes itself, in parallel with the products, which run on other execution ports.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool UNPACKS_IN_PLACE = true;
#else
constexpr bool UNPACKS_IN_PLACE = false;
#endif

// A panel as tiles read it. For several tiles it is opened first: factors are read once, and integers of less than 8 bits are
// unpacked to bytes unless UNPACKS_IN_PLACE.
struct OpenPanel {
    const Matrix& m;
    const Rounded form;
    int64_t index;
    const int32_t* words;
    const Factors* factors;  // of each scale, where there are several tiles

    int64_t num_factors() const { return (form.groups + m.scale_every - 1) / m.scale_every; }

    void read(int64_t i, Factors& to) const {
        const int64_t count = num_factors(), nests = (count + m.nest - 1) / m.nest;
        read_factors(m, index * count + i, index * nests + i / m.nest, to);
    }
};

// Sums of W columns with those of a group. IS_WHOLE: one scale for all groups of a row, which then multiplies their sum.
template <bool IS_WHOLE>
inline vf with_group(vf sum, vi products, vf factor, vf offset, bool has_starts, float total, float scale) {
    vf part = as_float(products);
    if (!IS_WHOLE) {
        part *= factor;
        if (!has_starts) part = fma(offset, splat(total), part);
    }
    return fma(part, splat(scale), sum);
}

// The sums of all groups with the scale that they share.
inline vf scaled(vf sum, vf scale, vf offset, bool has_starts, float total) {
    const vf y = sum * scale;
    return has_starts ? y : fma(offset, splat(total), y);
}

// Without VNNI a product of four bytes is one of two pairs, which fits into 16 bits, and the sum of both. Of small integers so
// many pairs fit into 16 bits, one on the other, before they are added up to 32.
template <int BITS>
constexpr int PAIRS =
#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
    BITS < 8 ? 32767 / (2 * 127 * Bits<BITS>::MAX_VALUE) : 0;
#else
    0;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
inline vi add_pairs(vi sums, vi bytes, int32_t x) {
    return (vi)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi32(x)));
}
inline vi add_up(vi sums, vi pairs) { return sums + (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#endif

// Integers of a group, as the panel's words have them from w on: products += x[R] times them. Returns the words behind.
template <int BITS, bool IS_WIDE, int R, int N>
inline const int32_t* multiply_group(const int32_t* w, const char* x, int64_t stride, int64_t steps, vi (&products)[R][N],
                                     Prefetch& prefetch) {
    typedef Bits<BITS> B;
    constexpr int STEP = (IS_WIDE ? B::COUNT : B::WORDS) * PANEL;
    constexpr int PAIR_STEPS = PAIRS<BITS> > B::COUNT ? PAIRS<BITS> / B::COUNT : 1;
    vi pairs[R][N];
    for (int64_t k = 0; k < steps;) {
        const int64_t end = PAIRS<BITS> ? std::min<int64_t>(k + PAIR_STEPS, steps) : steps;
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < N; c++) pairs[r][c] = vi{};
        for (; k < end; k++, w += STEP, x += B::COUNT * 4) {
            UNROLL for (int i = 0; i < B::WORDS; i++) prefetch.fetch();
            UNROLL for (int i = 0; i < B::COUNT; i++) {
                vi bytes[N];
                UNROLL for (int c = 0; c < N; c++) bytes[c] = IS_WIDE ? load(w + i * PANEL + c * W) : B::get(w + c * W, i);
                UNROLL for (int r = 0; r < R; r++) {
                    const int32_t numbers = four(x + r * stride + i * 4);
                    UNROLL for (int c = 0; c < N; c++) {
                        if constexpr (PAIRS<BITS> > 0) {
                            pairs[r][c] = add_pairs(pairs[r][c], bytes[c], numbers);
                            if (PAIRS<BITS> < B::COUNT && (i + 1) % PAIRS<BITS> == 0) {
                                products[r][c] = add_up(products[r][c], pairs[r][c]);
                                pairs[r][c] = vi{};
                            }
                        } else {
                            products[r][c] = dot<B::MAX_VALUE>(products[r][c], bytes[c], numbers);
                        }
                    }
                }
            }
        }
        if constexpr (PAIRS<BITS> >= B::COUNT)
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int c = 0; c < N; c++) products[r][c] = add_up(products[r][c], pairs[r][c]);
    }
    return w;
}

// out[R, N * W] = x[R] times the columns of a panel, from `column` on. IS_OPEN: it has been opened.
template <int BITS, bool IS_OPEN, bool IS_WHOLE, int R, int N>
void integer_tile(const OpenPanel& panel, const char* x, int column, float* out, Prefetch prefetch) {
    typedef Bits<BITS> B;
    constexpr bool IS_WIDE = IS_OPEN && !UNPACKS_IN_PLACE;
    const Matrix& m = panel.m;
    const Rounded form = panel.form;
    const int64_t stride = form.size(), steps = m.num_words / B::WORDS, group_steps = m.group / (4 * B::COUNT);
    const bool has_starts = m.zero_kind == CONSTANT;
    const int32_t* w = panel.words + column;
    const Factors* factors = panel.factors;
    FactorReader<N> reader(m, panel.index, panel.num_factors(), column);
    vf sum[R][N], scale[N], offset[N];
    UNROLL for (int c = 0; c < N; c++) scale[c] = offset[c] = vf{};
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < N; c++) sum[r][c] = vf{};
    for (int64_t g = 0, left = 1; g < form.groups; g++) {
        if (--left == 0) {  // another scale
            if (IS_OPEN) {
                UNROLL for (int c = 0; c < N; c++) {
                    scale[c] = load(factors->scale + column + c * W);
                    offset[c] = load(factors->offset + column + c * W);
                }
                factors++;
            } else {
                reader.next(scale, offset);
            }
            left = m.scale_every;
        }
        vi products[R][N];
        UNROLL for (int r = 0; r < R; r++) {
            const vi start = has_starts ? splat(form.starts(x + r * stride)[g]) : vi{};
            UNROLL for (int c = 0; c < N; c++) products[r][c] = start;
        }
        const int64_t first = g * group_steps;
        w = multiply_group<BITS, IS_WIDE>(w, x + first * B::COUNT * 4, stride, std::min(group_steps, steps - first), products,
                                          prefetch);
        UNROLL for (int r = 0; r < R; r++) {
            const float x_scale = form.scales(x + r * stride)[g], total = form.sums(x + r * stride)[g];
            UNROLL for (int c = 0; c < N; c++)
                sum[r][c] =
                    with_group<IS_WHOLE>(sum[r][c], products[r][c], scale[c], offset[c], has_starts, total, x_scale);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < N; c++) {
        vf y = sum[r][c];
        if (IS_WHOLE) y = scaled(y, scale[c], offset[c], has_starts, *form.total(x + r * stride));
        store(out + r * PANEL + c * W, y);
    }
}

// A tile of a panel's columns: all at once for one row, whose sums leave registers for them.
template <int BITS, bool IS_OPEN, bool IS_WHOLE, int R = INTEGER_ROWS>
void integer_tiles(int rows, const OpenPanel& panel, const char* x, float* out, Prefetch prefetch) {
    if constexpr (R > 1)
        if (rows < R) return integer_tiles<BITS, IS_OPEN, IS_WHOLE, R - 1>(rows, panel, x, out, prefetch);
    constexpr int N = R == 1 ? WHOLE : C;
    for (int column = 0; column < PANEL; column += N * W)
        integer_tile<BITS, IS_OPEN, IS_WHOLE, R, N>(panel, x, column, out + column, prefetch);
}

}  // namespace kernel
