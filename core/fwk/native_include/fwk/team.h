// The threads that compute a native operator together.
//
// An operator is `extern "C" void op(const void* args, fwk::Member& m)`. All members of a team run it at once, inside
// one parallel region, which may hold one operator or a whole recorded step. It returns only when all it writes is
// written for every member: it ends with `chunks` or with `barrier`. What it computes must not depend on `size` or on
// which member computed what.

#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fwk {

constexpr int SPINS = 2000;  // turns of waiting before the core is offered to others: some 30 microseconds
constexpr int YIELDS = 20;   // offers before the thread sleeps

struct Team {
    alignas(64) std::atomic<int64_t> next{0};      // chunk to be taken
    alignas(64) std::atomic<uint32_t> arrived{0};  // members that wait at the barrier
    alignas(64) std::atomic<uint32_t> round{0};    // barriers passed
    std::atomic<uint32_t> sleepers{0};
};

struct Member {
    int index, size;
    Team* team;

    // Wait until every member has arrived. What any member wrote before is then seen by all.
    void barrier() {
        if (size == 1) return;
        const uint32_t now = team->round.load(std::memory_order_relaxed);
        if (team->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size)) {
            team->arrived.store(0, std::memory_order_relaxed);
            team->next.store(0, std::memory_order_relaxed);
            team->round.store(now + 1, std::memory_order_seq_cst);
            if (team->sleepers.load(std::memory_order_seq_cst)) wake();
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (team->round.load(std::memory_order_acquire) != now) return;
            pause();
        }
        for (int i = 0; i < YIELDS; i++) {
            sched_yield();
            if (team->round.load(std::memory_order_acquire) != now) return;
        }
        team->sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (team->round.load(std::memory_order_seq_cst) == now) sleep(now);
        team->sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

    // f(i) once for every i in [0, n), each by whichever member is free, so that a member without a core delays one
    // chunk; then `barrier`. All members call it, with the same n.
    template <class F>
    void chunks(int64_t n, F f) {
        if (size == 1) {
            for (int64_t i = 0; i < n; i++) f(i);
            return;
        }
        for (int64_t i; (i = team->next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
        barrier();
    }

  private:
    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

#ifdef __linux__
    void sleep(uint32_t now) { syscall(SYS_futex, &team->round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &team->round, FUTEX_WAKE_PRIVATE, size, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif
};

typedef void (*Operator)(const void* args, Member& m);

}  // namespace fwk
