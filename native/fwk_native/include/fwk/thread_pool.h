// The threads that compute a native operator together.
//
// An operator is `extern "C" void op(const void* args, fwk::PoolThread& m)`. All threads of a pool run it at the same time, inside
// a region, which holds one operator or a whole recorded step. It may write shared data only inside `parallel_for`, and must
// make the same calls of it, in the same order and with the same n, on every thread. What it computes must not depend on `size`
// or on which thread computed what.
//
// A call of `parallel_for` ends when all its chunks are done, no matter how many threads took part. A late thread finds no
// chunk left and skips operators that have ended. So between two calls an operator may only read, and a late thread may read
// what a later operator wrote; such a thread gets no chunk of the earlier operator.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <sched.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fwk {

constexpr int SPINS = 2000;  // iterations before the first yield: some 30 microseconds
constexpr int YIELDS = 20;   // yields before the thread sleeps

// Waiting for a condition that another thread makes true: spin, then yield, then sleep.
class Futex {
  public:
    // Return once `is_over()`. The thread that makes it true stores with memory_order_seq_cst, then calls `wake`.
    template <class F>
    void wait(F is_over) {
        for (int i = 0; i < SPINS; i++) {
            if (is_over()) return;
            pause();
        }
        for (int i = 0; i < YIELDS; i++) {
            sched_yield();
            if (is_over()) return;
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (;;) {
            const uint32_t heard = generation.load(std::memory_order_seq_cst);
            if (is_over()) break;
            sleep(heard);
        }
        sleepers.fetch_sub(1, std::memory_order_relaxed);
    }

    void wake() {
        if (!sleepers.load(std::memory_order_seq_cst)) return;
        generation.fetch_add(1, std::memory_order_seq_cst);
        wake_sleepers();
    }

  private:
    alignas(64) std::atomic<uint32_t> generation{0};
    std::atomic<uint32_t> sleepers{0};

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

#ifdef __linux__
    void sleep(uint32_t heard) { syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0); }
    void wake_sleepers() { syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake_sleepers() {}
#endif
};

// What the threads of a region have in common. `now` is the operator under way (24 bits), its call of `parallel_for` (8), and
// the next chunk (32): a chunk can only be taken together with the call it belongs to.
struct ThreadPool {
    alignas(64) std::atomic<uint64_t> now{0};
    std::atomic<int64_t> done{0};  // chunks of that call
    Futex futex;
};

constexpr int OPERATOR = 40, CALL = 32;

struct PoolThread {
    int index, size;
    ThreadPool* pool;
    uint64_t at;  // the next call of `parallel_for`, as it stands in `now` before a chunk is taken

    // f(i) once for every i in [0, n), n < 2^32, dynamically scheduled. On return all threads see all writes. A thread that is
    // preempted delays only the chunk it holds.
    template <class F>
    void parallel_for(int64_t n, F f) {
        take(n, n, [&](int64_t i, int64_t) { f(i); });
    }

    // parallel_for with guided scheduling, for f(i, next) of similar cost on data that lies in order: a thread takes several
    // neighbouring chunks at a time, fewer as fewer are left. next: the chunk this thread will probably take next, to prefetch.
    // Of two threads one counts up and the other down, so each reads one contiguous range, mostly what it wrote itself, which
    // avoids moving cache lines between cores.
    // after() is called when a thread has finished what it took, before other threads may read what it wrote.
    template <class F, class After>
    void parallel_for_ordered(int64_t n, F f, After after) {
        const int64_t step = size == 2 && index ? -1 : 1;
        int64_t i = step < 0 ? n : -1;
        take(n, 2 * size, [&](int64_t first, int64_t count) {
            if (size > 2) i = first - 1;
            for (; count > 0; count--) {
                i += step;
                f(i, std::clamp<int64_t>(i + step, 0, n - 1));
            }
            after();
        });
    }

    template <class F>
    void parallel_for_ordered(int64_t n, F f) {
        parallel_for_ordered(n, f, [] {});
    }

    // The operator has returned: the next one may begin, unless it has.
    void leave() {
        uint64_t over = at;
        const uint64_t next = ((at >> OPERATOR) + 1) << OPERATOR;
        pool->now.compare_exchange_strong(over, next, std::memory_order_seq_cst);
    }

  private:
    // f(first, count) of chunks until none is left: each time one of `share` equal parts of the rest, or one chunk.
    template <class F>
    void take(int64_t n, int64_t share, F f) {
        if (size == 1) {
            for (int64_t i = 0; i < n; i++) f(i, 1);
            return;
        }
        const uint64_t call = at >> CALL, end = at + uint64_t(n);
        at += uint64_t(1) << CALL;
        uint64_t now = end;
        if (n == 0) pool->now.compare_exchange_strong(now, at, std::memory_order_seq_cst);
        now = pool->now.load(std::memory_order_acquire);
        while (now >> CALL == call && now < end) {
            const int64_t count = std::max<int64_t>(int64_t(end - now) / share, 1);
            if (!pool->now.compare_exchange_weak(now, now + uint64_t(count), std::memory_order_acquire)) continue;
            f(int64_t(now & UINT32_MAX), count);
            if (pool->done.fetch_add(count, std::memory_order_acq_rel) + count == n) return pass(at);
            now = pool->now.load(std::memory_order_acquire);
        }
        pool->futex.wait([&] { return pool->now.load(std::memory_order_acquire) >> CALL != call; });
    }

    // Called by the thread that finished the last chunk. No other thread holds a chunk, so `done` is not contended.
    void pass(uint64_t next) {
        pool->done.store(0, std::memory_order_relaxed);
        pool->now.store(next, std::memory_order_seq_cst);
        pool->futex.wake();
    }
};

typedef void (*Operator)(const void* args, PoolThread& m);

}  // namespace fwk
