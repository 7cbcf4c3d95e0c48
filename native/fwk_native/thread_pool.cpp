// Threads that wait for regions and compute them with the one that calls.

#include <pthread.h>
#include <signal.h>

#include <mutex>
#include <thread>

#include "fwk/thread_pool.h"

extern "C" {

struct Call {
    fwk::Operator op;
    const void* args;
};

}  // extern "C"

namespace {

struct Region {
    const Call* calls;
    int64_t count;
    int size;
};

class Pool {
  public:
    void run(const Region& wanted) {
        if (wanted.size <= 1) {
            fwk::PoolThread alone{0, 1, nullptr, 0};
            for (int64_t i = 0; i < wanted.count; i++) wanted.calls[i].op(wanted.calls[i].args, alone);
            return;
        }
        const std::lock_guard<std::mutex> mine(turn);
        while (num_helpers < wanted.size - 1) start();
        region = wanted;
        pool.now.store(0, std::memory_order_relaxed);
        const uint32_t number = opened.load(std::memory_order_relaxed) + 1;
        opened.store(number, std::memory_order_seq_cst);
        opening.wake();
        work(0);
        opened.store(number + 1, std::memory_order_seq_cst);
        pool.futex.wait([&] { return inside.load(std::memory_order_seq_cst) == 0; });
    }

    // Stop the helpers. The last holder to release the pool frees it.
    void close() {
        is_closed.store(true, std::memory_order_seq_cst);
        opening.wake();
        release();
    }

  private:
    std::mutex turn;  // regions of several callers come one after the other
    Region region{};
    fwk::ThreadPool pool;
    fwk::Futex opening;
    alignas(64) std::atomic<uint32_t> opened{0};  // odd while a region is open
    std::atomic<bool> is_closed{false};
    std::atomic<int> holders{1};
    alignas(64) std::atomic<int> inside{0};  // helpers that may still read the region
    int num_helpers = 0;

    void work(int index) {
        for (;;) {
            const uint64_t op = pool.now.load(std::memory_order_acquire) >> fwk::OPERATOR;
            if (op >= uint64_t(region.count)) return;
            fwk::PoolThread thread{index, region.size, &pool, op << fwk::OPERATOR};
            region.calls[op].op(region.calls[op].args, thread);
            thread.leave();
        }
    }

    // The caller does not wait for helpers to arrive. A helper that wakes after the region has closed skips it.
    void help(int index) {
        uint32_t known = 0;
        while (true) {
            opening.wait([&] {
                const uint32_t number = opened.load(std::memory_order_seq_cst);
                return (number % 2 && number != known) || is_closed.load(std::memory_order_seq_cst);
            });
            if (is_closed.load(std::memory_order_seq_cst)) break;
            inside.fetch_add(1, std::memory_order_seq_cst);
            known = opened.load(std::memory_order_seq_cst);
            if (known % 2 && index < region.size) work(index);
            inside.fetch_sub(1, std::memory_order_seq_cst);
            pool.futex.wake();
        }
        release();
    }

    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for Python's threads
        holders.fetch_add(1, std::memory_order_relaxed);
        std::thread(&Pool::help, this, ++num_helpers).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void release() {
        if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
    }
};

}  // namespace

extern "C" {

void* pool_new() { return new Pool; }

void pool_close(void* pool) { ((Pool*)pool)->close(); }

// Run operators one after the other in one region.
void pool_run(void* pool, const Call* calls, int64_t count, int size) { ((Pool*)pool)->run({calls, count, size}); }

void pool_run_one(void* pool, fwk::Operator op, const void* args, int size) {
    const Call call{op, args};
    ((Pool*)pool)->run({&call, 1, size});
}

}  // extern "C"
