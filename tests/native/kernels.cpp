// Runs kernels on made-up numbers and prints what they compute, a line each: name, tolerance, numbers. Built for two
// machines, it lets one be compared with the other; what starts with "reference" is computed here, plainly, in double.

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
#include <vector>

#include <pthread.h>
#include <signal.h>

#include "fwk/activations.h"
#include "fwk/linear.h"
#include "fwk/thread_memory.h"
#include "fwk/thread_pool.h"
#include "fwk/vectors.h"

namespace operators {
#include "operators/fwk_operators/cpu/operators.cpp"
}
namespace sampler {
#include "sampling/fwk_sampling/cpu_sampler/sampler.cpp"
}
namespace blocks {
#include "loaders/fwk_loaders/gguf/blocks.cpp"
}
namespace packing {
#include "quant/fwk_quant/_linear_cpu/packing.cpp"
}
namespace checksums {
#include "features/fwk_features/weights_cache/checksum.cpp"
}
#include "quant/fwk_quant/_linear_cpu/floats.cpp"
#include "thread_pool.cpp"

#include "harness.h"

namespace {

void operators_of(const std::vector<float>& x, const std::vector<float>& weight, int64_t rows, int64_t size) {
    using namespace operators;
    std::vector<float> out(rows * size), plain(rows * size);
    run(norm_float32, Norm{x.data(), nullptr, out.data(), weight.data(), rows, 1, size, size, 1, 1e-5f, 0});
    print("norm", CLOSE, out);
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t i = 0; i < size; i++) sum += double(x[r * size + i]) * x[r * size + i];
        for (int64_t i = 0; i < size; i++)
            plain[r * size + i] = float(x[r * size + i] / std::sqrt(sum / double(size) + 1e-5) * weight[i]);
    }
    print("reference norm", CLOSE, plain);
    std::vector<uint16_t> short_x = bfloat16s(x), short_weight = bfloat16s(weight), short_out(rows * size);
    run(norm_bfloat16, Norm{short_x.data(), nullptr, short_out.data(), short_weight.data(), rows, 1, size, size, 1, 1e-5f, 0});
    print("norm_bfloat16", ROUNDED, short_out);

    const int64_t half = size / 2;
    std::vector<float> gated(rows * half);
    for (int64_t activation : {0, 1, 2}) {
        run(gate_float32, Gate{x.data(), gated.data(), rows, half, size, activation});
        print("gate", 1e-5, gated);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < half; i++) {
            const double v = x[r * size + i];
            gated[r * half + i] = float(v * 0.5 * (1 + std::erf(v / std::sqrt(2.0))) * x[r * size + half + i]);
        }
    print("reference gate", 1e-5, gated);

    std::vector<float> turned = x, angles = numbers(size), cos(rows * size), sin(rows * size);
    for (int64_t i = 0; i < rows * size; i++) cos[i] = std::cos(angles[i % size]), sin[i] = std::sin(angles[i % size]);
    run(rotate_float32, Rotate{turned.data(), cos.data(), sin.data(), rows, 1, size, size, half * 2});
    print("rotate", CLOSE, turned);

    const int64_t experts = 16, top_k = 4, tokens = rows * size / experts;
    std::vector<int64_t> ids(tokens * top_k);
    std::vector<float> weights(tokens * top_k);
    run(choose_float32, Choose{x.data(), nullptr, ids.data(), weights.data(), tokens, experts, top_k, 4, 2, 0, 1, 1.0f});
    print("experts", EXACT, ids);
    print("experts' weights", 1e-5, weights);
}

void samples_of(const std::vector<float>& logits, int64_t rows, int64_t size) {
    using namespace sampler;
    std::vector<int64_t> tokens(rows);
    run(sample_float32, Sample{logits.data(), size, size, rows, nullptr, tokens.data()});
    print("greedy", EXACT, tokens);
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = std::max_element(&logits[r * size], &logits[r * size] + size) - &logits[r * size];
    print("reference greedy", EXACT, tokens);
    std::vector<Settings> settings(rows);
    for (int64_t r = 0; r < rows; r++) settings[r] = {(double(r) + 0.37) / double(rows + 1), 0.7f, 0.9f, std::log(0.01f), 40};
    run(sample_float32, Sample{logits.data(), size, size, rows, settings.data(), tokens.data()});
    print("sampled", EXACT, tokens);
}

void blocks_of() {
    const int types[] = {2, 3, 6, 7, 8, 12, 13, 14}, bytes[] = {18, 20, 22, 24, 34, 144, 176, 210};
    for (int t = 0; t < 8; t++) {
        const int64_t count = 130, values = types[t] < 12 ? 32 : 256;
        std::vector<uint8_t> packed(count * bytes[t]);
        for (uint8_t& byte : packed) byte = uint8_t(random_bits());
        for (int64_t i = 0; i < count; i++)  // factors that are numbers of usual size
            for (int at : {0, 2, bytes[t] - 2}) packed[i * bytes[t] + at + 1] = uint8_t(0x20 | (packed[i * bytes[t] + at + 1] & 3));
        std::vector<float> out(count * values);
        int32_t damaged = 0;
        run(blocks::dequantise, blocks::Call{packed.data(), out.data(), count, types[t], 0, &damaged});
        out.push_back(float(damaged));
        print("dequantise", EXACT, out);
    }
}

template <class T>
void linear_of(const char* name, const std::vector<T>& x, const std::vector<T>& weight, int64_t rows, int64_t in, int64_t out,
               double tolerance) {
    const int64_t entries = in * int64_t(sizeof(T)) / 4, num_words = (entries + 15) / 16 * 16, panels = (out + 31) / 32;
    std::vector<uint32_t> padded(out * num_words), words(panels * num_words * 32);
    for (int64_t r = 0; r < out; r++) memcpy(&padded[r * num_words], &weight[r * in], in * sizeof(T));
    run(packing::pack, packing::Pack{(const char*)padded.data(), (char*)words.data(), out, num_words, 4});
    Matrix matrix{};
    matrix.words = words.data();
    matrix.out_features = out, matrix.in_features = in, matrix.num_words = num_words;
    matrix.format = sizeof(T) == 4 ? FLOAT32 : BFLOAT16;
    matrix.group = in;
    std::vector<char> scratch((rows + 16) / 16 * 16 * linear_row_bytes(&matrix) + 64);
    char* aligned = scratch.data() + (64 - (uintptr_t)scratch.data() % 64) % 64;
    std::vector<T> y(rows * out);
    run(linear, Linear{&matrix, x.data(), y.data(), nullptr, aligned, rows, in, out, sizeof(T) == 2});
    print(name, tolerance, y);
    std::vector<float> plain(rows * out);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            double sum = 0;
            for (int64_t i = 0; i < in; i++) sum += double(wide(x[r * in + i])) * wide(weight[o * in + i]);
            plain[r * out + o] = float(sum);
        }
    print((std::string("reference ") + name).c_str(), tolerance, plain);
}

}  // namespace

int main() {
    const int64_t rows = 6, size = 96;
    const std::vector<float> x = numbers(rows * size), weight = numbers(size);
    operators_of(x, weight, rows, size);
    samples_of(numbers(8 * 1000), 8, 1000);
    blocks_of();
    const std::vector<float> matrix = numbers(70 * size);
    for (int64_t count : {1, 6}) {
        linear_of("linear", x, matrix, count, size, 70, 1e-5);
        linear_of("linear_bfloat16", bfloat16s(x), bfloat16s(matrix), count, size, 70, ROUNDED);
    }
    std::vector<int8_t> quantised(matrix.size());
    std::vector<float> scales(70 * 3);
    run(packing::quantise, packing::Quantise{matrix.data(), quantised.data(), scales.data(), nullptr, 70, 3, 32, 8, 0, 0});
    print("quantise", EXACT, quantised);
    print("quantise's scales", CLOSE, scales);
    std::vector<uint64_t> lines(4096), sums(4);
    for (uint64_t& word : lines) word = random_bits();
    run(checksums::checksum, checksums::Checksum{lines.data(), sums.data(), 4096, 1024});
    for (uint64_t& sum : sums) sum >>= 36;  // as many bits as are printed
    print("checksum", EXACT, sums);
    fflush(stdout);
    _exit(0);  // threads of the pool wait
}
