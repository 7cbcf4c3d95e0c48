// The small operators of a layer, each in one pass. T: float, or uint16_t for bfloat16. Rounding is as in
// fwk/interfaces/operators.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fwk/activations.h"
#include "fwk/thread_pool.h"
#include "fwk/vectors.h"

extern "C" {

struct Norm {
    const void* x;
    void* residual;  // [tokens, size], or null
    void* out;       // [tokens, heads, size]
    const void* weight;
    int64_t tokens, heads, size, x_stride;  // x_stride: from token to token
    int64_t weight_heads;                   // rows of the weight: heads, or 1
    float eps;
    int32_t rounds_last;
};

struct Rotate {
    void* x;
    const void *cos, *sin;  // [tokens, rotary_size]
    int64_t tokens, heads, x_stride, head_stride, rotary_size;  // strides: from token to token, from head to head
};

struct Gate {
    const void* x;
    void* out;
    int64_t rows, size, x_stride, activation;
};

struct Choose {
    const void* logits;       // [tokens, experts]
    const float* correction;  // [experts], or null
    int64_t* ids;             // [tokens, top_k]
    float* weights;           // the same
    int64_t tokens, experts, top_k, groups, top_groups, is_sigmoid, normalises;
    float scale;
};

struct Rows {
    const void* table;
    const int64_t* indices;
    void* out;
    int64_t count, size;
    float scale;  // 1: a copy
};

struct Scale {
    void* x;
    int64_t rows, size, x_stride;
    float factor;
};

struct Place {  // rows into wider ones
    const char* part;
    char* out;
    int64_t rows, row_bytes, out_stride;  // out_stride: bytes
};

}  // extern "C"

namespace {

using namespace fwk;

constexpr int64_t CHUNK = 4096;  // numbers, about

// Chunks of whole rows: f(row).
template <class F>
void by_rows(PoolThread& m, int64_t rows, int64_t size, F f) {
    const int64_t step = std::max<int64_t>(1, CHUNK / std::max<int64_t>(size, 1));
    m.parallel_for_ordered((rows + step - 1) / step, [&](int64_t chunk, int64_t) {
        for (int64_t row = chunk * step; row < std::min(rows, (chunk + 1) * step); row++) f(row);
    });
}

template <class T>
void norm_row(const T* x, T* residual, T* out, const void* weight, int64_t size, float eps, bool rounds_last) {
    vf squares = {};
    for_each_vector(size, [&](int64_t i, auto load, auto store) {
        vf v = load(x + i);
        if (residual) {
            v = rounded<T>(load(residual + i) + v);
            store(residual + i, v);
        }
        squares += v * v;
    });
    const T* from = residual ? residual : x;
    const float scale = 1.0f / std::sqrt(reduce_add(squares) / float(size) + eps);
    for_each_vector(size, [&](int64_t i, auto load, auto store) {
        const vf normed = load(from + i) * scale;
        store(out + i, rounds_last ? normed * load((const float*)weight + i)
                                   : rounded<T>(normed) * load((const T*)weight + i));
    });
}

template <class T>
void norm(const void* args, PoolThread& m) {
    const Norm& a = *(const Norm*)args;
    const int64_t weight_size = a.size * (a.rounds_last ? sizeof(float) : sizeof(T));
    by_rows(m, a.tokens * a.heads, a.size, [&](int64_t row) {
        const int64_t token = row / a.heads, head = row % a.heads;
        norm_row((const T*)a.x + token * a.x_stride + head * a.size, a.residual ? (T*)a.residual + row * a.size : nullptr,
                 (T*)a.out + row * a.size, (const char*)a.weight + head % a.weight_heads * weight_size, a.size, a.eps,
                 a.rounds_last);
    });
}

template <class T>
void rotate(const void* args, PoolThread& m) {
    const Rotate& a = *(const Rotate*)args;
    const int64_t half = a.rotary_size / 2;
    by_rows(m, a.tokens * a.heads, a.rotary_size, [&](int64_t row) {
        const int64_t token = row / a.heads;
        const T *cos = (const T*)a.cos + token * a.rotary_size, *sin = (const T*)a.sin + token * a.rotary_size;
        T* x = (T*)a.x + token * a.x_stride + row % a.heads * a.head_stride;
        for_each_vector(half, [&](int64_t i, auto load, auto store) {
            const vf left = load(x + i), right = load(x + half + i);
            store(x + i, rounded<T>(left * load(cos + i)) + right * load(sin + i));
            store(x + half + i, rounded<T>(right * load(cos + half + i)) + left * load(sin + half + i));
        });
    });
}

template <class T>
void gate(const void* args, PoolThread& m) {
    const Gate& a = *(const Gate*)args;
    const int64_t step = std::min<int64_t>(a.size, 512), parts = (a.size + step - 1) / step;
    by_rows(m, a.rows * parts, step * 8, [&](int64_t part) {  // a number costs as much as some of other operators
        const int64_t row = part / parts, first = part % parts * step;
        const T *x = (const T*)a.x + row * a.x_stride + first, *up = x + a.size;
        T* out = (T*)a.out + row * a.size + first;
        for_each_vector(std::min(step, a.size - first), [&](int64_t i, auto load, auto store) {
            store(out + i, rounded<T>(activated(load(x + i), a.activation)) * load(up + i));
        });
    });
}

// The `count` largest of `size` numbers, best first; of equal ones the first. They are -inf afterwards.
template <class F>
void take_largest(float* x, int64_t size, int64_t count, F take) {
    for (int64_t k = 0; k < count; k++) {
        const int64_t best = std::max_element(x, x + size) - x;
        take(k, best);
        x[best] = -std::numeric_limits<float>::infinity();
    }
}

// `Routing.choose` (fwk/interfaces/moe.py).
template <class T>
void choose(const void* args, PoolThread& m) {
    const Choose& a = *(const Choose*)args;
    by_rows(m, a.tokens, a.experts * 8, [&](int64_t token) {
        thread_local std::vector<float> memory;
        memory.resize(2 * a.experts + 2 * a.groups);
        float *scores = memory.data(), *ranks = scores + a.experts, *worth = ranks + a.experts, *is_in = worth + a.groups;
        const T* logits = (const T*)a.logits + token * a.experts;
        float largest = -std::numeric_limits<float>::infinity(), sum = 0;
        for (int64_t e = 0; e < a.experts; e++) largest = std::max(largest, to_float(logits[e]));
        for (int64_t e = 0; e < a.experts; e++) {
            const float x = to_float(logits[e]);
            scores[e] = a.is_sigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - largest);
            sum += scores[e];
        }
        for (int64_t e = 0; e < a.experts; e++) {
            if (!a.is_sigmoid) scores[e] /= sum;
            ranks[e] = a.correction ? scores[e] + a.correction[e] : scores[e];
        }
        if (a.top_groups < a.groups) {
            const int64_t size = a.experts / a.groups;
            for (int64_t g = 0; g < a.groups; g++) {
                float first = ranks[g * size], second = -std::numeric_limits<float>::infinity();
                for (int64_t e = g * size + 1; e < (g + 1) * size; e++) {
                    second = std::max(second, std::min(first, ranks[e]));
                    first = std::max(first, ranks[e]);
                }
                worth[g] = a.correction ? first + second : first;
                is_in[g] = 0;
            }
            take_largest(worth, a.groups, a.top_groups, [&](int64_t, int64_t g) { is_in[g] = 1; });
            for (int64_t e = 0; e < a.experts; e++)
                if (!is_in[e / size]) ranks[e] = -std::numeric_limits<float>::infinity();
        }
        int64_t* ids = a.ids + token * a.top_k;
        float *weights = a.weights + token * a.top_k, total = a.is_sigmoid ? 1e-20f : 0.0f;
        take_largest(ranks, a.experts, a.top_k, [&](int64_t k, int64_t best) {
            ids[k] = best;
            total += weights[k] = scores[best];
        });
        for (int64_t k = 0; k < a.top_k; k++) weights[k] *= a.normalises ? a.scale / total : a.scale;
    });
}

template <class T>
void take_rows(const void* args, PoolThread& m) {
    const Rows& a = *(const Rows*)args;
    by_rows(m, a.count, a.size, [&](int64_t row) {
        const T* from = (const T*)a.table + a.indices[row] * a.size;
        T* to = (T*)a.out + row * a.size;
        if (a.scale == 1.0f) {
            memcpy(to, from, a.size * sizeof(T));
        } else {
            for_each_vector(a.size, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i) * a.scale); });
        }
    });
}

template <class T>
void scale(const void* args, PoolThread& m) {
    const Scale& a = *(const Scale*)args;
    by_rows(m, a.rows, a.size, [&](int64_t row) {
        T* x = (T*)a.x + row * a.x_stride;
        for_each_vector(a.size, [&](int64_t i, auto load, auto store) { store(x + i, load(x + i) * a.factor); });
    });
}

}  // namespace

extern "C" {

void norm_float32(const void* args, fwk::PoolThread& m) { norm<float>(args, m); }
void norm_bfloat16(const void* args, fwk::PoolThread& m) { norm<uint16_t>(args, m); }
void rotate_float32(const void* args, fwk::PoolThread& m) { rotate<float>(args, m); }
void rotate_bfloat16(const void* args, fwk::PoolThread& m) { rotate<uint16_t>(args, m); }
void gate_float32(const void* args, fwk::PoolThread& m) { gate<float>(args, m); }
void gate_bfloat16(const void* args, fwk::PoolThread& m) { gate<uint16_t>(args, m); }
void choose_float32(const void* args, fwk::PoolThread& m) { choose<float>(args, m); }
void choose_bfloat16(const void* args, fwk::PoolThread& m) { choose<uint16_t>(args, m); }
void rows_float32(const void* args, fwk::PoolThread& m) { take_rows<float>(args, m); }
void rows_bfloat16(const void* args, fwk::PoolThread& m) { take_rows<uint16_t>(args, m); }
void scale_float32(const void* args, fwk::PoolThread& m) { scale<float>(args, m); }
void scale_bfloat16(const void* args, fwk::PoolThread& m) { scale<uint16_t>(args, m); }

void place(const void* args, fwk::PoolThread& m) {
    const Place& a = *(const Place*)args;
    by_rows(m, a.rows, a.row_bytes / 2, [&](int64_t row) {
        memcpy(a.out + row * a.out_stride, a.part + row * a.row_bytes, a.row_bytes);
    });
}

}  // extern "C"
