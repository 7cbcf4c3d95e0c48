// Memory of a thread that is given out anew for each task.

#pragma once

#include <cstdlib>

namespace {

// Cut into pieces at multiples of 64 bytes.
struct Scratch {
    char* memory = nullptr;
    size_t size = 0, used = 0;
    ~Scratch() { free(memory); }
    void begin(size_t wanted) {
        used = 0;
        if (wanted > size) {
            free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = (char*)aligned_alloc(4096, size);
            if (!memory) abort();
        }
    }
    template <class X>
    X* take(size_t count) {
        X* at = (X*)(memory + used);
        used += (count * sizeof(X) + 63) / 64 * 64;
        return at;
    }
};

}  // namespace
