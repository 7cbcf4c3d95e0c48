// The experts of a layer: every token's are computed, and their weighted sum is taken. Matrices are multiplied by the linear
// operators of whatever packed them (fwk/linear.h), a slice of one expert's outputs at a time, each by one thread.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fwk/activations.h"
#include "fwk/linear.h"
#include "fwk/thread_memory.h"
#include "fwk/thread_pool.h"
#include "fwk/vectors.h"

extern "C" {

struct Slice {
    fwk::Operator op;  // null: there is no such slice
    const Matrix* matrix;
    const void* bias;
    int64_t first, row_bytes;
};

struct Experts {
    const void* x;         // [tokens, hidden]
    void* out;             // the same
    const int64_t* ids;    // [tokens, top_k]; those below 0 or from num_experts on are left out
    const float* weights;  // the same
    const Slice *gate_up, *down;  // [num_experts, num_gate_up], [num_experts, num_down]
    char* scratch;                // expert_bytes and pair_bytes
    int64_t tokens, x_stride, top_k, num_experts, num_gate_up, num_down, hidden, inner, activation;
};

}  // extern "C"

namespace {

using namespace fwk;

constexpr int64_t SMALL = 1 << 15;   // numbers that one thread copies sooner than others wake up
constexpr int64_t PART = 1 << 10;    // numbers of a task of the passes between products
constexpr int64_t SIDE = 16;         // rows that linear operators want scratch for
constexpr int64_t LINE = 64;

thread_local ThreadMemory prepared;

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Where things lie in scratch. Pairs of token and expert are sorted by expert, then by token; those of other ranks'
// experts have no place.
template <class T>
struct Layout {
    int64_t pairs, *starts, *active, *num_active, *places;
    T *x, *both, *gated, *y;

    Layout(const Experts& a) : pairs(a.tokens * a.top_k) {
        starts = (int64_t*)a.scratch;       // [num_experts + 1], of each expert's pairs
        active = starts + a.num_experts + 1;  // those that have any
        num_active = active + a.num_experts;
        char* at = a.scratch + expert_bytes(a.num_experts);
        const auto take = [&](int64_t bytes) { char* from = at; at += pairs * lines(bytes); return from; };
        places = (int64_t*)take(8);  // [pairs], of token and k; negative: none
        x = (T*)take(a.hidden * sizeof(T));
        both = (T*)take(2 * a.inner * sizeof(T));
        gated = (T*)take(a.inner * sizeof(T));
        y = (T*)take(a.hidden * sizeof(T));
    }

    static int64_t expert_bytes(int64_t experts) { return lines((2 * experts + 2) * 8); }
    static int64_t pair_bytes(int64_t hidden, int64_t inner) {
        const int64_t size = sizeof(T);
        return lines(8) + 2 * lines(hidden * size) + lines(2 * inner * size) + lines(inner * size);
    }
};

template <class T>
void sort(const Experts& a, const Layout<T>& at) {
    int64_t* starts = at.starts;
    const auto is_own = [&](int64_t pair) { return (uint64_t)a.ids[pair] < (uint64_t)a.num_experts; };
    std::fill(starts, starts + a.num_experts + 1, 0);
    for (int64_t pair = 0; pair < at.pairs; pair++) {
        if (is_own(pair)) starts[a.ids[pair] + 1]++;
    }
    int64_t count = 0;
    for (int64_t e = 0; e < a.num_experts; e++) {
        if (starts[e + 1]) at.active[count++] = e;
        starts[e + 1] += starts[e];
    }
    *at.num_active = count;
    for (int64_t pair = 0; pair < at.pairs; pair++) at.places[pair] = is_own(pair) ? starts[a.ids[pair]]++ : -1;
    std::copy_backward(starts, starts + a.num_experts, starts + a.num_experts + 1);
    starts[0] = 0;
}

// y = the slices' outputs of x, for the rows of each active expert.
template <class T>
void multiply(const Experts& a, const Layout<T>& at, PoolThread& m, const Slice* slices, int64_t count, const T* x,
              int64_t in_features, T* y, int64_t out_features) {
    m.parallel_for_ordered(*at.num_active * count, [&](int64_t i, int64_t) {
        const int64_t expert = at.active[i / count], first = at.starts[expert], rows = at.starts[expert + 1] - first;
        const Slice& slice = slices[expert * count + i % count];
        if (!slice.op) return;
        Linear call{};
        call.matrix = slice.matrix;
        call.x = x + first * in_features;
        call.y = y + first * out_features + slice.first;
        call.bias = slice.bias;
        call.scratch = prepared.take((rows + SIDE - 1) / SIDE * SIDE * slice.row_bytes);
        call.rows = rows, call.x_stride = in_features, call.y_stride = out_features;
        call.is_bfloat16 = sizeof(T) == 2;
        PoolThread alone{0, 1, nullptr, 0};
        slice.op(&call, alone);
    });
}

template <class T>
void run(const void* args, PoolThread& m) {
    const Experts& a = *(const Experts*)args;
    if (!a.tokens) return;
    const Layout<T> at(a);
    const auto gather = [&](int64_t pair) {
        if (at.places[pair] < 0) return;
        memcpy(at.x + at.places[pair] * a.hidden, (const T*)a.x + pair / a.top_k * a.x_stride, a.hidden * sizeof(T));
    };
    const bool is_small = at.pairs * a.hidden <= SMALL;
    m.parallel_for(1, [&](int64_t) {
        sort(a, at);
        for (int64_t pair = 0; is_small && pair < at.pairs; pair++) gather(pair);
    });
    if (!is_small) m.parallel_for_ordered(at.pairs, [&](int64_t pair, int64_t) { gather(pair); });
    multiply(a, at, m, a.gate_up, a.num_gate_up, at.x, a.hidden, at.both, 2 * a.inner);
    const int64_t parts = (a.inner + PART - 1) / PART;
    m.parallel_for_ordered(at.starts[a.num_experts] * parts, [&](int64_t i, int64_t) {
        const int64_t row = i / parts, first = i % parts * PART;
        const T *gate = at.both + row * 2 * a.inner + first, *up = gate + a.inner;
        T* to = at.gated + row * a.inner + first;
        for_each_vector(std::min(PART, a.inner - first), [&](int64_t n, auto load, auto store) {
            store(to + n, gated<T>(load(gate + n), load(up + n), a.activation));
        });
    });
    multiply(a, at, m, a.down, a.num_down, at.gated, a.inner, at.y, a.hidden);
    const int64_t sums = (a.hidden + PART - 1) / PART;
    m.parallel_for_ordered(a.tokens * sums, [&](int64_t i, int64_t) {
        const int64_t token = i / sums, first = i % sums * PART, *places = at.places + token * a.top_k;
        const float* weights = a.weights + token * a.top_k;
        T* to = (T*)a.out + token * a.hidden + first;
        for_each_vector(std::min(PART, a.hidden - first), [&](int64_t n, auto load, auto store) {
            vf sum = {};
            for (int64_t k = 0; k < a.top_k; k++) {
                if (places[k] >= 0) sum = fma(splat(weights[k]), load(at.y + places[k] * a.hidden + first + n), sum);
            }
            store(to + n, sum);
        });
    });
}

}  // namespace

extern "C" {

void experts_float32(const void* args, fwk::PoolThread& m) { run<float>(args, m); }
void experts_bfloat16(const void* args, fwk::PoolThread& m) { run<uint16_t>(args, m); }

int64_t expert_bytes(int64_t experts) { return Layout<float>::expert_bytes(experts); }
int64_t pair_bytes_float32(int64_t hidden, int64_t inner) { return Layout<float>::pair_bytes(hidden, inner); }
int64_t pair_bytes_bfloat16(int64_t hidden, int64_t inner) { return Layout<uint16_t>::pair_bytes(hidden, inner); }

}  // extern "C"
