// A linear layer as operators of other plugins call it. `QuantMethod.native` (fwk/interfaces/quant.py) gives the operator that
// takes this structure, and the matrix, which only that operator reads.
#pragma once

#include <cstdint>

extern "C" {

struct Matrix;

struct Linear {
    const Matrix* matrix;
    const void* x;     // [rows, in_features], of the type of y
    void* y;           // [rows, out_features]
    const void* bias;  // [out_features] of the type of y, or null
    char* scratch;     // [rows to a whole 16, row_bytes], for rows that threads share
    int64_t rows, x_stride, y_stride;  // strides in elements
    int64_t is_bfloat16;               // x, y and bias; otherwise they are float32
};

}  // extern "C"
