// Matrices into the panels that linear kernels read (matrix.h), and numbers into integers with scales.

#include <cmath>
#include <cstring>

#include "fwk/thread_pool.h"

namespace {

constexpr int PANEL = 32, ENTRIES = 16;

struct Pack {
    const char* from;  // [rows, entries] of `size` bytes each
    char* to;          // [panels, entries, PANEL]
    int64_t rows, entries, size;
};

template <class T>
void pack_panel(const Pack& call, int64_t panel) {
    const T* from = (const T*)call.from + panel * PANEL * call.entries;
    T* to = (T*)call.to + panel * PANEL * call.entries;
    const int64_t left = call.rows - panel * PANEL;
    const int rows = left < PANEL ? int(left) : PANEL;
    T block[ENTRIES * PANEL] = {};  // missing rows are zeros
    for (int64_t first = 0; first < call.entries; first += ENTRIES) {
        const int64_t rest = call.entries - first;
        const int count = rest < ENTRIES ? int(rest) : ENTRIES;
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < count; i++) block[i * PANEL + row] = from[row * call.entries + first + i];
        memcpy(to + first * PANEL, block, size_t(count) * PANEL * sizeof(T));
    }
}

struct IntegerWords {
    const uint8_t* numbers;  // [rows, columns]
    uint32_t* words;         // [rows, whole_columns * bits / 32]
    int64_t rows, columns, whole_columns, bits;
};

// Of each step, runs of four inputs: two share a word, one in the low halves of its bytes, one in the high. What is above
// four bits of all runs is in one word more.
template <int BITS>
void integer_row(const uint8_t* from, uint32_t* to, int64_t steps) {
    constexpr int RUNS = BITS == 4 ? 2 : BITS == 5 ? 8 : BITS == 6 ? 4 : 1;
    constexpr int WORDS = BITS == 8 ? 1 : RUNS / 2 + (BITS > 4);
    for (int64_t step = 0; step < steps; step++, from += 4 * RUNS, to += WORDS) {
        uint32_t run[RUNS];
        memcpy(run, from, sizeof run);
        if (BITS == 8) {
            to[0] = run[0];
            continue;
        }
        uint32_t above = 0;
        for (int i = 0; i < RUNS; i += 2) to[i / 2] = (run[i] & 0x0f0f0f0f) | (run[i + 1] & 0x0f0f0f0f) << 4;
        for (int i = 0; i < RUNS; i++) above |= (run[i] >> 4 & 0x0f0f0f0f) << i * (BITS - 4);
        if (BITS > 4) to[WORDS - 1] = above;
    }
}

template <int BITS>
void integer_row(const IntegerWords& call, int64_t row) {
    constexpr int STEP = BITS == 4 ? 8 : BITS == 5 ? 32 : BITS == 6 ? 16 : 4;
    const uint8_t* from = call.numbers + row * call.columns;
    uint32_t* to = call.words + row * (call.whole_columns * BITS / 32);
    int64_t steps = call.columns / STEP, rest = call.columns % STEP;
    integer_row<BITS>(from, to, steps);
    for (const int64_t all = call.whole_columns / STEP; steps < all; steps++, rest = 0) {
        uint8_t last[STEP] = {};
        memcpy(last, from + steps * STEP, size_t(rest));
        integer_row<BITS>(last, to + steps * (STEP * BITS / 32), 1);
    }
}

struct Quantise {
    const void* weight;  // [rows, groups, group]
    int8_t* numbers;     // like weight
    void* scales;        // [rows, groups] of the type of weight
    uint8_t* zeros;      // [rows, groups], or null: numbers are symmetric about `middle`
    int64_t rows, groups, group, bits, middle;
    int64_t is_bfloat16;  // weight; otherwise it is float32
};

struct Bfloat16 {
    uint16_t bits;

    float wide() const {
        const uint32_t value = uint32_t(bits) << 16;
        float number;
        memcpy(&number, &value, 4);
        return number;
    }

    static Bfloat16 rounded(float number) {
        uint32_t value;
        memcpy(&value, &number, 4);
        return {uint16_t((value + 0x7fff + (value >> 16 & 1)) >> 16)};
    }
};

struct Float32 {
    float number;

    float wide() const { return number; }
    static Float32 rounded(float number) { return {number}; }
};

// The scale as it is stored, which numbers are rounded by; a group of zeros has a scale of one.
template <class T>
float usable(float scale, T& stored) {
    stored = T::rounded(scale);
    if (!(stored.wide() > 0)) stored = T::rounded(1);
    return stored.wide();
}

template <class T>
void quantise_group(const Quantise& call, int64_t index) {
    const T* from = (const T*)call.weight + index * call.group;
    int8_t* to = call.numbers + index * call.group;
    float min_value = 0, max_value = 0;
#pragma omp simd reduction(min : min_value) reduction(max : max_value)
    for (int64_t i = 0; i < call.group; i++) {
        const float x = from[i].wide();
        min_value = x < min_value ? x : min_value;
        max_value = x > max_value ? x : max_value;
    }
    T& stored = ((T*)call.scales)[index];
    float zero = 0, low, high;
    float scale;
    if (call.zeros) {
        low = 0, high = float((1 << call.bits) - 1);
        scale = usable<T>((max_value - min_value) / high, stored);
        zero = std::nearbyint(-min_value / scale);
        zero = zero < low ? low : zero > high ? high : zero;
        call.zeros[index] = uint8_t(zero);
    } else {
        high = float((1 << (call.bits - 1)) - 1), low = -high;
        scale = usable<T>((-min_value > max_value ? -min_value : max_value) / high, stored);
    }
    const int middle = int(call.middle);
    const int64_t count = call.group;  // `to` may be written to anywhere, as far as a compiler knows
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float number = std::nearbyint(from[i].wide() / scale) + zero;
        number = number < low ? low : number > high ? high : number;
        to[i] = int8_t(int(number) + middle);
    }
}

}  // namespace

extern "C" void pack(const void* args, fwk::PoolThread& thread) {
    const Pack& call = *(const Pack*)args;
    thread.parallel_for((call.rows + PANEL - 1) / PANEL, [&](int64_t panel) {
        if (call.size == 4) pack_panel<uint32_t>(call, panel);
        if (call.size == 2) pack_panel<uint16_t>(call, panel);
        if (call.size == 1) pack_panel<uint8_t>(call, panel);
    });
}

extern "C" void integer_words(const void* args, fwk::PoolThread& thread) {
    const IntegerWords& call = *(const IntegerWords*)args;
    constexpr int64_t ROWS = 8;  // of a task
    thread.parallel_for((call.rows + ROWS - 1) / ROWS, [&](int64_t chunk) {
        const int64_t last = (chunk + 1) * ROWS < call.rows ? (chunk + 1) * ROWS : call.rows;
        for (int64_t row = chunk * ROWS; row < last; row++) {
            if (call.bits == 4) integer_row<4>(call, row);
            if (call.bits == 5) integer_row<5>(call, row);
            if (call.bits == 6) integer_row<6>(call, row);
            if (call.bits == 8) integer_row<8>(call, row);
        }
    });
}

extern "C" void quantise(const void* args, fwk::PoolThread& thread) {
    const Quantise& call = *(const Quantise*)args;
    constexpr int64_t ROWS = 8;  // of a task
    thread.parallel_for((call.rows + ROWS - 1) / ROWS, [&](int64_t chunk) {
        const int64_t last = (chunk + 1) * ROWS < call.rows ? (chunk + 1) * ROWS : call.rows;
        for (int64_t index = chunk * ROWS * call.groups; index < last * call.groups; index++)
            call.is_bfloat16 ? quantise_group<Bfloat16>(call, index) : quantise_group<Float32>(call, index);
    });
}
