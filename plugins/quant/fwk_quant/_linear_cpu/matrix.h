// Arguments of the linear operators.
#pragma once

#include <cstdint>

#include "fwk/linear.h"

extern "C" {

// What a word of a matrix holds: one float, two bfloat16, four 8-bit or eight 4-bit integers. Of 6-bit integers, two
// words with the low halves of eight each are followed by one with the high bits of all sixteen; of 5-bit integers, four
// such words by one.
// Of bfloat16 in 12 bits, three words are what four would be (bf12.h).
enum Format { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, INT6 = 4, INT5 = 5, BFLOAT16_IN_12 = 6 };

// How the value of an integer q in a group is told: s (q - zero), s (q - its group's zero), or s q + o.
enum Zeros { CONSTANT = 0, BYTES = 1, OFFSETS = 2 };

// How s and o are stored: float32, float16, or a float16 for some groups times a signed byte for each.
enum Scales { SINGLE = 0, HALF = 1, NESTED = 2 };

// In panels of 32 outputs: words [panels, num_words, 32] of 32 bits; of integers also scales and zeros [panels, groups, 32].
// Words of zeros make the last group whole, and of floats the last 16 words, which AMX multiplies at once.
struct Rare {
    int32_t input;
    uint16_t output, value;  // of a panel's outputs; bfloat16
};

struct Matrix {
    const void* words;
    const void* scales;
    const void* zeros;
    const int8_t* scale_bytes;  // NESTED
    const int8_t* zero_bytes;   // NESTED
    int64_t out_features, in_features, num_words, format;
    int64_t group;        // inputs whose x is rounded with one scale
    int64_t scale_every;  // of these groups, those that share a scale
    int64_t nest;         // groups of scales that share a float16, where they are NESTED
    int64_t scale_kind, zero_kind, zero;
    const uint16_t* exponents;   // BFLOAT16_IN_12: [panels, 32], of its codes, twice
    const int64_t* rare_starts;  // [panels + 1]
    const Rare* rare;            // by panel, then by input
    int64_t int16_activations;   // INT8 with one scale per output, CONSTANT: x is rounded to 16 bits, with one scale a row
};

struct Compress {  // bfloat16 to 12 bits: first only exponents and rare_counts are written, then the others
    const uint16_t* weight;
    int64_t out_features, in_features, stride, num_words;
    uint16_t* exponents;
    int64_t* rare_counts;  // [panels]
    int32_t* words;        // null at first
    const int64_t* rare_starts;
    Rare* rare;
};

struct Screen {  // a matrix' numbers again, an output's rounded with one scale to 8 bits (screen.h)
    const Matrix* matrix;
    int32_t* words;  // [panels, num_words, 32]: four neighbouring inputs, 128 added to each; 0 past the last
    float* scales;   // [panels, 32]
    float* errors;   // [panels, 32]: bound of a product's error, as a multiple of the norm of x
    int64_t num_words;
};

struct Largest {  // with *is_greedy only each row's maximum (and what equals it) is exact in y; otherwise all of y
    Linear linear;
    const Screen* screen;
    const int64_t* is_greedy;
    float* bounds;  // [2, linear_screened_rows, panels]
};

struct Gather {  // y[row, i] = x[row, inputs[i]]
    const void* x;
    void* y;
    const int64_t* inputs;
    int64_t rows, columns, x_stride, is_bfloat16;
};

struct LinearRows {  // rows of a matrix as they were before it was packed
    const Matrix* matrix;
    const int64_t* indices;
    void* y;  // [count, in_features]
    int64_t count;
    int64_t is_bfloat16;  // y; otherwise it is float32
};

}  // extern "C"
