// Recurrent layers: short convolutions, state spaces and the gated delta rule, token by token with the state in registers or
// in the L1 cache. A token's result depends on the tokens before it alone, not on how a prompt is cut. T: float, or uint16_t
// for bfloat16, of activations; S: the same, of states. Sums are float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fwk/thread_pool.h"
#include "fwk/vectors.h"

extern "C" {

struct Sequences {
    const int64_t* rows;    // [count]: of the states
    const int32_t* starts;  // [count + 1]: first token of each
    int64_t count;
};

// Strides are in numbers, from token to token; those of states from row to row.
struct Conv {
    Sequences sequences;
    const void *x, *before, *after;  // before, after: multiply x and what comes out; or null
    void *out, *state;               // [tokens, channels]; [rows, width - 1, channels]
    const void *kernel, *bias;       // [width, channels]; [channels] or null
    int64_t channels, width, x_stride, before_stride, after_stride, state_stride, has_silu;
};

struct StateSpace {
    Sequences sequences;
    const void *x, *b, *c, *step;  // [tokens, heads * size], [tokens, groups * states] twice, [tokens, heads]
    float* out;                    // [tokens, heads * size]
    void* state;                   // [rows, heads, size, states]
    const float *rate, *step_bias, *skip;  // [heads]
    int64_t heads, size, states, groups, x_stride, step_stride, state_stride, is_state_short;
    float low, high;  // of a time step
};

struct Selective {
    Sequences sequences;
    const void *x, *step, *b, *c, *z;  // [tokens, channels] or [tokens, states]
    void *out, *state;                 // [tokens, channels]; [rows, channels, states]
    const float *rate, *skip;          // [channels, states]; [channels]
    int64_t channels, states, x_stride, step_stride, b_stride, c_stride, z_stride, state_stride, is_state_short;
};

struct Delta {
    Sequences sequences;
    const void *mixed, *a, *b;      // [tokens, keys of all heads | keys | values]; [tokens, heads of values]
    float* out;                     // [tokens, heads of values, value_size]
    void* state;                    // [rows, heads of values, key_size, value_size]
    const float *rate, *step_bias;  // [heads of values]
    int64_t heads, ratio, key_size, value_size;  // heads: of keys, each serves `ratio` of values
    int64_t mixed_stride, a_stride, b_stride, state_stride, is_state_short;
};

struct GatedNorm {
    const float* x;  // [tokens, groups * size]
    const void* z;   // [tokens, groups * size], T
    void* out;
    const void* weight;  // gates_last: [size] of T, otherwise [groups * size] of float
    int64_t tokens, groups, size, z_stride, gates_last;
    float eps;
};

struct Columns {  // out[row, i] = x[row, index[i]], units of so many bytes
    const char* x;
    char* out;
    const int64_t* index;
    int64_t rows, count, x_stride, unit;  // x_stride: bytes
};

struct SigmoidGate {  // out = x * sigmoid(gate)
    const void *x, *gate;
    void* out;
    int64_t rows, heads, size, x_stride, gate_stride, head_stride;  // of gate from token to token, from head to head
};

struct AddGated {  // to += sigmoid(gate) * x
    const void *x, *gate;  // [rows, size], [rows]
    void* to;
    int64_t rows, size;
};

}  // extern "C"

namespace {

using namespace fwk;

constexpr int64_t CHUNK = 64;      // tokens that are computed together
constexpr int64_t CHANNELS = 256;  // of a task
constexpr int MAX_WIDTH = 8;       // of a convolution
constexpr int COLUMNS = 4;         // vectors of a state's row in registers

inline vf silu(vf x) { return x * sigmoid(x); }

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// max(x, 0) + log(1 + e^-|x|), the logarithm as 2 atanh(y / (2 + y)): relative error 1e-7.
inline vf softplus(vf x) {
    const vi is_negative = x < vf{};
    const vf y = vexp(is_negative ? x : -x), s = y / (y + 2.0f), q = s * s;
    vf p = q * (1 / 13.0f) + 1 / 11.0f;
    for (float odd : {9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = p * q + 1 / odd;
    return (is_negative ? vf{} : x) + 2.0f * s * p;
}

// f(first token, end, state's row) of sequence i.
template <class F>
inline void tokens_of(const Sequences& s, int64_t i, F f) {
    f(int64_t(s.starts[i]), int64_t(s.starts[i + 1]), s.rows[i]);
}

template <class T>
inline void to_floats(const T* from, int64_t size, float* to) {
    for_each_vector(size, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i)); });
}

// A state as float32: where it is, or a copy that `finish` rounds back.
struct Floats {
    float* data;
    void* from;
    int64_t size;
    bool is_short;

    Floats(void* state, int64_t offset, int64_t count, bool is_bfloat16, std::vector<float>& memory)
        : data((float*)state + offset), from((uint16_t*)state + offset), size(count), is_short(is_bfloat16) {
        if (!is_short) return;
        memory.resize(size);
        data = memory.data();
        to_floats((const uint16_t*)from, size, data);
    }
    void finish() const {
        if (!is_short) return;
        for_each_vector(size, [&](int64_t i, auto load, auto store) { store((uint16_t*)from + i, load(data + i)); });
    }
};

template <class T>
void conv(const void* args, PoolThread& m) {
    const Conv& a = *(const Conv*)args;
    const int64_t parts = (a.channels + CHANNELS - 1) / CHANNELS, past_size = a.width - 1;
    const T *kernel = (const T*)a.kernel, *bias = (const T*)a.bias;
    m.parallel_for_ordered(a.sequences.count * parts, [&](int64_t task, int64_t) {
        const int64_t begin = task % parts * CHANNELS;
        tokens_of(a.sequences, task / parts, [&](int64_t first, int64_t end, int64_t row) {
            T* state = (T*)a.state + row * a.state_stride;
            for_each_vector(std::min(CHANNELS, a.channels - begin), [&](int64_t i, auto load, auto store) {
                const int64_t at = begin + i;
                vf past[MAX_WIDTH], taps[MAX_WIDTH];
                for (int64_t k = 0; k < past_size; k++) past[k] = load(state + k * a.channels + at);
                for (int64_t k = 0; k < a.width; k++) taps[k] = load(kernel + k * a.channels + at);
                const vf start = bias ? load(bias + at) : vf{};
                for (int64_t t = first; t < end; t++) {
                    vf x = load((const T*)a.x + t * a.x_stride + at);
                    if (a.before) x = rounded<T>(x * load((const T*)a.before + t * a.before_stride + at));
                    vf y = fma(x, taps[past_size], start);
                    for (int64_t k = 0; k < past_size; k++) {
                        y = fma(past[k], taps[k], y);
                        past[k] = k + 1 < past_size ? past[k + 1] : x;
                    }
                    if (a.has_silu) y = silu(y);
                    if (a.after) y = rounded<T>(y) * load((const T*)a.after + t * a.after_stride + at);
                    store((T*)a.out + t * a.channels + at, y);
                }
                for (int64_t k = 0; k < past_size; k++) store(state + k * a.channels + at, past[k]);
            });
        });
    });
}

// h = decay h + x b; sums += h c, for every token of a chunk and `N` vectors of a state's row.
template <int N, class Decay, class Load, class Store>
inline void advance(float* h, const float* b, const float* c, int64_t stride, const float* x, int64_t count, vf* sums,
                    Decay decay, Load load, Store store) {
    vf held[N];
    UNROLL for (int j = 0; j < N; j++) held[j] = load(h + j * W);
    for (int64_t t = 0; t < count; t++, b += stride, c += stride) {
        const vf in = splat(x[t]);
        vf sum = sums[t];
        UNROLL for (int j = 0; j < N; j++) {
            held[j] = fma(in, load(b + j * W), held[j] * decay(t, j));
            sum = fma(held[j], load(c + j * W), sum);
        }
        sums[t] = sum;
    }
    UNROLL for (int j = 0; j < N; j++) store(h + j * W, held[j]);
}

template <class T>
void state_space(const void* args, PoolThread& m) {
    const StateSpace& a = *(const StateSpace*)args;
    const int64_t states = a.states, size = a.size;
    m.parallel_for_ordered(a.sequences.count * a.heads, [&](int64_t task, int64_t) {
        const int64_t head = task % a.heads, group = head / (a.heads / a.groups);
        thread_local std::vector<float> memory, copy;
        memory.resize(2 * CHUNK * states);
        float *b = memory.data(), *c = b + CHUNK * states, steps[CHUNK], decays[CHUNK], in[CHUNK];
        tokens_of(a.sequences, task / a.heads, [&](int64_t first, int64_t end, int64_t row) {
            const int64_t offset = row * a.state_stride + head * size * states;
            const Floats state(a.state, offset, size * states, a.is_state_short, copy);
            for (; first < end; first += CHUNK) {
                const int64_t count = std::min(CHUNK, end - first);
                const T* x = (const T*)a.x + first * a.x_stride + head * size;
                for (int64_t t = 0; t < count; t++) {
                    const int64_t at = (first + t) * a.x_stride + group * states;
                    to_floats((const T*)a.b + at, states, b + t * states);
                    to_floats((const T*)a.c + at, states, c + t * states);
                    const float raw = to_float(((const T*)a.step)[(first + t) * a.step_stride + head]);
                    steps[t] = std::clamp(softplus(raw + a.step_bias[head]), a.low, a.high);
                    decays[t] = std::exp(steps[t] * a.rate[head]);
                }
                for (int64_t p = 0; p < size; p++) {
                    vf sums[CHUNK];
                    for (int64_t t = 0; t < count; t++) {
                        sums[t] = vf{};
                        in[t] = to_float(x[t * a.x_stride + p]) * steps[t];
                    }
                    float* h = state.data + p * states;
                    const auto decay = [&](int64_t t, int) { return splat(decays[t]); };
                    int64_t n = 0;
                    for (; n + COLUMNS * W <= states; n += COLUMNS * W)
                        advance<COLUMNS>(h + n, b + n, c + n, states, in, count, sums, decay,
                                         [](const float* from) { return fwk::load(from); },
                                         [](float* to, vf y) { fwk::store(to, y); });
                    for_each_vector(states - n, [&](int64_t i, auto load, auto store) {
                        advance<1>(h + n + i, b + n + i, c + n + i, states, in, count, sums, decay, load, store);
                    });
                    float* out = a.out + first * a.heads * size + head * size + p;
                    for (int64_t t = 0; t < count; t++, out += a.heads * size)
                        *out = reduce_add(sums[t]) + a.skip[head] * to_float(x[t * a.x_stride + p]);
                }
            }
            state.finish();
        });
    });
}

template <class T>
void selective(const void* args, PoolThread& m) {
    const Selective& a = *(const Selective*)args;
    const int64_t parts = (a.channels + CHANNELS - 1) / CHANNELS, states = a.states;
    m.parallel_for_ordered(a.sequences.count * parts, [&](int64_t task, int64_t) {
        const int64_t begin = task % parts * CHANNELS, width = std::min(CHANNELS, a.channels - begin);
        thread_local std::vector<float> memory, copy;
        memory.resize(2 * CHUNK * states + 3 * CHUNK * width);
        float *b = memory.data(), *c = b + CHUNK * states;
        float *steps = c + CHUNK * states, *xs = steps + CHUNK * width, *ys = xs + CHUNK * width;
        tokens_of(a.sequences, task / parts, [&](int64_t first, int64_t end, int64_t row) {
            const int64_t offset = row * a.state_stride + begin * states;
            const Floats state(a.state, offset, width * states, a.is_state_short, copy);
            for (; first < end; first += CHUNK) {
                const int64_t count = std::min(CHUNK, end - first);
                for (int64_t t = 0; t < count; t++) {
                    const int64_t token = first + t;
                    to_floats((const T*)a.b + token * a.b_stride, states, b + t * states);
                    to_floats((const T*)a.c + token * a.c_stride, states, c + t * states);
                    to_floats((const T*)a.x + token * a.x_stride + begin, width, xs + t * width);
                    const T* raw = (const T*)a.step + token * a.step_stride + begin;
                    for_each_vector(width, [&](int64_t i, auto load, auto store) {
                        store(steps + t * width + i, softplus(load(raw + i)));
                    });
                }
                for (int64_t channel = 0; channel < width; channel++) {
                    vf sums[CHUNK];
                    float in[CHUNK];
                    for (int64_t t = 0; t < count; t++) {
                        sums[t] = vf{};
                        in[t] = xs[t * width + channel] * steps[t * width + channel];
                    }
                    float* h = state.data + channel * states;
                    const float* rate = a.rate + (begin + channel) * states;
                    for_each_vector(states, [&](int64_t i, auto load, auto store) {
                        const vf rates = load(rate + i);
                        const auto decay = [&](int64_t t, int) { return vexp(rates * steps[t * width + channel]); };
                        advance<1>(h + i, b + i, c + i, states, in, count, sums, decay, load, store);
                    });
                    for (int64_t t = 0; t < count; t++)
                        ys[t * width + channel] = reduce_add(sums[t]) + a.skip[begin + channel] * xs[t * width + channel];
                }
                for (int64_t t = 0; t < count; t++) {
                    const T* z = (const T*)a.z + (first + t) * a.z_stride + begin;
                    T* out = (T*)a.out + (first + t) * a.channels + begin;
                    for_each_vector(width, [&](int64_t i, auto load, auto store) {
                        store(out + i, load(ys + t * width + i) * silu(load(z + i)));
                    });
                }
            }
            state.finish();
        });
    });
}

// to = x / |x| * factor, and zeros up to a whole vector.
template <class T>
inline void unit(const T* x, int64_t size, float factor, float* to) {
    vf squares = {};
    for_each_vector(size, [&](int64_t i, auto load, auto) { squares += load(x + i) * load(x + i); });
    const float scale = factor / std::sqrt(reduce_add(squares) + 1e-6f);
    for_each_vector(size, [&](int64_t i, auto load, auto store) { store(to + i, load(x + i) * scale); });
}

// A token's step of `N` vectors of columns: S = decay S + k (beta (v - decay S^T k))^T; o = S^T q.
template <int N, class T, class Load, class Store>
inline void delta_step(float* state, int64_t stride, const float* q, const float* k, const T* v, int64_t keys, float decay,
                       float beta, float* out, Load load, Store store) {
    vf known[N], sums[N];
    UNROLL for (int j = 0; j < N; j++) known[j] = sums[j] = vf{};
    for (int64_t i = 0; i < keys; i++) {
        const vf key = splat(k[i]);
        UNROLL for (int j = 0; j < N; j++) known[j] = fma(key, load(state + i * stride + j * W), known[j]);
    }
    const vf left = splat(decay);
    UNROLL for (int j = 0; j < N; j++) known[j] = (load(v + j * W) - left * known[j]) * beta;
    for (int64_t i = 0; i < keys; i++) {
        const vf key = splat(k[i]), query = splat(q[i]);
        UNROLL for (int j = 0; j < N; j++) {
            float* at = state + i * stride + j * W;
            const vf next = fma(key, known[j], load(at) * left);
            store(at, next);
            sums[j] = fma(query, next, sums[j]);
        }
    }
    UNROLL for (int j = 0; j < N; j++) store(out + j * W, sums[j]);
}

template <class T>
void delta(const void* args, PoolThread& m) {
    const Delta& a = *(const Delta*)args;
    const int64_t keys = a.key_size, size = a.value_size, heads = a.heads * a.ratio;
    const float factor = 1 / std::sqrt(float(keys));
    m.parallel_for_ordered(a.sequences.count * heads, [&](int64_t task, int64_t) {
        const int64_t head = task % heads, key_head = head / a.ratio;
        thread_local std::vector<float> memory, copy;
        memory.resize(2 * CHUNK * keys);
        float *q = memory.data(), *k = q + CHUNK * keys, decays[CHUNK], betas[CHUNK];
        tokens_of(a.sequences, task / heads, [&](int64_t first, int64_t end, int64_t row) {
            const int64_t offset = row * a.state_stride + head * keys * size;
            const Floats state(a.state, offset, keys * size, a.is_state_short, copy);
            for (; first < end; first += CHUNK) {
                const int64_t count = std::min(CHUNK, end - first);
                const T* mixed = (const T*)a.mixed + first * a.mixed_stride;
                for (int64_t t = 0; t < count; t++) {
                    const T* x = mixed + t * a.mixed_stride + key_head * keys;
                    unit(x, keys, factor, q + t * keys);
                    unit(x + a.heads * keys, keys, 1.0f, k + t * keys);
                    const float raw = to_float(((const T*)a.a)[(first + t) * a.a_stride + head]);
                    decays[t] = std::exp(a.rate[head] * softplus(raw + a.step_bias[head]));
                    betas[t] = 1 / (1 + std::exp(-to_float(((const T*)a.b)[(first + t) * a.b_stride + head])));
                }
                const T* v = mixed + 2 * a.heads * keys + head * size;
                float* out = a.out + (first * heads + head) * size;
                const auto step = [&](auto width, int64_t n, auto load, auto store) {
                    for (int64_t t = 0; t < count; t++)
                        delta_step<width.value>(state.data + n, size, q + t * keys, k + t * keys,
                                                v + t * a.mixed_stride + n, keys, decays[t], betas[t],
                                                out + t * heads * size + n, load, store);
                };
                int64_t n = 0;
                for (; n + COLUMNS * W <= size; n += COLUMNS * W)
                    step(std::integral_constant<int, COLUMNS>(), n, [](const auto* from) { return fwk::load(from); },
                         [](float* to, vf y) { fwk::store(to, y); });
                for_each_vector(size - n, [&](int64_t i, auto load, auto store) {
                    step(std::integral_constant<int, 1>(), n + i, load, store);
                });
            }
            state.finish();
        });
    });
}

template <class T>
void gated_norm(const void* args, PoolThread& m) {
    const GatedNorm& a = *(const GatedNorm*)args;
    m.parallel_for_ordered(a.tokens * a.groups, [&](int64_t task, int64_t) {
        const int64_t token = task / a.groups, first = task % a.groups * a.size;
        const float* x = a.x + token * a.groups * a.size + first;
        const T* z = (const T*)a.z + token * a.z_stride + first;
        T* out = (T*)a.out + token * a.groups * a.size + first;
        vf squares = {};
        for_each_vector(a.size, [&](int64_t i, auto load, auto) {
            const vf y = a.gates_last ? load(x + i) : load(x + i) * silu(load(z + i));
            squares += y * y;
        });
        const float scale = 1 / std::sqrt(reduce_add(squares) / float(a.size) + a.eps);
        for_each_vector(a.size, [&](int64_t i, auto load, auto store) {
            const vf gate = silu(load(z + i));
            if (a.gates_last)
                store(out + i, rounded<T>(rounded<T>(load(x + i) * scale) * load((const T*)a.weight + i)) * gate);
            else
                store(out + i, load(x + i) * gate * scale * load((const float*)a.weight + first + i));
        });
    });
}

template <class T>
void sigmoid_gate(const void* args, PoolThread& m) {
    const SigmoidGate& a = *(const SigmoidGate*)args;
    m.parallel_for_ordered(a.rows * a.heads, [&](int64_t task, int64_t) {
        const int64_t row = task / a.heads, head = task % a.heads;
        const T* x = (const T*)a.x + row * a.x_stride + head * a.size;
        const T* gate = (const T*)a.gate + row * a.gate_stride + head * a.head_stride;
        T* out = (T*)a.out + task * a.size;
        for_each_vector(a.size, [&](int64_t i, auto load, auto store) {
            store(out + i, load(x + i) * rounded<T>(sigmoid(load(gate + i))));
        });
    });
}

template <class T>
void add_gated(const void* args, PoolThread& m) {
    const AddGated& a = *(const AddGated*)args;
    m.parallel_for_ordered(a.rows, [&](int64_t row, int64_t) {
        const vf factor = rounded<T>(sigmoid(splat(to_float(((const T*)a.gate)[row]))));
        const T* x = (const T*)a.x + row * a.size;
        T* to = (T*)a.to + row * a.size;
        for_each_vector(a.size, [&](int64_t i, auto load, auto store) {
            store(to + i, load(to + i) + rounded<T>(factor * load(x + i)));
        });
    });
}

}  // namespace

extern "C" {

#define OPERATOR(name)                                                                  \
    void name##_float32(const void* args, fwk::PoolThread& m) { name<float>(args, m); } \
    void name##_bfloat16(const void* args, fwk::PoolThread& m) { name<uint16_t>(args, m); }

OPERATOR(conv)
OPERATOR(state_space)
OPERATOR(selective)
OPERATOR(delta)
OPERATOR(gated_norm)
OPERATOR(sigmoid_gate)
OPERATOR(add_gated)

void columns(const void* args, fwk::PoolThread& m) {
    const Columns& a = *(const Columns*)args;
    m.parallel_for_ordered(a.rows, [&](int64_t row, int64_t) {
        const char* x = a.x + row * a.x_stride;
        char* out = a.out + row * a.count * a.unit;
        for (int64_t i = 0; i < a.count; i++, out += a.unit) memcpy(out, x + a.index[i] * a.unit, a.unit);
    });
}

}  // extern "C"
