// What programs that run kernels share: made-up numbers, a pool of threads, and lines of what was computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "fwk/thread_pool.h"

namespace {

void* pool = pool_new();
uint64_t state = 1;

uint64_t random_bits() {
    state = state * 6364136223846793005 + 1442695040888963407;
    return state >> 33;
}

std::vector<float> numbers(size_t count) {
    std::vector<float> found(count);
    for (float& x : found) x = float(int64_t(random_bits() % 4001) - 2000) / 1000;
    return found;
}

uint16_t bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float wide(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
float wide(float x) { return x; }

std::vector<uint16_t> bfloat16s(const std::vector<float>& from) {
    std::vector<uint16_t> found(from.size());
    std::transform(from.begin(), from.end(), found.begin(), bfloat16);
    return found;
}

template <class T>
void print(const char* name, double tolerance, const std::vector<T>& found) {
    printf("%s %g", name, tolerance);
    for (const T& x : found) printf(" %.9g", double(x));
    printf("\n");
}

void print(const char* name, double tolerance, const std::vector<uint16_t>& found) {
    std::vector<float> numbers(found.size());
    std::transform(found.begin(), found.end(), numbers.begin(), [](uint16_t x) { return wide(x); });
    print(name, tolerance, numbers);
}

template <class Args>
void run(fwk::Operator op, const Args& args) {
    pool_run_one(pool, op, &args, 2);
}

constexpr double EXACT = 0, CLOSE = 2e-6, ROUNDED = 1e-2;  // the last: one step of bfloat16

}  // namespace
