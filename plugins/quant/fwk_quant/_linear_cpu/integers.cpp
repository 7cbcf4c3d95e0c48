// Linear layers of integers of 4, 5, 6 and 8 bits in groups, on activations rounded to 8 bits.

#include "driver.h"
#include "int16_activations.h"
#include "integer_blocks.h"
#include "integer_tiles.h"

namespace kernel {

thread_local ThreadMemory panel_memory;

template <int BITS>
struct Integers {
    static constexpr int ROWS = INTEGER_ROWS, COLUMNS = PANEL, SIDE = 1;
    static constexpr bool ARE_BLOCKS = false;
    static constexpr int64_t SHARED_ROWS = INT64_MAX;
    static constexpr bool MAY_BE_WHOLE = BITS == 8 || BITS == 4;  // the others only come in groups

    static int64_t row_bytes(const Matrix& m) { return Rounded(m).size(); }

    template <class T>
    static void prepare(const Matrix& m, const T* x, int64_t, int64_t, int64_t, char* to) {
        round_row(m, x, to);
    }

    template <class T>
    static bool reads(const Linear&) {
        return false;
    }

    struct Panel {
        OpenPanel panel;
        bool is_open, is_whole;

        Panel(const Matrix& m, int64_t index, bool is_for_many, bool is_wide = BITS < 8 && !UNPACKS_IN_PLACE)
            : panel{m, Rounded(m), index, (const int32_t*)m.words + index * m.num_words * PANEL, nullptr},
              is_open(is_for_many),
              is_whole(MAY_BE_WHOLE && m.scale_every >= panel.form.groups) {
            if (!is_open) return;
            const int64_t count = panel.num_factors(), bytes = count * int64_t(sizeof(Factors));
            const int64_t steps = m.num_words / Bits<BITS>::WORDS;
            char* memory = panel_memory.take(bytes + (is_wide ? steps * Bits<BITS>::COUNT * PANEL * 4 : 0));
            for (int64_t i = 0; i < count; i++) panel.read(i, ((Factors*)memory)[i]);
            panel.factors = (const Factors*)memory;
            if (is_wide) panel.words = widened(panel.words, steps, (int32_t*)(memory + bytes));
        }

        static const int32_t* widened(const int32_t* from, int64_t steps, int32_t* to) {
            typedef Bits<BITS> B;
            for (int64_t k = 0; k < steps; k++, from += B::WORDS * PANEL)
                UNROLL for (int i = 0; i < B::COUNT; i++, to += PANEL)
                    UNROLL for (int c = 0; c < PANEL; c += W) *(vi*)(to + c) = B::get(from + c, i);
            return to - steps * B::COUNT * PANEL;
        }

        void multiply(int rows, Rows x, int, float* out, Prefetch prefetch) const {
            if (is_open) return multiply_as<true>(rows, x, out, prefetch);
            multiply_as<false>(rows, x, out, prefetch);
        }

        template <bool IS_OPEN>
        void multiply_as(int rows, Rows x, float* out, Prefetch prefetch) const {
            if constexpr (MAY_BE_WHOLE)
                if (is_whole) return integer_tiles<BITS, IS_OPEN, true>(rows, panel, x.first, out, prefetch);
            integer_tiles<BITS, IS_OPEN, false>(rows, panel, x.first, out, prefetch);
        }
    };
};

#if defined(FWK_TILES)
constexpr int64_t MIN_BLOCK_ROWS = 8;  // rows from which blocks are worth their panels' opening; the sums are the same

template <int BITS>
struct IntegerBlocks : Integers<BITS> {
    static constexpr int ROWS = fwk::tiles::BLOCK, COLUMNS = PANEL;
    static constexpr bool ARE_BLOCKS = true;
    static constexpr int64_t SHARED_ROWS = 64;

    struct Panel : Integers<BITS>::Panel {
        Panel(const Matrix& m, int64_t index, bool) : Integers<BITS>::Panel(m, index, true, BITS < 8) {}

        template <class O>
        void multiply_interleaved(int rows, Rows x, float* out, NextPanel next, O& pending) const {
            const int64_t groups = this->panel.form.groups, share = (ROWS + groups - 1) / groups;
            PanelPrefetch lines(next, this->panel.m.num_words * 2, groups);
            const auto interleaved = [&] {
                lines.fetch();
                pending.put(share);
            };
            if (this->is_whole) return integer_block<BITS, true>(rows, this->panel, x.first, out, interleaved);
            integer_block<BITS, false>(rows, this->panel, x.first, out, interleaved);
        }
    };
};
#endif

#if defined(FWK_TILES)
template <class T>
void run_int16(const Linear& call, fwk::PoolThread& thread) {
    if (call.rows < MIN_BLOCK_ROWS) return run<Int16Tiles, T>(call, thread);
    const fwk::tiles::Region region;
    run_blocks<Int16Blocks, T>(call, thread);
}
#endif

template <int BITS>
void run_typed(const Linear& call, fwk::PoolThread& thread) {
#if defined(FWK_TILES)
    if (call.rows >= MIN_BLOCK_ROWS) {
        const fwk::tiles::Region region;
        if (call.is_bfloat16) return run_blocks<IntegerBlocks<BITS>, uint16_t>(call, thread);
        return run_blocks<IntegerBlocks<BITS>, float>(call, thread);
    }
#endif
    if (call.is_bfloat16) return run<Integers<BITS>, uint16_t>(call, thread);
    run<Integers<BITS>, float>(call, thread);
}

// A row's numbers, whichever bits they have.
template <int BITS, class T>
void rows_typed(const LinearRows& call, fwk::PoolThread& thread) {
    typedef Bits<BITS> B;
    const Matrix& m = *call.matrix;
    const int64_t groups = (num_groups(m) + m.scale_every - 1) / m.scale_every, nests = (groups + m.nest - 1) / m.nest;
    thread.parallel_for_ordered(call.count, [&](int64_t i, int64_t) {
        const int64_t panel = call.indices[i] / PANEL, lane = call.indices[i] % PANEL;
        const int32_t* words = (const int32_t*)m.words + panel * m.num_words * PANEL + lane / W * W;
        T* to = (T*)call.y + i * m.in_features;
        Factors factors;
        int64_t left = 0, group = 0;
        for (int64_t at = 0; at < m.in_features; at += 4 * B::COUNT, words += B::WORDS * PANEL) {
            for (int k = 0; k < B::COUNT; k++) {
                const uint32_t bytes = uint32_t(B::get(words, k)[lane % W]);
                for (int64_t b = 0; b < 4 && at + k * 4 + b < m.in_features; b++, left--) {
                    if (left == 0) {
                        read_factors(m, panel * groups + group, panel * nests + group / m.nest, factors);
                        left = m.group * m.scale_every;
                        group++;
                    }
                    const float number = float(bytes >> 8 * b & 255), scale = factors.scale[lane];
                    const float y = m.zero_kind == CONSTANT ? (number - float(m.zero)) * scale
                                                            : number * scale + factors.offset[lane];
                    store_one(to + at + k * 4 + b, y);
                }
            }
        }
    });
}

template <int BITS>
void put_rows(const LinearRows& call, fwk::PoolThread& thread) {
    if (call.is_bfloat16) return rows_typed<BITS, uint16_t>(call, thread);
    rows_typed<BITS, float>(call, thread);
}

template <class T>
void gather(const Gather& call, fwk::PoolThread& thread) {
    thread.parallel_for_ordered(call.rows, [&](int64_t row, int64_t) {
        const T* from = (const T*)call.x + row * call.x_stride;
        T* to = (T*)call.y + row * call.columns;
        for (int64_t i = 0; i < call.columns; i++) to[i] = from[call.inputs[i]];
    });
}

}  // namespace kernel

extern "C" {

void linear_gather(const void* args, fwk::PoolThread& thread) {
    const Gather& call = *(const Gather*)args;
    call.is_bfloat16 ? kernel::gather<uint16_t>(call, thread) : kernel::gather<float>(call, thread);
}

void linear(const void* args, fwk::PoolThread& thread) {
    using namespace kernel;
    const Linear& call = *(const Linear*)args;
    if (call.rows == 0) return;
#if defined(FWK_TILES)
    if (call.matrix->int16_activations)
        return call.is_bfloat16 ? run_int16<uint16_t>(call, thread) : run_int16<float>(call, thread);
#endif
    if (call.matrix->format == INT8) return run_typed<8>(call, thread);
    if (call.matrix->format == INT4) return run_typed<4>(call, thread);
    if (call.matrix->format == INT5) return run_typed<5>(call, thread);
    run_typed<6>(call, thread);
}

void linear_rows(const void* args, fwk::PoolThread& thread) {
    using namespace kernel;
    const LinearRows& call = *(const LinearRows*)args;
    if (call.matrix->format == INT8) return put_rows<8>(call, thread);
    if (call.matrix->format == INT4) return put_rows<4>(call, thread);
    if (call.matrix->format == INT5) return put_rows<5>(call, thread);
    put_rows<6>(call, thread);
}

// Bytes of a row of x once it is prepared.
int64_t linear_row_bytes(const Matrix* matrix) {
#if defined(FWK_TILES)
    if (matrix->int16_activations) return kernel::Int16Tiles::row_bytes(*matrix);
#endif
    return kernel::Rounded(*matrix).size();
}

}  // extern "C"
