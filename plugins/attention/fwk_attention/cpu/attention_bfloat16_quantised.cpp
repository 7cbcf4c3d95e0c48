// Attention in bfloat16, to a cache of 8 bits a number.

#include "attention.h"

extern "C" {

void attend_bfloat16_int8(const void* args, fwk::PoolThread& m) {
    attend<uint16_t, Int8, Bfloats>(*(const Attend*)args, m);
}
void attend_bfloat16_fp8_e4m3(const void* args, fwk::PoolThread& m) {
    attend<uint16_t, Fp8, Bfloats>(*(const Attend*)args, m);
}

}  // extern "C"
