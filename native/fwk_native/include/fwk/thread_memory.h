#pragma once

#include <cstdlib>

namespace fwk {

// Scratch memory of one thread, kept between calls.
struct ThreadMemory {
    char* memory = nullptr;
    size_t size = 0;
    ~ThreadMemory() { free(memory); }
    char* take(size_t wanted) {
        if (wanted > size) {
            free(memory);
            size = (wanted + 4095) / 4096 * 4096;
            memory = (char*)aligned_alloc(4096, size);
            if (!memory) abort();
        }
        return memory;
    }
};

}  // namespace fwk
