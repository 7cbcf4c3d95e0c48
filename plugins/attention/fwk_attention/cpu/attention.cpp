// Attention over a paged KV cache, in place.
//
// Layout of a layer's cache: [num_blocks, 2 (K, V), num_kv_heads, block_size, head_size].
//
// A task is some query tokens of one sequence, one KV head with all query heads that share it, and a range of keys.
// Its rows (a token and a query head each) go over the keys in tiles of 64: K is laid out for the product (transposed),
// scores S = Q K^T, an online softmax (Milakov and Gimelshein, 2018), and O += P V. With few rows the keys are cut into ranges that
// are merged by whoever finishes last (as flash decoding does); where a sequence is cut depends on that sequence alone,
// and a row's arithmetic on no other row. Threads take tasks from a counter, so a thread that lost its core delays one.
//
// Products are of bfloat16 pairs with float32 sums where the machine has vdpbf16ps, otherwise of float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "fwk/team.h"

namespace {

constexpr int TILE = 64;      // keys at a time
constexpr int STORED = 16;    // tokens whose K and V are stored at a time
constexpr int ROWS = 6;       // rows of a product kept in registers at a time
constexpr float NONE = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float vf __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4)));
constexpr int COLS = W == 16 ? 4 : 2;  // vectors of a product's row kept in registers at a time

typedef int32_t w8 __attribute__((vector_size(32), aligned(4)));

inline vf load(const float* p) { return *(const vf*)p; }
inline void store(float* p, vf x) { *(vf*)p = x; }
inline vf splat(float x) { return x - vf{}; }

inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline float widen(float x) { return x; }
inline uint16_t narrow(float x) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void put(uint16_t* p, float x) { *p = narrow(x); }
inline void put(float* p, float x) { *p = x; }

// e^x for x <= 0, to 1e-7 relative; 0 below -87.
inline vf exp_of(vf x) {
    const vf low = splat(-87.0f);
    const vi tiny = x < low;
    x = tiny ? low : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = x * 1.44269504088896341f + magic;
    const vi whole = (vi)n << 23;
    n -= magic;
    vf r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p = (vf)((vi)p + whole);
    return tiny ? vf{} : p;
}

// cap * tanh(x / cap)
inline vf capped(vf x, float cap) {
    const vf y = x / cap;
    const vi negative = y < vf{};
    const vf size = negative ? -y : y;
    const vf e = exp_of(size * -2.0f);
    const vf t = (1.0f - e) / (1.0f + e);
    // Near zero the quotient would lose digits that the series has.
    const vf s = size * size;
    const vf series = size * (1.0f + s * (-1.0f / 3.0f + s * (2.0f / 15.0f - s * (17.0f / 315.0f))));
    const vf z = size < splat(0.1f) ? series : t;
    return (negative ? -z : z) * cap;
}

// Transpose 8 x 8 of 32 bits each.
inline void transpose8(const w8 (&in)[8], w8 (&out)[8]) {
    w8 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = __builtin_shuffle(in[2 * i], in[2 * i + 1], w8{0, 8, 1, 9, 4, 12, 5, 13});
        a[2 * i + 1] = __builtin_shuffle(in[2 * i], in[2 * i + 1], w8{2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = __builtin_shuffle(a[4 * i], a[4 * i + 2], w8{0, 1, 8, 9, 4, 5, 12, 13});
        b[4 * i + 1] = __builtin_shuffle(a[4 * i], a[4 * i + 2], w8{2, 3, 10, 11, 6, 7, 14, 15});
        b[4 * i + 2] = __builtin_shuffle(a[4 * i + 1], a[4 * i + 3], w8{0, 1, 8, 9, 4, 5, 12, 13});
        b[4 * i + 3] = __builtin_shuffle(a[4 * i + 1], a[4 * i + 3], w8{2, 3, 10, 11, 6, 7, 14, 15});
    }
    for (int i = 0; i < 4; i++) {
        out[i] = __builtin_shuffle(b[i], b[i + 4], w8{0, 1, 2, 3, 8, 9, 10, 11});
        out[i + 4] = __builtin_shuffle(b[i], b[i + 4], w8{4, 5, 6, 7, 12, 13, 14, 15});
    }
}

// rows: `columns` pointers, a multiple of 8, to `words` words of 32 bits each. out: [words, TILE].
void transpose(const void* const* rows, int columns, int words, int32_t* out) {
    for (int j = 0; j < columns; j += 8) {
        int w = 0;
        for (; w + 8 <= words; w += 8) {
            w8 in[8], turned[8];
            for (int i = 0; i < 8; i++) in[i] = *(const w8*)((const int32_t*)rows[j + i] + w);
            transpose8(in, turned);
            for (int i = 0; i < 8; i++) *(w8*)(out + (w + i) * TILE + j) = turned[i];
        }
        for (; w < words; w++)
            for (int i = 0; i < 8; i++) memcpy(out + w * TILE + j + i, (const int32_t*)rows[j + i] + w, 4);
    }
}

// ---- products: C[R, C * W] (+)= A[R, n] B[n, C * W]. A word of A and B is a float, or a pair of bfloat16. ----

struct Floats {  // one number a word
    static inline vf step(vf sum, float a, const int32_t* b) { return sum + a * load((const float*)b); }
    static inline float word(const int32_t* a) { float x; memcpy(&x, a, 4); return x; }
    static constexpr int PER_WORD = 1;
};

#ifdef __AVX512BF16__
struct Pairs {  // two numbers a word
    static inline vf step(vf sum, __m512bh a, const int32_t* b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, a, (__m512bh)_mm512_loadu_si512(b));
    }
    static inline __m512bh word(const int32_t* a) { return (__m512bh)_mm512_set1_epi32(*a); }
    static constexpr int PER_WORD = 2;
};
#endif

template <class P, int R, int C>
void product(const int32_t* a, int lda, const int32_t* b, int ldb, float* c, int ldc, int n, bool adds) {
    vf sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) sum[r][i] = adds ? load(c + r * ldc + i * W) : vf{};
    for (int k = 0; k < n; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            auto x = P::word(a + r * lda + k);
#pragma GCC unroll 8
            for (int i = 0; i < C; i++) sum[r][i] = P::step(sum[r][i], x, b + k * ldb + i * W);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < C; i++) store(c + r * ldc + i * W, sum[r][i]);
}

template <class P, int C>
void product_rows(int rows, const int32_t* a, int lda, const int32_t* b, int ldb, float* c, int ldc, int n, bool adds) {
    for (; rows >= ROWS; rows -= ROWS, a += ROWS * lda, c += ROWS * ldc)
        product<P, ROWS, C>(a, lda, b, ldb, c, ldc, n, adds);
    switch (rows) {
        case 5: return product<P, 5, C>(a, lda, b, ldb, c, ldc, n, adds);
        case 4: return product<P, 4, C>(a, lda, b, ldb, c, ldc, n, adds);
        case 3: return product<P, 3, C>(a, lda, b, ldb, c, ldc, n, adds);
        case 2: return product<P, 2, C>(a, lda, b, ldb, c, ldc, n, adds);
        case 1: return product<P, 1, C>(a, lda, b, ldb, c, ldc, n, adds);
    }
}

// columns: a multiple of W.
template <class P>
void multiply(int rows, int columns, const int32_t* a, int lda, const int32_t* b, int ldb, float* c, int ldc, int n,
              bool adds) {
    for (; columns >= COLS * W; columns -= COLS * W, b += COLS * W, c += COLS * W)
        product_rows<P, COLS>(rows, a, lda, b, ldb, c, ldc, n, adds);
    for (; columns > 0; columns -= W, b += W, c += W) product_rows<P, 1>(rows, a, lda, b, ldb, c, ldc, n, adds);
}

// ---- one step of one layer ----

}  // namespace

extern "C" {

struct Task {
    int32_t seq;         // row of the block table
    int32_t first;       // first query token, in the batch
    int32_t count;       // query tokens
    int32_t place;       // of the first query token in its sequence
    int32_t first_key;   // place
    int32_t last_key;    // place after the last key
    int32_t past;        // keys that are there since earlier steps: a tree mask says who sees the others
    int32_t part;        // where to put an unmerged outcome; -1: this task has all keys
    int32_t first_part;  // of the parts to be merged with
    int32_t num_parts;
};

struct Plan {
    const Task* tasks;
    const int64_t* slots;     // [num_tokens]
    const int32_t* table;     // [num_seqs, table_width]
    const int64_t* positions; // [num_tokens]; only with a tree mask
    const uint8_t* tree;      // [num_tokens, tree_width] or null
    float* parts;             // [num_parts, num_kv_heads, part_rows, padded head size + 2]
    int32_t* finished;        // [num_parts, num_kv_heads] of zeros
    int64_t table_width, tree_width, num_tasks, num_tokens, part_rows;
};

struct Layer {
    int64_t num_heads, num_kv_heads, head_size, block_size, window;  // window: 0 for none
    float scale, soft_cap;                                           // soft_cap: 0 for none
};

struct Attend {  // strides are elements from token to token; heads stand together
    const void* q;
    int64_t q_stride;
    const void* k;
    int64_t k_stride;
    const void* v;
    int64_t v_stride;
    void *cache, *out;
    const Layer* layer;
    const Plan* plan;
};

}  // extern "C"

namespace {

inline int padded(int64_t size) { return int((size + 15) / 16 * 16); }
inline int rounded(int count) { return (count + 31) / 32 * 32; }  // keys of a tile that are computed

struct Scratch {
    char* memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
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

thread_local Scratch scratch;

// T: element of q, cache and outcome. P: how products are computed.
template <class T, class P>
struct Step {
    const T* q;
    int64_t q_stride;
    T* cache;
    T* out;
    const Layer& layer;
    const Plan& plan;
    int group = int(layer.num_heads / layer.num_kv_heads), size = int(layer.head_size), wide = padded(layer.head_size);
    static constexpr bool PAIRS = P::PER_WORD == 2;
    int words = PAIRS ? (size + 1) / 2 : size;  // of a row of Q or K

    // Numbers as the product wants them: [words] of 32 bits.
    void row_words(const T* x, int32_t* to) const {
        if constexpr (PAIRS) {
            to[words - 1] = 0;
            memcpy(to, x, size * sizeof(T));
        } else {
            for (int i = 0; i < size; i++) {
                float y = widen(x[i]);
                memcpy(to + i, &y, 4);
            }
        }
    }

    void keys(const T* const* rows, int count, int32_t* out, int32_t* spare, const int32_t* zeros) const {
        const void* at[TILE];
        const int columns = rounded(count);
        if (sizeof(T) == 4 || (PAIRS && size % 2 == 0)) {
            for (int j = 0; j < columns; j++) at[j] = j < count ? (const void*)rows[j] : (const void*)zeros;
        } else {
            for (int j = 0; j < columns; j++) {
                at[j] = zeros;
                if (j < count) {
                    row_words(rows[j], spare + j * words);
                    at[j] = spare + j * words;
                }
            }
        }
        transpose(at, columns, words, out);
    }

    // V of a tile: [rounded(count) / PER_WORD, wide] words, zero where there is no key.
    void values(const T* const* rows, int count, int32_t* out) const {
        if constexpr (PAIRS) {
            for (int j = 0; j < rounded(count); j += 2, out += wide) {
                if (j >= count) {
                    memset(out, 0, wide * 4);
                } else if (j + 1 == count) {
                    for (int i = 0; i < size; i++) out[i] = uint32_t(rows[j][i]);
                    memset(out + size, 0, (wide - size) * 4);
                } else {
                    const T *a = rows[j], *b = rows[j + 1];
                    for (int i = 0; i < size; i++) out[i] = uint32_t(a[i]) | uint32_t(b[i]) << 16;
                    memset(out + size, 0, (wide - size) * 4);
                }
            }
        } else {
            for (int j = 0; j < rounded(count); j++, out += wide) {
                if (j < count) {
                    float* to = (float*)out;
                    for (int i = 0; i < size; i++) to[i] = widen(rows[j][i]);
                    memset(out + size, 0, (wide - size) * 4);
                } else {
                    memset(out, 0, wide * 4);
                }
            }
        }
    }

    // Places of the keys that row's token sees, ignoring trees: [low, high).
    void range(const Task& task, int token, int& low, int& high) const {
        const int place = task.place + token;
        low = layer.window ? std::max<int64_t>(0, place - layer.window + 1) : 0;
        high = place + 1;
        if (plan.tree) {
            low = 0;
            high = task.last_key;
        }
    }

    // Hide keys from a row of scores by a tree mask. start: place of the tile's first key.
    void hide_by_tree(const Task& task, int token, int start, int count, float* s) const {
        const int64_t t = task.first + token, offset = task.place - task.past + token;
        const uint8_t* sees = plan.tree + t * plan.tree_width;
        const int64_t position = plan.positions[t];
        for (int j = 0; j < count; j++) {
            int64_t key = start + j, at = key;
            if (key >= task.past) {
                if (!sees[key - task.past]) {
                    s[j] = NONE;
                    continue;
                }
                at = plan.positions[t - offset + key - task.past];
            }
            if (layer.window && at <= position - layer.window) s[j] = NONE;
        }
    }

    void run(const Task& task, int head) const {
        const int rows = task.count * group, lds = TILE / P::PER_WORD;
        const size_t sizes[] = {size_t(rows) * words * 4, size_t(TILE) * words * 4, size_t(TILE) * words * 4,
                                size_t(TILE) * wide * 4,  size_t(rows) * TILE * 4,  size_t(rows) * TILE * 4,
                                size_t(rows) * wide * 4,  size_t(rows) * 8,         size_t(words) * 4};
        char* at[9];
        size_t total = 0;
        for (size_t s : sizes) total += (s + 63) / 64 * 64;
        char* memory = scratch.take(total);
        for (int i = 0; i < 9; i++) {
            at[i] = memory;
            memory += (sizes[i] + 63) / 64 * 64;
        }
        int32_t *queries = (int32_t*)at[0], *k = (int32_t*)at[1], *spare = (int32_t*)at[2], *v = (int32_t*)at[3];
        float *scores = (float*)at[4], *sums = (float*)at[6], *largest = (float*)at[7], *weight = largest + rows;
        int32_t *weights = (int32_t*)at[5], *zeros = (int32_t*)at[8];

        memset(zeros, 0, sizes[8]);
        memset(sums, 0, sizes[6]);
        for (int r = 0; r < rows; r++) {
            largest[r] = NONE;
            weight[r] = 0;
            row_words(q + (task.first + r / group) * q_stride + (head * group + r % group) * int64_t(size),
                      queries + r * words);
        }
        const int32_t* table = plan.table + task.seq * plan.table_width;
        const int64_t part = layer.num_kv_heads * layer.block_size * size, block = 2 * part;
        for (int start = task.first_key; start < task.last_key; start += TILE) {
            const int count = std::min(TILE, task.last_key - start);
            const T *krows[TILE], *vrows[TILE];
            for (int j = 0; j < count; j++) {
                const int64_t place = start + j;
                krows[j] = cache + table[place / layer.block_size] * block +
                           (head * layer.block_size + place % layer.block_size) * size;
                vrows[j] = krows[j] + part;
            }
            keys(krows, count, k, spare, zeros);
            values(vrows, count, v);
            multiply<P>(rows, rounded(count), queries, words, k, TILE, scores, TILE, words, false);
            for (int r = 0; r < rows; r++)
                soften(task, r, start, count, scores + r * TILE, weights + r * lds, largest[r], weight[r],
                       sums + r * wide);
            multiply<P>(rows, wide, weights, lds, v, wide, sums, wide, rounded(count) / P::PER_WORD, true);
        }
        finish(task, head, rows, sums, largest, weight);
    }

    // Scores of one row and tile become weights; what was summed before is scaled to the new largest score.
    void soften(const Task& task, int row, int start, int count, float* s, int32_t* weights, float& largest,
                float& weight, float* sums) const {
        int low, high;
        const int columns = rounded(count);
        range(task, row / group, low, high);
        low = std::max(low - start, 0);
        high = std::min(high - start, count);
        for (int i = 0; i < columns; i += W) {
            vf x = load(s + i) * layer.scale;
            if (layer.soft_cap != 0) x = capped(x, layer.soft_cap);
            store(s + i, x);
        }
        for (int j = 0; j < std::min(low, columns); j++) s[j] = NONE;
        for (int j = std::max(high, 0); j < columns; j++) s[j] = NONE;
        if (plan.tree) hide_by_tree(task, row / group, start, count, s);
        vf most = splat(largest);
        for (int i = 0; i < columns; i += W) {
            const vf x = load(s + i);
            most = x > most ? x : most;
        }
        float top = most[0];
        for (int i = 1; i < W; i++) top = most[i] > top ? most[i] : top;
        if (top == NONE) {
            // All hidden so far, or not a number: that must show.
            bool broken = false;
            for (int j = 0; j < columns; j++) broken |= s[j] != s[j];
            if (!broken) {
                memset(weights, 0, columns / P::PER_WORD * 4);
                return;
            }
            top = 0;
        }
        if (top != largest) {
            const float scale = largest == NONE ? 0.0f : std::exp(largest - top);
            weight *= scale;
            for (int i = 0; i < wide; i += W) store(sums + i, load(sums + i) * scale);
            largest = top;
        }
        vf total = {};
        for (int i = 0; i < columns; i += W) {
            const vf e = exp_of(load(s + i) - top);
            total += e;
            store(s + i, e);
        }
        for (int i = 0; i < W; i++) weight += total[i];
        if constexpr (PAIRS) {
#ifdef __AVX512BF16__
            for (int i = 0; i < columns; i += 32) {
                __m512bh x = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(s + i + 16), _mm512_loadu_ps(s + i));
                memcpy(weights + i / 2, &x, 64);
            }
#endif
        } else {
            memcpy(weights, s, columns * 4);
        }
    }

    void finish(const Task& task, int head, int rows, const float* sums, const float* largest,
                const float* weight) const {
        if (task.part < 0) {
            for (int r = 0; r < rows; r++) write(task, head, r, sums + r * wide, 1.0f / weight[r]);
            return;
        }
        const int64_t stride = wide + 2, heads = layer.num_kv_heads;
        auto place = [&](int64_t p, int r) { return plan.parts + ((p * heads + head) * plan.part_rows + r) * stride; };
        for (int r = 0; r < rows; r++) {
            float* to = place(task.part, r);
            memcpy(to, sums + r * wide, wide * 4);
            to[wide] = largest[r];
            to[wide + 1] = weight[r];
        }
        int32_t* counter = plan.finished + task.first_part * heads + head;
        if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) < task.num_parts) return;
        *counter = 0;  // for the next layer
        float merged[wide] __attribute__((aligned(64)));
        for (int r = 0; r < rows; r++) {
            float top = NONE, total = 0;
            memset(merged, 0, wide * 4);
            for (int p = 0; p < task.num_parts; p++) {
                const float* x = place(task.first_part + p, r);
                if (!(x[wide] <= top)) top = x[wide];
            }
            for (int p = 0; p < task.num_parts; p++) {
                const float* x = place(task.first_part + p, r);
                if (x[wide] == NONE) continue;
                const float scale = std::exp(x[wide] - top);
                total += x[wide + 1] * scale;
                for (int i = 0; i < wide; i += W) store(merged + i, load(merged + i) + load(x + i) * scale);
            }
            write(task, head, r, merged, 1.0f / total);
        }
    }

    void write(const Task& task, int head, int row, const float* sums, float scale) const {
        T* to = out + ((task.first + row / group) * layer.num_heads + head * group + row % group) * size;
        for (int i = 0; i < size; i++) put(to + i, sums[i] * scale);
    }

    void all(fwk::Member& m) const {
        const int64_t heads = layer.num_kv_heads;
        m.chunks(plan.num_tasks * heads, [&](int64_t i) { run(plan.tasks[i / heads], int(i % heads)); });
    }
};

template <class T>
void put_rows(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* cache, const Layer& layer,
              const Plan& plan, int64_t first, int64_t last) {
    const int64_t size = layer.head_size, part = layer.num_kv_heads * layer.block_size * size;
    for (int64_t t = first; t < last; t++) {
        const int64_t block = plan.slots[t] / layer.block_size, offset = plan.slots[t] % layer.block_size;
        T* to = cache + block * 2 * part + offset * size;
        for (int64_t h = 0; h < layer.num_kv_heads; h++, to += layer.block_size * size) {
            memcpy(to, k + t * k_stride + h * size, size * sizeof(T));
            memcpy(to + part, v + t * v_stride + h * size, size * sizeof(T));
        }
    }
}

// Store k and v of all new tokens, then attend.
template <class T, class P>
void attend(const Attend& a, fwk::Member& m) {
    const T *q = (const T*)a.q, *k = (const T*)a.k, *v = (const T*)a.v;
    const int64_t num_tokens = a.plan->num_tokens;
    m.chunks((num_tokens + STORED - 1) / STORED, [&](int64_t i) {
        const int64_t last = std::min((i + 1) * STORED, num_tokens);
        put_rows(k, a.k_stride, v, a.v_stride, (T*)a.cache, *a.layer, *a.plan, i * STORED, last);
    });
    Step<T, P>{q, a.q_stride, (T*)a.cache, (T*)a.out, *a.layer, *a.plan}.all(m);
}

}  // namespace

extern "C" {

void attend_float32(const void* args, fwk::Member& m) { attend<float, Floats>(*(const Attend*)args, m); }

void attend_bfloat16(const void* args, fwk::Member& m) {
#ifdef __AVX512BF16__
    attend<uint16_t, Pairs>(*(const Attend*)args, m);
#else
    attend<uint16_t, Floats>(*(const Attend*)args, m);
#endif
}

}  // extern "C"
