// Attention in bfloat16, to a cache in bfloat16.

#include "attention.h"

extern "C" {

void attend_bfloat16_auto(const void* args, fwk::PoolThread& m) {
    attend<uint16_t, uint16_t, Bfloats>(*(const Attend*)args, m);
}

}  // extern "C"
