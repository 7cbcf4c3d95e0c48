// Linear layers of 8, 6 and 4-bit integers in groups, on activations rounded to 8 bits.

#include "driver.h"
#include "integer_tiles.h"

namespace kernel {

template <int BITS>
struct Integers {
    static constexpr int ROWS = INTEGER_ROWS;

    static int64_t row_bytes(const Matrix& m) { return Rounded(m).size(); }

    template <class T>
    static void prepare(const Matrix& m, const T* x, char* to) {
        round_row(m, x, to);
    }

    template <class T>
    static bool reads(const Linear&) {
        return false;
    }

    static void tiles(int rows, const Matrix& m, Rows x, int64_t panel, int column, float* out, const int32_t* ahead) {
        integer_tiles<BITS>(rows, m, x.first, panel, column, out, ahead);
    }
};

template <int BITS>
void run_typed(const Linear& call, fwk::Member& member) {
    if (call.is_bfloat16) return run<Integers<BITS>, uint16_t>(call, member);
    run<Integers<BITS>, float>(call, member);
}

}  // namespace kernel

extern "C" {

void linear(const void* args, fwk::Member& member) {
    using namespace kernel;
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
    if (call.matrix->format == INT8) return run_typed<8>(call, member);
    if (call.matrix->format == INT4) return run_typed<4>(call, member);
    run_typed<6>(call, member);
}

// Bytes of a row of x once it is prepared.
int64_t linear_row_bytes(const Matrix* matrix) { return kernel::Rounded(*matrix).size(); }

}  // extern "C"
