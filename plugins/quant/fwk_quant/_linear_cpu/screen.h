// The largest output of each row (argmax of greedy decoding), without reading all of a matrix.
//
// The screen of a matrix is a copy quantised to 8 bits. By Cauchy-Schwarz the error of a product with the quantised numbers is
// at most the norm of the quantisation error times the norm of x. So an output whose upper bound is below the largest lower
// bound is not the largest. Maximum inner product search prunes by such bounds (Teflioudi et al., "LEMP", 2015); here the few panels
// that remain are computed exactly, with the same bits as by `linear`.
//
// x is quantised to 15 bits, as two 8-bit integers, high and low.
#pragma once

#include <cmath>
#include <limits>

#include "driver.h"
#include "float_tiles.h"

namespace kernel {

// With more rows the products take longer than reading the matrix.
#if defined(__AVX512VNNI__)
constexpr int SCREENED_ROWS = 4;
#elif defined(__AVX2__)
constexpr int SCREENED_ROWS = 2;
#else
constexpr int SCREENED_ROWS = 1;
#endif

constexpr int64_t MAX_INT15 = 32512;  // of x's integers: its high byte is 127

constexpr float INF = std::numeric_limits<float>::infinity();

// What rounding in float32 may add up to in a sum of n products, as a share of the norms: each term is rounded, and so
// is each sum, twice at most.
inline float rounding_error(int64_t n) { return float(n + 32) * 0x1p-23f; }

// A quantised row of x: for each word four high and four low bytes; here its scale, norm and sums.
struct HighLowRow {
    float scale, norm;
    int32_t high_sum, low_sum;

    static int64_t bytes(const Screen& s) { return s.num_words * 8 + 64; }
};

template <class T>
HighLowRow split_row(const Screen& s, const T* x, char* to) {
    const int64_t size = s.matrix->in_features;
    float max_abs = 0, squares = 0;
    for (int64_t i = 0; i < size; i += W) {
        const vf v = load_padded(x, i, size, [](const T* from) { return load(from); });
        for (int j = 0; j < W; j++) max_abs = std::max(max_abs, std::fabs(v[j])), squares += v[j] * v[j];
    }
    HighLowRow found{0, std::sqrt(squares) * (1 + rounding_error(size)), 0, 0};
    if (!(max_abs > 1e-18f && squares < 1e30f)) found.norm = INF;  // so that nothing is pruned
    else found.scale = max_abs / MAX_INT15;
    const float inverse = found.scale > 0 ? MAX_INT15 / max_abs : 0;
    memset(to, 0, s.num_words * 8);
    for (int64_t i = 0; i < size && inverse > 0; i++) {
        const int32_t number = int32_t(std::nearbyint(to_float(x[i]) * inverse));
        const int32_t high = (number + 128) >> 8, low = number - high * 256;
        to[i / 4 * 8 + i % 4] = char(high);
        to[i / 4 * 8 + 4 + i % 4] = char(low);
        found.high_sum += high;
        found.low_sum += low;
    }
    return found;
}

// sums [2 R, C * W]: of each row its high part, then its low one.
template <int R>
void screen_tile(const char* x, int64_t x_stride, const int32_t* w, int64_t words, int32_t* sums, Prefetch prefetch) {
    vi sum[2 * R][C];
    UNROLL for (int r = 0; r < 2 * R; r++) UNROLL for (int c = 0; c < C; c++) sum[r][c] = vi{};
    for (int64_t k = 0; k < words; k++, w += PANEL) {
        prefetch.fetch();
        UNROLL for (int r = 0; r < 2 * R; r++) {
            int32_t four;
            memcpy(&four, x + r / 2 * x_stride + k * 8 + r % 2 * 4, 4);
            UNROLL for (int c = 0; c < C; c++) sum[r][c] = dot<255>(sum[r][c], load(w + c * W), four);
        }
    }
    UNROLL for (int r = 0; r < 2 * R; r++) UNROLL for (int c = 0; c < C; c++) *(vi*)(sums + r * PANEL + c * W) = sum[r][c];
}

template <int R = SCREENED_ROWS>
void screen_tiles(int rows, const char* x, int64_t x_stride, const int32_t* w, int64_t words, int32_t* sums,
                  Prefetch prefetch) {
    if constexpr (R > 1)
        if (rows < R) return screen_tiles<R - 1>(rows, x, x_stride, w, words, sums, prefetch);
    screen_tile<R>(x, x_stride, w, words, sums, prefetch);
}

// Of the products of a row with a panel's outputs: none is above `highest`, one at least is not below `least`.
struct Bounds {
    float highest, least;
};

// sums: of the row's high part and of its low one, [2, PANEL].
inline Bounds bounds(const Screen& s, const HighLowRow& row, int64_t panel, const int32_t* sums) {
    const int64_t first = panel * PANEL, count = s.matrix->out_features - first;
    vf highest = splat(-INF), least = highest;
    for (int c = 0; c < PANEL; c += W) {
        const vi high = load(sums + c) - 128 * row.high_sum, low = load(sums + PANEL + c) - 128 * row.low_sum;
        const vf product = (as_float(high) * 256.0f + as_float(low)) * (load(s.scales + first + c) * row.scale);
        const vf error = load(s.errors + first + c) * row.norm;
        vf above = product + error, below = product - error;
        above = above < INF ? above : splat(INF);  // NaN gives no bound
        below = below > -INF ? below : splat(-INF);
        for (int64_t i = std::max<int64_t>(count - c, 0); i < W; i++) above[i] = below[i] = -INF;
        highest = vmax(highest, above);
        least = vmax(least, below);
    }
    return {reduce_max(highest), reduce_max(least)};
}

thread_local ThreadMemory split_memory;

// K, T as in `run`.
template <class K, class T>
void run_largest(const Largest& call, fwk::PoolThread& thread) {
    const Linear& linear = call.linear;
    const Screen& s = *call.screen;
    const Matrix& m = *linear.matrix;
    const int rows = int(linear.rows);
    if (!*call.is_greedy || rows > SCREENED_ROWS) return run<K, T>(linear, thread);
    const int64_t panels = (m.out_features + PANEL - 1) / PANEL, bytes = HighLowRow::bytes(s);
    float *highest = call.bounds, *least = call.bounds + SCREENED_ROWS * panels;  // [rows, panels]
    {
        char* x = split_memory.take(rows * bytes);
        HighLowRow row[SCREENED_ROWS];
        for (int r = 0; r < rows; r++) row[r] = split_row(s, (const T*)linear.x + r * linear.x_stride, x + r * bytes);
        thread.parallel_for_ordered(panels, [&](int64_t panel, int64_t next) {
            int32_t sums[2 * SCREENED_ROWS * PANEL];
            const int32_t* words = s.words + panel * s.num_words * PANEL;
            Prefetch prefetch{(const char*)(s.words + next * s.num_words * PANEL), PANEL * 4};
            for (int column = 0; column < PANEL; column += C * W, prefetch.bytes = 0)
                screen_tiles(rows, x, bytes, words + column, s.num_words, sums + column, prefetch);
            for (int r = 0; r < rows; r++) {
                const Bounds found = bounds(s, row[r], panel, sums + 2 * r * PANEL);
                highest[r * panels + panel] = found.highest;
                least[r * panels + panel] = found.least;
            }
        });
    }
    float wanted[SCREENED_ROWS];  // what an upper bound must reach
    for (int r = 0; r < rows; r++) {
        float best = -INF;
        for (int64_t panel = 0; panel < panels; panel++) best = std::max(best, least[r * panels + panel]);
        wanted[r] = best - std::fabs(best) * (sizeof(T) == 2 ? 0x1p-7f : 0x1p-22f);  // after rounding some may be equal
    }
    const bool is_read = K::template reads<T>(linear);
    Rows x{(const char*)linear.x, linear.x_stride * int64_t(sizeof(T)), 1};
    if (!is_read) {
        x.stride = K::row_bytes(m);
        char* to = own_rows.take(rows * x.stride);
        prepare<K, T>(linear, 0, rows, 1, to);
        x.first = to;
    }
    thread.parallel_for_ordered(panels, [&](int64_t panel, int64_t) {
        bool is_needed = false;
        for (int r = 0; r < rows; r++) is_needed |= !(highest[r * panels + panel] < wanted[r]);
        if (!is_needed) {
            const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, m.out_features - first);
            T none;
            store_one(&none, -INF);
            for (int r = 0; r < rows; r++) std::fill_n((T*)linear.y + r * linear.y_stride + first, count, none);
            return;
        }
        const typename K::Panel opened(m, panel, false);
        alignas(64) float sums[K::ROWS * PANEL];
        for (int column = 0; column < PANEL; column += K::COLUMNS)
            opened.multiply(rows, x, column, sums + column, {(const char*)m.words, 0});
        put<T>(linear, sums, 0, rows, panel * PANEL);
    });
}

// A panel of the screen. number(i, c): vector c of the panel's numbers of input i.
template <class F>
void screen_panel(const Screen& s, int64_t panel, F number) {
    const int64_t size = s.matrix->in_features;
    constexpr int VECTORS = PANEL / W;
    vf max_abs[VECTORS] = {}, squares[VECTORS] = {}, scale[VECTORS], inverse[VECTORS], lost[VECTORS] = {};
    for (int64_t i = 0; i < size; i++)
        for (int c = 0; c < VECTORS; c++) {
            const vf v = number(i, c);
            const vf magnitude = (vf)((vi)v & 0x7fffffff);
            max_abs[c] = magnitude > max_abs[c] || magnitude != magnitude ? magnitude : max_abs[c];
            squares[c] += v * v;
        }
    for (int c = 0; c < VECTORS; c++) {
        const vi is_usable = max_abs[c] > 1e-18f;
        scale[c] = is_usable ? max_abs[c] / 127.0f : splat(0.0f);
        inverse[c] = is_usable ? 127.0f / max_abs[c] : splat(0.0f);
    }
    int32_t* to = s.words + panel * s.num_words * PANEL;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int64_t k = 0; k < s.num_words; k++, to += PANEL)
        for (int c = 0; c < VECTORS; c++) {
            vi word = vi{};
            for (int j = 0; j < 4 && k * 4 + j < size; j++) {
                const vf v = number(k * 4 + j, c);
                const vi whole = (vi)fma(v, inverse[c], magic) - (vi)magic;
                const vf rest = v - as_float(whole) * scale[c];
                lost[c] += rest * rest;
                word |= (whole + 128 & 255) << 8 * j;
            }
            *(vi*)(to + c * W) = word;
        }
    const float share = rounding_error(size);
    const float rounded_x = std::sqrt(float(size)) / (2 * MAX_INT15) * 1.01f;  // x's rounding, as a share of its norm
    for (int c = 0; c < VECTORS; c++) {
        store(s.scales + panel * PANEL + c * W, scale[c]);
        for (int j = 0; j < W; j++) {
            const float norm = std::sqrt(squares[c][j]) * (1 + share);
            const float error = std::sqrt(lost[c][j]) * (1 + share) + norm * (share + rounded_x);
            // Squares overflow or underflow: no bound is known.
            s.errors[panel * PANEL + c * W + j] =
                norm < 1e15f && (norm > 1e-15f || max_abs[c][j] == 0) ? error : INF;
        }
    }
}

}  // namespace kernel
