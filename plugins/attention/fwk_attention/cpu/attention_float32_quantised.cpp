// Attention in float32, to a cache of 8 bits a number.

#include "attention.h"

extern "C" {

void attend_float32_int8(const void* args, fwk::PoolThread& m) {
    attend<float, Int8, Floats>(*(const Attend*)args, m);
}
void attend_float32_fp8_e4m3(const void* args, fwk::PoolThread& m) {
    attend<float, Fp8, Floats>(*(const Attend*)args, m);
}

}  // extern "C"
