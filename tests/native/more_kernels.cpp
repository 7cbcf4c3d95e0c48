// Attention, linear layers of integers and experts, as kernels.cpp runs the others.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <pthread.h>
#include <signal.h>

#include "fwk/activations.h"
#include "fwk/linear.h"
#include "fwk/thread_memory.h"
#include "fwk/thread_pool.h"
#include "fwk/vectors.h"

#include "attention/fwk_attention/cpu/attention_bfloat16.cpp"
#include "attention/fwk_attention/cpu/attention_bfloat16_quantised.cpp"
#include "attention/fwk_attention/cpu/attention_float32.cpp"
#include "attention/fwk_attention/cpu/attention_float32_quantised.cpp"
namespace packing {
#include "quant/fwk_quant/_linear_cpu/packing.cpp"
}
#include "quant/fwk_quant/_linear_cpu/integers.cpp"
namespace moe {
#include "moe/fwk_moe/cpu/experts.cpp"
}
#include "thread_pool.cpp"

#include "harness.h"

namespace {

constexpr double ROUNDED_X = 2e-2;  // of products with activations of 8 bits; of one that is rounded otherwise, 5e-3

char* aligned(std::vector<char>& memory, size_t bytes) {
    memory.assign(bytes + 64, 0);
    return memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
}

template <class T>
std::vector<T> as(const std::vector<float>& from) {
    if constexpr (sizeof(T) == 2) return bfloat16s(from);
    else return from;
}

// Two sequences: one of 41 keys of which the newest is asked for, one of 23 of which five are. All but these are there
// from a step before, which is computed, too.
template <class T>
void attention_of(const char* name, fwk::Operator op, int64_t number_bytes, bool is_quantised, bool is_tiled, int64_t window,
                  double tolerance) {
    const int64_t heads = 4, kv_heads = 2, size = 32, block = 16, width = 4, blocks = 8;
    const int64_t lengths[] = {41, 23}, newest[] = {1, 5};
    const int32_t table[] = {5, 2, 7, 0, 1, 6, 3, 4};  // [sequences, width]
    const int64_t half = block * size * number_bytes + (is_quantised ? block * 4 : 0);
    std::vector<char> memory;
    const Layer layer{heads, kv_heads, size, block, window, is_tiled, 1 / std::sqrt(float(size)), 0};
    char* cache = aligned(memory, blocks * kv_heads * 2 * half);
    std::vector<std::vector<T>> q, k, v;  // of each sequence, [length, heads * size]
    for (int64_t length : lengths) {
        q.push_back(as<T>(numbers(length * heads * size)));
        k.push_back(as<T>(numbers(length * kv_heads * size)));
        v.push_back(as<T>(numbers(length * kv_heads * size)));
    }
    std::vector<T> out;
    std::vector<float> plain;
    for (bool is_last : {false, true}) {
        std::vector<int32_t> starts{0}, ends;
        std::vector<int64_t> slots;
        std::vector<T> step_q, step_k, step_v;
        for (int s = 0; s < 2; s++) {
            const int64_t from = is_last ? lengths[s] - newest[s] : 0, to = is_last ? lengths[s] : lengths[s] - newest[s];
            for (int64_t t = from; t < to; t++) slots.push_back(table[s * width + t / block] * block + t % block);
            step_q.insert(step_q.end(), &q[s][from * heads * size], &q[s][0] + to * heads * size);
            step_k.insert(step_k.end(), &k[s][from * kv_heads * size], &k[s][0] + to * kv_heads * size);
            step_v.insert(step_v.end(), &v[s][from * kv_heads * size], &v[s][0] + to * kv_heads * size);
            starts.push_back(int32_t(slots.size()));
            ends.push_back(int32_t(to));
        }
        const Question question{starts.data(), ends.data(), table, nullptr, 2, width, block, heads / kv_heads, window, 0,
                                64, 16, 32};
        std::vector<Tokens> members(256);
        std::vector<Task> tasks(256);
        Answer answer;
        plan_attention(&question, members.data(), tasks.data(), &answer);
        std::vector<float> parts(answer.num_parts * kv_heads * answer.part_rows * (size + fwk::W + 1) + 1);
        std::vector<int32_t> finished(answer.num_parts * kv_heads + 1);
        const Plan plan{members.data(), tasks.data(), slots.data(), table, nullptr, nullptr, parts.data(), finished.data(),
                        width, 0, answer.num_tasks, int64_t(slots.size()), answer.part_rows, question.range};
        out.assign(slots.size() * heads * size, T());
        run(op, Attend{step_q.data(), heads * size, step_k.data(), kv_heads * size, step_v.data(), kv_heads * size, cache,
                       out.data(), &layer, &plan});
    }
    print(name, tolerance, out);
    for (int s = 0; s < 2; s++)
        for (int64_t t = lengths[s] - newest[s]; t < lengths[s]; t++)
            for (int64_t h = 0; h < heads; h++) {
                std::vector<double> weights, sums(size);
                double total = 0;
                const int64_t first = window ? std::max<int64_t>(0, t - window + 1) : 0;
                for (int64_t key = first; key <= t; key++) {
                    double score = 0;
                    for (int64_t i = 0; i < size; i++)
                        score += double(wide(q[s][(t * heads + h) * size + i])) *
                                 wide(k[s][(key * kv_heads + h / 2) * size + i]);
                    total += std::exp(score * layer.scale);
                    for (int64_t i = 0; i < size; i++)
                        sums[i] += std::exp(score * layer.scale) * wide(v[s][(key * kv_heads + h / 2) * size + i]);
                }
                for (double sum : sums) plain.push_back(float(sum / total));
            }
    print((std::string("reference ") + name).c_str(), tolerance, plain);
}

// A matrix of integers in groups of 32 with a float32 scale each, and the numbers it stands for.
struct Packed {
    Matrix matrix{};
    std::vector<uint32_t> words;
    std::vector<float> scales, plain;

    Packed(const std::vector<float>& weight, int64_t out, int64_t in, int64_t bits) : plain(out * in) {
        const int64_t group = 32, groups = in / group, middle = 1 << (bits - 1), num_words = in * bits / 32;
        std::vector<int8_t> rounded(out * in);
        std::vector<float> by_row(out * groups);
        run(packing::quantise,
            packing::Quantise{weight.data(), rounded.data(), by_row.data(), nullptr, out, groups, group, bits, middle, 0});
        std::vector<uint32_t> rows(out * num_words);
        for (int64_t r = 0; r < out; r++)
            for (int64_t i = 0; i < in; i++) {
                const uint32_t number = uint8_t(rounded[r * in + i]);
                plain[r * in + i] = float(int(number) - int(middle)) * by_row[r * groups + i / group];
                const int64_t four = i / 4;  // neighbours in a word's bytes; of 4 bits, two such fours
                uint32_t& word = rows[r * num_words + (bits == 8 ? four : four / 2)];
                word |= number << (i % 4 * 8 + (bits == 8 ? 0 : four % 2 * 4));
            }
        const int64_t panels = (out + 31) / 32;
        words.resize(panels * num_words * 32);
        scales.resize(panels * groups * 32);
        run(packing::pack, packing::Pack{(const char*)rows.data(), (char*)words.data(), out, num_words, 4});
        run(packing::pack, packing::Pack{(const char*)by_row.data(), (char*)scales.data(), out, groups, 4});
        matrix.words = words.data(), matrix.scales = scales.data();
        matrix.out_features = out, matrix.in_features = in, matrix.num_words = num_words;
        matrix.format = bits == 8 ? INT8 : INT4;
        matrix.group = group, matrix.scale_every = 1, matrix.nest = 1;
        matrix.scale_kind = SINGLE, matrix.zero_kind = CONSTANT, matrix.zero = middle;
    }
};

template <class T>
void integers_of(const char* name, int64_t bits, int64_t rows, double tolerance) {
    const int64_t in = 96, out = 70;
    const Packed packed(numbers(out * in), out, in, bits);
    const std::vector<T> x = as<T>(numbers(rows * in));
    std::vector<char> memory;
    char* scratch = aligned(memory, (rows + 15) / 16 * 16 * linear_row_bytes(&packed.matrix));
    std::vector<T> y(rows * out);
    run(linear, Linear{&packed.matrix, x.data(), y.data(), nullptr, scratch, rows, in, out, sizeof(T) == 2});
    print(name, tolerance, y);
    std::vector<float> plain(rows * out);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            double sum = 0;
            for (int64_t i = 0; i < in; i++) sum += double(wide(x[r * in + i])) * packed.plain[o * in + i];
            plain[r * out + o] = float(sum);
        }
    print((std::string("reference ") + name).c_str(), ROUNDED_X, plain);
}

void experts_of(const char* name, int64_t tokens) {
    const int64_t hidden = 64, inner = 96, count = 5, top_k = 2;
    std::vector<Packed> both, down;
    for (int64_t e = 0; e < count; e++) {
        both.emplace_back(numbers(2 * inner * hidden), 2 * inner, hidden, 8);
        down.emplace_back(numbers(hidden * inner), hidden, inner, 8);
    }
    std::vector<moe::Slice> first, second;
    for (int64_t e = 0; e < count; e++) {
        first.push_back({linear, &both[e].matrix, nullptr, 0, linear_row_bytes(&both[e].matrix)});
        second.push_back({linear, &down[e].matrix, nullptr, 0, linear_row_bytes(&down[e].matrix)});
    }
    const std::vector<float> x = numbers(tokens * hidden), weights = numbers(tokens * top_k);
    std::vector<int64_t> ids;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t k = 0; k < top_k; k++) ids.push_back((t * 3 + k * 2) % count);
    std::vector<char> memory;
    const int64_t bytes = moe::expert_bytes(count) + tokens * top_k * moe::pair_bytes_float32(hidden, inner);
    std::vector<float> out(tokens * hidden), plain(tokens * hidden);
    run(moe::experts_float32, moe::Experts{x.data(), out.data(), ids.data(), weights.data(), first.data(), second.data(),
                                           aligned(memory, bytes), tokens, hidden, top_k, count, 1, 1, hidden, inner, 0});
    print(name, 5e-3, out);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t k = 0; k < top_k; k++) {
            const Packed &b = both[ids[t * top_k + k]], &d = down[ids[t * top_k + k]];
            std::vector<double> gate(2 * inner);
            for (int64_t o = 0; o < 2 * inner; o++)
                for (int64_t i = 0; i < hidden; i++) gate[o] += double(x[t * hidden + i]) * b.plain[o * hidden + i];
            for (int64_t o = 0; o < hidden; o++)
                for (int64_t i = 0; i < inner; i++)
                    plain[t * hidden + o] += float(weights[t * top_k + k] * gate[i] / (1 + std::exp(-gate[i])) *
                                                   gate[inner + i] * d.plain[o * inner + i]);
        }
    print((std::string("reference ") + name).c_str(), ROUNDED_X, plain);
}

}  // namespace

int main() {
    for (bool is_tiled : {true, false}) {
        attention_of<float>("attention", attend_float32_auto, 4, false, is_tiled, 0, 1e-5);
        attention_of<float>("attention to a window", attend_float32_auto, 4, false, is_tiled, 9, 1e-5);
        attention_of<float>("attention to int8", attend_float32_int8, 1, true, is_tiled, 0, ROUNDED_X);
        attention_of<float>("attention to fp8", attend_float32_fp8_e4m3, 1, true, is_tiled, 0, 1e-1);
        attention_of<uint16_t>("attention in bfloat16", attend_bfloat16_auto, 2, false, is_tiled, 0, ROUNDED_X);
        attention_of<uint16_t>("bfloat16 attention to int8", attend_bfloat16_int8, 1, true, is_tiled, 0, ROUNDED_X);
    }
    for (int64_t rows : {1, 6, 20}) {
        integers_of<float>("int8", 8, rows, 5e-3);
        integers_of<float>("int4", 4, rows, 5e-3);
        integers_of<uint16_t>("int8 in bfloat16", 8, rows, ROUNDED);
    }
    experts_of("experts of int8", 1);
    experts_of("experts of int8", 7);
    fflush(stdout);
    _exit(0);  // threads of the pool wait
}
