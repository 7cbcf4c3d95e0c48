// Attention in float32, to a cache in float32.

#include "attention.h"

extern "C" {

void attend_float32_auto(const void* args, fwk::PoolThread& m) {
    attend<float, float, Floats>(*(const Attend*)args, m);
}

}  // extern "C"
