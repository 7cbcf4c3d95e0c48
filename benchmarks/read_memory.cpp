// Reads memory once, as the linear layers of a decode step read their weights.

#include <cstdint>

#include "fwk/thread_pool.h"

extern "C" {

struct Read {
    const int64_t* memory;
    int64_t chunks;  // of 4096 numbers each
    int64_t* sum;
};

void read_memory(const void* args, fwk::PoolThread& thread) {
    const Read& read = *(const Read*)args;
    thread.parallel_for(read.chunks, [&](int64_t i) {
        const int64_t* from = read.memory + i * 4096;
        int64_t sums[16] = {};
        for (int k = 0; k < 4096; k += 16)
            for (int j = 0; j < 16; j++) sums[j] += from[k + j];
        int64_t total = 0;
        for (int64_t sum : sums) total += sum;
        __atomic_fetch_add(read.sum, total, __ATOMIC_RELAXED);
    });
}

}  // extern "C"
