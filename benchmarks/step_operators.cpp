// A recorded step, with the time of each operator.

#include <omp.h>
#include <time.h>

#include "fwk/thread_pool.h"

namespace {

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

}  // namespace

extern "C" {

struct Call {
    fwk::Operator op;
    const void* args;
};

// As `pool_run` of core's thread_pool.cpp. nanoseconds [count]: from the end of the operator before to the end of this one.
void run_timed(const Call* calls, int64_t count, int size, int64_t* nanoseconds) {
    fwk::ThreadPool pool;
#pragma omp parallel num_threads(size)
    {
        const int index = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t before = now();
        for (int64_t i = 0; i < count; i++) {
            fwk::PoolThread thread{index, threads, &pool, uint64_t(i) << fwk::OPERATOR};
            calls[i].op(calls[i].args, thread);
            thread.leave();
            if (index) continue;
            const int64_t after = now();
            nanoseconds[i] = after - before;
            before = after;
        }
    }
}

}  // extern "C"
