// Checksums of the chunks of a file in memory. They find damage, not intent: one changed word always changes a chunk's.

#include "fwk/thread_pool.h"

namespace {

struct Checksum {
    const uint64_t* words;  // whole lines of LANES words
    uint64_t* sums;         // one a chunk
    int64_t num_words, chunk;
};

constexpr int LANES = 8;  // independent chains of multiplications: one alone would wait for its own latency
constexpr uint64_t MULTIPLIER = 0x9e3779b97f4a7c15;

uint64_t mixed(uint64_t sum, uint64_t word) {
    const uint64_t product = (sum ^ word) * MULTIPLIER;  // odd: reversible, so that no difference is lost
    return product << 31 | product >> 33;
}

}  // namespace

extern "C" void checksum(const void* args, fwk::PoolThread& thread) {
    const Checksum& call = *(const Checksum*)args;
    thread.parallel_for((call.num_words + call.chunk - 1) / call.chunk, [&](int64_t index) {
        const int64_t first = index * call.chunk;
        const int64_t last = first + call.chunk < call.num_words ? first + call.chunk : call.num_words;
        uint64_t lanes[LANES] = {1, 2, 3, 4, 5, 6, 7, 8};
        for (int64_t i = first; i < last; i += LANES)
            for (int lane = 0; lane < LANES; lane++) lanes[lane] = mixed(lanes[lane], call.words[i + lane]);
        uint64_t sum = uint64_t(last - first);
        for (uint64_t lane : lanes) sum = mixed(sum, lane);
        call.sums[index] = sum;
    });
}
