// ggml's blocks to float32 or bfloat16; quants.py describes their bytes.
//
// No product here is rounded, as its factors have few bits, so that contracting a product and a sum changes nothing.

#include <cmath>
#include <cstring>

#include "fwk/thread_pool.h"

namespace {

struct Call {
    const uint8_t* blocks;
    void* values;
    int64_t num_blocks;
    int64_t type;         // its number in the file
    int64_t is_bfloat16;  // values; otherwise they are float32
    int32_t* damaged;     // set where a factor is no finite number
};

constexpr int64_t BLOCKS = 64;  // of a task

struct Factors {
    bool is_damaged = false;

    // A float16.
    float at(const uint8_t* bytes) {
        uint16_t half;
        memcpy(&half, bytes, 2);
        is_damaged |= (half & 0x7c00) == 0x7c00;
        const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
        if (rest < 0x400) {  // subnormal: a multiple of 2^-24
            const float value = float(rest) * 0x1p-24f;
            return sign ? -value : value;
        }
        const uint32_t bits = sign | ((rest << 13) + (112u << 23));
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
};

uint32_t fifth_bits(const uint8_t* bytes) {
    uint32_t bits;
    memcpy(&bits, bytes, 4);
    return bits;
}

struct Q4_0 {
    static constexpr int BYTES = 18, VALUES = 32;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block);
        const uint8_t* q = block + 2;
        for (int i = 0; i < 16; i++) {
            to[i] = float((q[i] & 15) - 8) * d;
            to[i + 16] = float((q[i] >> 4) - 8) * d;
        }
    }
};

struct Q4_1 {
    static constexpr int BYTES = 20, VALUES = 32;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block), m = factors.at(block + 2);
        const uint8_t* q = block + 4;
        for (int i = 0; i < 16; i++) {
            to[i] = float(q[i] & 15) * d + m;
            to[i + 16] = float(q[i] >> 4) * d + m;
        }
    }
};

struct Q5_0 {
    static constexpr int BYTES = 22, VALUES = 32;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block);
        const uint32_t fifth = fifth_bits(block + 2);
        const uint8_t* q = block + 6;
        for (int i = 0; i < 16; i++) {
            to[i] = float(int((q[i] & 15) | (fifth >> i & 1) << 4) - 16) * d;
            to[i + 16] = float(int((q[i] >> 4) | (fifth >> (i + 16) & 1) << 4) - 16) * d;
        }
    }
};

struct Q5_1 {
    static constexpr int BYTES = 24, VALUES = 32;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block), m = factors.at(block + 2);
        const uint32_t fifth = fifth_bits(block + 4);
        const uint8_t* q = block + 8;
        for (int i = 0; i < 16; i++) {
            to[i] = float((q[i] & 15) | (fifth >> i & 1) << 4) * d + m;
            to[i + 16] = float((q[i] >> 4) | (fifth >> (i + 16) & 1) << 4) * d + m;
        }
    }
};

struct Q8_0 {
    static constexpr int BYTES = 34, VALUES = 32;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block);
        const int8_t* q = (const int8_t*)block + 2;
        for (int i = 0; i < 32; i++) to[i] = float(q[i]) * d;
    }
};

// Scale and minimum of sub-block i of 8, six bits each.
void scale_and_minimum(const uint8_t* packed, int i, float& scale, float& minimum) {
    if (i < 4) {
        scale = float(packed[i] & 63);
        minimum = float(packed[i + 4] & 63);
    } else {
        scale = float((packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4);
        minimum = float((packed[i + 4] >> 4) | (packed[i] >> 6) << 4);
    }
}

// Q4_K and Q5_K; the latter has a fifth bit for each value: bit s of byte i for value i of sub-block s.
template <bool HAS_FIFTH>
struct Q45_K {
    static constexpr int BYTES = HAS_FIFTH ? 176 : 144, VALUES = 256;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block), m = factors.at(block + 2);
        const uint8_t *fifth = block + 16, *q = block + (HAS_FIFTH ? 48 : 16);
        for (int s = 0; s < 8; s++, to += 32) {
            float scale, minimum;
            scale_and_minimum(block + 4, s, scale, minimum);
            scale *= d;
            minimum *= m;
            const uint8_t* run = q + s / 2 * 32;
            const int shift = s % 2 * 4;
            for (int i = 0; i < 32; i++) {
                const int high = HAS_FIFTH ? (fifth[i] >> s & 1) << 4 : 0;
                to[i] = float((run[i] >> shift & 15) | high) * scale - minimum;
            }
        }
    }
};

struct Q6_K {
    static constexpr int BYTES = 210, VALUES = 256;

    static void unpack(const uint8_t* block, float* to, Factors& factors) {
        const float d = factors.at(block + 208);
        const int8_t* scales = (const int8_t*)block + 192;
        for (int half = 0; half < 2; half++)
            for (int quarter = 0; quarter < 4; quarter++, to += 32) {
                const uint8_t* low = block + half * 64 + quarter % 2 * 32;
                const uint8_t* high = block + 128 + half * 32;
                const int8_t* scale = scales + half * 8 + quarter * 2;
                for (int part = 0; part < 2; part++) {
                    const float factor = float(scale[part]) * d;
                    for (int i = part * 16; i < part * 16 + 16; i++) {
                        const int q = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
                        to[i] = float(q - 32) * factor;
                    }
                }
            }
    }
};

// To the nearest, ties to even, of numbers that are finite.
uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
void unpack(const uint8_t* block, float* to, Factors& factors) {
    T::unpack(block, to, factors);
}

template <class T>
void unpack(const uint8_t* block, uint16_t* to, Factors& factors) {
    float values[T::VALUES];
    T::unpack(block, values, factors);
    for (int i = 0; i < T::VALUES; i++) to[i] = rounded(values[i]);
}

template <class T, class Value>
void unpack_all(const Call& call, fwk::PoolThread& thread) {
    thread.parallel_for((call.num_blocks + BLOCKS - 1) / BLOCKS, [&](int64_t chunk) {
        Factors factors;
        const int64_t end = chunk * BLOCKS + BLOCKS < call.num_blocks ? chunk * BLOCKS + BLOCKS : call.num_blocks;
        for (int64_t i = chunk * BLOCKS; i < end; i++)
            unpack<T>(call.blocks + i * T::BYTES, (Value*)call.values + i * T::VALUES, factors);
        if (factors.is_damaged) __atomic_store_n(call.damaged, 1, __ATOMIC_RELAXED);
    });
}

template <class T>
void unpack_all(const Call& call, fwk::PoolThread& thread) {
    call.is_bfloat16 ? unpack_all<T, uint16_t>(call, thread) : unpack_all<T, float>(call, thread);
}

}  // namespace

extern "C" void dequantise(const void* args, fwk::PoolThread& thread) {
    const Call& call = *(const Call*)args;
    switch (call.type) {
        case 2: return unpack_all<Q4_0>(call, thread);
        case 3: return unpack_all<Q4_1>(call, thread);
        case 6: return unpack_all<Q5_0>(call, thread);
        case 7: return unpack_all<Q5_1>(call, thread);
        case 8: return unpack_all<Q8_0>(call, thread);
        case 12: return unpack_all<Q45_K<false>>(call, thread);
        case 13: return unpack_all<Q45_K<true>>(call, thread);
        case 14: return unpack_all<Q6_K>(call, thread);
    }
}
