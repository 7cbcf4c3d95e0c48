// Parallel regions for operators.

#include <omp.h>

#include "fwk/team.h"

extern "C" {

struct Call {
    fwk::Operator op;
    const void* args;
};

// Run operators one after the other on `size` threads, in one parallel region.
void run(const Call* calls, int64_t count, int size) {
    fwk::Team team;
    if (size <= 1) {
        fwk::Member alone{0, 1, &team};
        for (int64_t i = 0; i < count; i++) calls[i].op(calls[i].args, alone);
        return;
    }
#pragma omp parallel num_threads(size)
    {
        fwk::Member member{omp_get_thread_num(), omp_get_num_threads(), &team};
        for (int64_t i = 0; i < count; i++) calls[i].op(calls[i].args, member);
    }
}

void run_one(fwk::Operator op, const void* args, int size) {
    const Call call{op, args};
    run(&call, 1, size);
}

}  // extern "C"
