// Products of blocks by AMX, whose tiles are eight registers of up to 16 rows of 64 bytes.
//
// FWK_TILES says that a kernel is built for them: with the instructions, or with FWK_EMULATED_TILES, where what they do
// is computed (emulated_tiles.h), which is for tests and never chosen by itself. A kernel's code is the same with both.
//
// A block is up to 32 rows by 32 or 16 columns of 32-bit sums, in up to four tiles. A step multiplies up to 16 words
// (pairs of bfloat16, or four bytes) of each row by as many words of each column, which lie as a packed matrix has
// them: words of 16 columns side by side.
//
// A strip is up to 16 rows by up to 64 columns. Its tiles serve steps of two numbers of words without being laid out anew,
// which costs more than a product of few rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#if defined(FWK_EMULATED_TILES)
#define FWK_TILES 1
#include "fwk/emulated_tiles.h"
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define FWK_TILES 1

namespace fwk::tiles {

// Not by intrinsics: gcc's do not tell the compiler which memory they read, and take no template's argument.
inline void configure(const void* layout) { asm volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])layout)); }
inline void release() { asm volatile("tilerelease"); }

template <int TILE>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE));
}

// Compiler barrier: earlier writes reach memory before `load` reads it, because the asm statement of a load names no memory.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

template <int TILE>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

struct Pairs {  // of bfloat16, to float32
    template <int SUMS, int ROWS, int COLUMNS>
    static inline void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
    }
};

struct Bytes {  // signed ones of rows, unsigned ones of columns, to int32
    template <int SUMS, int ROWS, int COLUMNS>
    static inline void multiply() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
    }
};

}  // namespace fwk::tiles
#endif

#if defined(FWK_TILES)
namespace fwk::tiles {

constexpr int SIDE = 16;         // rows of a tile, its words in a row, and its columns
constexpr int BLOCK = 2 * SIDE;  // rows of a block, and its columns

struct Layout {  // as the instruction reads it
    alignas(64) uint8_t palette = 1;
    uint8_t unused[15] = {};
    uint16_t bytes[16] = {};  // of a row, by tile
    uint8_t rows[16] = {};

    void set(int tile, int count, int words) {
        rows[tile] = uint8_t(count);
        bytes[tile] = uint16_t(count ? words * 4 : 0);
    }
};
static_assert(sizeof(Layout) == 64, "is what the instruction reads");

struct Shape {
    int upper = 0, lower = 0;  // rows of tiles 0 and 1, and of 2 and 3
    int columns = 0, words = 0;
    int fewer = 0;  // words of a strip's other steps; 0: it is no strip

    bool is_tall() const { return lower > 0; }
    bool is_wide() const { return columns > SIDE; }
};
static thread_local Shape shape;  // of the block that this thread's tiles are laid out for; of no rows: they are not

// Scope of a kernel's use of tiles. Its end releases this thread's tiles, so that context switches do not save them.
struct Region {
    ~Region() {
        if (!shape.upper) return;
        release();
        shape = {};
    }
};

// The block becomes zeros.
inline void zeros() {
    zero<0>();
    if (shape.is_wide()) zero<1>();
    if (shape.is_tall()) zero<2>();
    if (shape.is_tall() && shape.is_wide()) zero<3>();
}

inline void begin(int upper, int lower, int columns, int words) {
    if (shape.upper != upper || shape.lower != lower || shape.words != words || shape.fewer) {
        Layout layout;
        for (int tile : {0, 1}) layout.set(tile, upper, SIDE);
        for (int tile : {2, 3}) layout.set(tile, lower, SIDE);
        layout.set(4, upper, words);
        layout.set(5, lower, words);
        for (int tile : {6, 7}) layout.set(tile, words, SIDE);
        configure(&layout);
    }
    shape = {upper, lower, columns, words};
    zeros();
}

// A block of zeros, of 1 to 32 rows and 16 or 32 columns, whose steps take 1 to 16 words.
inline void begin(int rows, int columns, int words) {
    const int upper = std::min(rows, SIDE);
    begin(upper, rows - upper, columns, words);
}

// A block of two halves with `rows` (1 to 16) rows each. The second half starts at row 16.
inline void begin_both(int rows, int columns, int words) { begin(rows, rows, columns, words); }

// The block becomes what lies at `from`; strides are bytes from row to row.
inline void read(const void* from, int64_t stride) {
    compiler_barrier();
    const char *upper = (const char*)from, *lower = upper + SIDE * stride;
    load<0>(upper, stride);
    if (shape.is_wide()) load<1>(upper + 64, stride);
    if (shape.is_tall()) load<2>(lower, stride);
    if (shape.is_tall() && shape.is_wide()) load<3>(lower + 64, stride);
}

struct Operands {  // of a step: the rows, and words of the first and of the last 16 columns
    const void *x, *left, *right;
};

template <class Numbers, bool IS_TALL, bool IS_WIDE, class At>
inline void steps_of(int64_t count, int64_t x_stride, int64_t stride, const At& at) {
    for (int64_t i = 0; i < count; i++) {
        const Operands operands = at(i);
        load<4>(operands.x, x_stride), load<6>(operands.left, stride);
        Numbers::template multiply<0, 4, 6>();
        if (IS_WIDE) {
            load<7>(operands.right, stride);
            Numbers::template multiply<1, 4, 7>();
        }
        if (IS_TALL) {
            load<5>((const char*)operands.x + SIDE * x_stride, x_stride);
            Numbers::template multiply<2, 5, 6>();
            if (IS_WIDE) Numbers::template multiply<3, 5, 7>();
        }
    }
}

// Accumulate `count` steps, whose operands at(i) returns. at(i) must not write to them. Strides are in bytes between rows.
template <class Numbers, class At>
inline void steps(int64_t count, int64_t x_stride, int64_t stride, const At& at) {
    compiler_barrier();
    if (shape.is_tall() && shape.is_wide()) return steps_of<Numbers, true, true>(count, x_stride, stride, at);
    if (shape.is_wide()) return steps_of<Numbers, false, true>(count, x_stride, stride, at);
    if (shape.is_tall()) return steps_of<Numbers, true, false>(count, x_stride, stride, at);
    steps_of<Numbers, false, false>(count, x_stride, stride, at);
}

inline void write(void* to, int64_t stride) {
    char *upper = (char*)to, *lower = upper + SIDE * stride;
    store<0>(upper, stride);
    if (shape.is_wide()) store<1>(upper + 64, stride);
    if (shape.is_tall()) store<2>(lower, stride);
    if (shape.is_tall() && shape.is_wide()) store<3>(lower + 64, stride);
}

// Lay tiles out for strips of 1 to 16 rows, whose steps take `words` or `fewer` words, 1 to 16 each.
inline void lay_strips(int rows, int words, int fewer) {
    if (shape.upper == rows && shape.words == words && shape.fewer == fewer) return;
    Layout layout;
    for (int tile : {0, 1, 2, 3}) layout.set(tile, rows, SIDE);
    layout.set(4, rows, words), layout.set(5, rows, fewer);
    layout.set(6, words, SIDE), layout.set(7, fewer, SIDE);
    configure(&layout);
    shape = {rows, rows, 0, words, fewer};
}

// f(tile) for each of N tiles, with the number as a constant.
template <int N, class F>
inline void for_tiles(const F& f) {
    f(std::integral_constant<int, 0>());
    if constexpr (N > 1) f(std::integral_constant<int, 1>());
    if constexpr (N > 2) f(std::integral_constant<int, 2>());
    if constexpr (N > 3) f(std::integral_constant<int, 3>());
}

// Add the products of so many steps to a strip of N times 16 columns. rows(i), columns(i, tile): the operands of a step,
// IS_FEW: whose words are the fewer. Strides are bytes from row to row.
template <class Numbers, int N, bool IS_FEW, class Rows, class Columns>
inline void strip_steps(int64_t count, int64_t x_stride, int64_t stride, const Rows& rows, const Columns& columns) {
    constexpr int X = IS_FEW ? 5 : 4, Y = IS_FEW ? 7 : 6;
    compiler_barrier();
    for (int64_t i = 0; i < count; i++) {
        load<X>(rows(i), x_stride);
        for_tiles<N>([&](auto tile) {
            load<Y>(columns(i, tile.value), stride);
            Numbers::template multiply<tile.value, X, Y>();
        });
    }
}

template <int N>
inline void zero_strip() {
    for_tiles<N>([](auto tile) { zero<tile.value>(); });
}

template <int N>
inline void read_strip(const float* from, int64_t stride) {
    compiler_barrier();
    for_tiles<N>([=](auto tile) { load<tile.value>(from + tile.value * SIDE, stride); });
}

template <int N>
inline void write_strip(float* to, int64_t stride) {
    for_tiles<N>([=](auto tile) { store<tile.value>(to + tile.value * SIDE, stride); });
}

}  // namespace fwk::tiles
#endif
