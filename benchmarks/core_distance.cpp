// A line of memory that two cores write in turns.

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace {

alignas(64) std::atomic<int> line;

void stay_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

double round_trip(int turns) {  // seconds
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < turns; i++) {
        const int value = line.load(std::memory_order_relaxed);
        line.store(value + 1, std::memory_order_release);
        while (line.load(std::memory_order_acquire) != value + 2) {}
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / turns;
}

}  // namespace

// Seconds for a line to go from one core to another and back, the least of five times 300 turns.
extern "C" double core_distance(int here, int there) {
    cpu_set_t before;
    pthread_getaffinity_np(pthread_self(), sizeof before, &before);
    line = 0;
    std::atomic<bool> has_come{false}, is_over{false};
    std::thread other([&] {
        stay_on(there);
        has_come = true;
        while (!is_over.load(std::memory_order_relaxed)) {
            const int value = line.load(std::memory_order_acquire);
            if (value % 2) line.store(value + 1, std::memory_order_release);
        }
    });
    stay_on(here);
    while (!has_come) sched_yield();
    double least = 1;
    for (int i = 0; i < 5; i++) least = std::min(least, round_trip(300));
    is_over = true;
    other.join();
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    return least;
}
