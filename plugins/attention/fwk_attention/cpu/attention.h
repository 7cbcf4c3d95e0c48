// Attention over a paged KV cache, in place.
//
// A task is some query tokens, one KV head with all query heads that share it (GQA), and a range of keys. Its rows, one per
// token and query head, go over the keys in tiles: scores S = Q K^T, an online softmax (Milakov and Gimelshein, 2018), and
// O += P V, by ranges of keys at fixed positions, whose results are joined in their order. For sequences with few rows each
// range is a task (split-KV, as in flash decoding), and the thread that finishes the last one joins the results; else one task
// goes over all of them. A range of keys whose blocks several sequences share is one task for all of them. So a row's arithmetic
// depends on its own place alone: not on other rows, nor on how its prompt was cut or cached. Scheduling is dynamic: a preempted
// thread delays one task.

#pragma once

#include "blocks.h"
#include "cache.h"
#include "fwk/thread_pool.h"
#include "products.h"
#include "scratch.h"
#include "tasks.h"

namespace {

constexpr int TOKENS_PER_CHUNK = 16;  // tokens whose K and V are stored at a time
constexpr int MIN_PARALLEL_TASKS = 16;  // tasks from which heads are not distributed one by one
constexpr int PREFETCH_LINES = 8;  // cache lines per prefetch
// Powers of two by which a score may exceed a row's reference before its sums are rescaled, and by which the first scores of a
// range may differ from 0 for 0 to be its reference: floats and bfloat16 are as precise there, and far from their ends.
constexpr float SPAN = 60;
constexpr float MAX_WEIGHT_SUM = 0x1p59f;  // of some keys: none of them exceeds the reference by SPAN
constexpr float MIN_WEIGHT_SUM = 0x1p-50f;  // of up to 1,000 keys: the largest is above 2^-SPAN

inline int padded(int64_t size) { return int((size + 15) / 16 * 16); }
inline int computed(int count) { return (count + GROUP - 1) / GROUP * GROUP; }  // keys of a tile, padded to whole groups

thread_local Scratch scratch;

// T: element type of q and the output. S: of the cache. P: how products are computed.
template <class T, class S, class P>
struct Step {
    const T* q;
    int64_t q_stride;
    Cache<S, P> cache;
    T* out;
    const Layer& layer;
    const Plan& plan;
    static constexpr int N = P::PER_WORD;
    static constexpr bool IS_EXACT = N == 1;
    static constexpr bool IS_DIRECT = N * sizeof(S) == 4;  // tiles are computed with where they are
    static constexpr int MAX_KEYS = Blocks<P>::KEYS;  // keys of a tile, at most
    static constexpr int KEYS = IS_DIRECT || MAX_KEYS < TILE ? MAX_KEYS : MAX_KEYS / 2;  // a repacked tile has to fit L1
    int group = int(layer.num_heads / layer.num_kv_heads), size = int(layer.head_size), wide = padded(layer.head_size);
    int words = cache.words;

    // K or V of a head in a tile's groups: `words` pieces each, of as many bytes.
    struct Groups {
        S* at[MAX_KEYS / GROUP];
        int64_t offsets[MAX_KEYS / GROUP];  // of the first key in its block
        int count = 0;
        int64_t stride;  // from piece to piece, in bytes

        // Prefetch PREFETCH_LINES lines of each group g with g % groups == group.
        void fetch(int group, int piece, int groups) const {
            for (; group < count; group += groups) {
                const char* from = (const char*)at[group] + piece * stride;
                for (int i = 0; i < PREFETCH_LINES; i++) __builtin_prefetch(from + i * stride, 0, 3);
            }
        }
    };

    struct Piece {  // one KV head of a task
        const Task* task;
        int head;
    };

    struct Outcome {  // of rows with some keys: sum of weights times values, of weights by lane, and what they are relative to
        float *sums, *weights, *references;  // [rows, wide], [rows, W], [rows, and up to a whole vector]
    };

    Outcome outcome(int rows) const {
        return {scratch.take<float>(rows * wide), scratch.take<float>(rows * W), scratch.take<float>(padded(rows))};
    }

    struct Work {
        const Task& task;
        const Tokens* members;
        int64_t head;
        const Piece& next;               // what this thread will probably compute then
        int rows;
        int first_key;                   // of the range
        int32_t* queries;                // [rows, words]
        float* scores;                   // [rows, MAX_KEYS]; with AMX of one block of rows
        int32_t* weights;                // [rows, MAX_KEYS / N], likewise
        Outcome range, joined;           // of this range of keys, and of those before it
        float* tile_sum;                 // [rows, W]
        float *factors, *row_max;        // [rows, and up to a whole vector]
        int32_t *keys, *values, *last;   // [MAX_KEYS, words], [MAX_KEYS / N, wide], [wide]: a repacked tile
        float *key_scales, *value_scales;  // [MAX_KEYS]
    };

    static void set_number(int32_t* words, int i, float x) {
        if constexpr (N == 1) ((float*)words)[i] = x;
        else ((uint16_t*)words)[i] = to_bfloat16(x);
    }

    void run(const Piece& piece, const Piece& next) const {
        const Task& task = *piece.task;
        const Tokens* members = plan.members + task.first_member;
        int tokens = 0;
        for (int m = 0; m < task.num_members; m++) tokens += members[m].count;
        const int rows = tokens * group;
        scratch.begin(size_t(padded(rows)) * (words + MAX_KEYS * 2 + wide * 2 + W * 3 + 4) * 4 +
                      size_t(MAX_KEYS) * (words + wide + 2) * 4 + wide * 4 + 64 * 17);
        Work work{task, members, piece.head, next, rows, task.first_key,
                  scratch.take<int32_t>(rows * words), scratch.take<float>(rows * MAX_KEYS),
                  scratch.take<int32_t>(rows * MAX_KEYS / N), outcome(rows), outcome(rows), scratch.take<float>(rows * W),
                  scratch.take<float>(padded(rows)), scratch.take<float>(padded(rows)),
                  scratch.take<int32_t>(MAX_KEYS * words), scratch.take<int32_t>(MAX_KEYS / N * wide),
                  scratch.take<int32_t>(wide), scratch.take<float>(MAX_KEYS), scratch.take<float>(MAX_KEYS)};
        int32_t* to = work.queries;
        for (int m = 0; m < task.num_members; m++)
            for (int t = 0; t < members[m].count; t++)
                for (int h = 0; h < group; h++, to += words) {
                    const T* from = q + (members[m].first + t) * q_stride + (work.head * group + h) * size;
                    to[words - 1] = 0;
                    if constexpr (N == 2) memcpy(to, from, size * sizeof(T));
                    else P::words(from, to, size);
                }
        for (int end; work.first_key < task.last_key; work.first_key = end) {
            end = range_end(task, work.first_key);
            for (int r = 0; r < padded(rows); r++) work.range.references[r] = work.row_max[r] = MINUS_INF;
            memset(work.range.weights, 0, size_t(rows) * W * 4);
            for (int start = work.first_key; start < end; start = tile_end(task, start)) {
                if constexpr (!Blocks<P>::ARE_USED) tile(work, start);
                else tile_by_blocks(work, start);
            }
            if (work.first_key == task.first_key) std::swap(work.range, work.joined);
            else join(work.joined, work.range, rows);
        }
        finish(work);
    }

    // The end of the range in which a place lies, in a task.
    int range_end(const Task& task, int place) const {
        return int(std::min<int64_t>(task.last_key, (place / plan.range + 1) * plan.range));
    }

    // The end of the tile in which a place lies: tiles, too, end at fixed places.
    int tile_end(const Task& task, int place) const {
        return std::min((place / KEYS + 1) * KEYS, range_end(task, place));
    }

    // Add the outcome of rows with the next range of keys to that with those before.
    __attribute__((noinline)) void join(const Outcome& to, const Outcome& next, int rows) const {
        if (!memcmp(to.references, next.references, rows * sizeof(float))) {  // the same as below
            for (int i = 0; i < rows * wide; i += W) store(to.sums + i, load(to.sums + i) + load(next.sums + i));
            for (int i = 0; i < rows * W; i += W) store(to.weights + i, load(to.weights + i) + load(next.weights + i));
            return;
        }
        for (int r = 0; r < rows; r++) {
            const float before = to.references[r], after = next.references[r], most = after <= before ? before : after;
            if (after == MINUS_INF) continue;  // it sees none of the keys
            const float keep = before == most ? 1 : std::exp2(before - most);
            const float scale = after == most ? 1 : std::exp2(after - most);
            auto add = [&](float* x, const float* y) { store(x, load(x) * keep + load(y) * scale); };
            to.references[r] = most;
            for (int i = r * wide; i < (r + 1) * wide; i += W) add(to.sums + i, next.sums + i);
            add(to.weights + r * W, next.weights + r * W);
        }
    }

    void tile(Work& work, int start) const {
        if constexpr (!IS_DIRECT)
            if (layer.is_tiled && work.rows <= ROWS) return tile_of<Stored<S, N>>(work, start);  // each is read by one product
        tile_of<int32_t>(work, start);
    }

    // E: words, in place or repacked; or what is stored, of which products make the same words.
    template <class E>
    void tile_of(Work& work, int start) const {
        constexpr bool IS_STORED = sizeof(E) < 4, IS_THERE = IS_DIRECT || IS_STORED;
        const int count = tile_end(work.task, start) - start, columns = computed(count);
        const int64_t head = work.head;
        const int32_t* table = plan.table + work.members->seq * plan.table_width;
        const E *keys[MAX_KEYS / W], *next_keys[MAX_KEYS / W];
        Values<E> values[MAX_KEYS / GROUP + 1];
        const int key_stride = layer.is_tiled && IS_THERE ? int(layer.block_size) : GROUP;
        int num_values = 0;
        for (int g = 0; g < columns / GROUP; g++) {
            const int64_t place = start + g * GROUP;
            const int present = std::min(GROUP, count - g * GROUP);
            int32_t *const made_k = work.keys + g * GROUP * words, *const made_v = work.values + g * GROUP / N * wide;
            const E *k = (const E*)made_k, *v = (const E*)made_v, *next_k = k, *next_v = v;
            if (!layer.is_tiled) {
                pack_rows(work, table, place, present, g);
            } else {
                const int64_t block = table[place / layer.block_size], offset = place % layer.block_size;
                S *from_k = cache.at(block, head, false), *from_v = cache.at(block, head, true);
                if constexpr (IS_QUANTISED<S>) {
                    memcpy(work.key_scales + g * GROUP, cache.scales(from_k) + offset * 4, GROUP * 4);
                    memcpy(work.value_scales + g * GROUP, cache.scales(from_v) + offset * 4, GROUP * 4);
                }
                S* const next = next_of(work, start + count + g * GROUP);
                if constexpr (IS_THERE) {
                    k = (const E*)from_k + offset;
                    v = (const E*)from_v + offset / N * size;
                    next_k = (const E*)next + offset;
                    next_v = (const E*)(next + cache.half) + offset / N * size;
                } else {
                    for (int w = 0; w < words; w++) {
                        const int64_t at = (w * layer.block_size + offset) * N;
                        fetch(next + at);
                        fetch(next + cache.half + offset * size + w * GROUP * N);
                        P::words(from_k + at, made_k + w * GROUP, GROUP);
                    }
                    P::words(from_v + offset * size, made_v, GROUP / N * size);
                }
            }
            for (int i = 0; i < GROUP / W; i++) {
                keys[g * (GROUP / W) + i] = k + i * W;
                next_keys[g * (GROUP / W) + i] = next_k + i * W;
            }
            const int rows = (present + (IS_STORED ? N - 1 : 0)) / N;  // what is stored is finite where no key is
            if (rows) values[num_values++] = {v, next_v, rows};
            if constexpr (N > 1 && !IS_STORED) {
                if (present % N == 0) continue;  // else zero the unused half of the last words
                const E* from = v + present / N * wide;
                for (int i = 0; i < wide; i++) work.last[i] = from[i] & 0xffff;
                values[num_values++] = {work.last, work.last, 1};
            }
        }
        const Columns<E> all{keys, next_keys, key_stride};
        const bool is_first = start == work.first_key;
        const bool is_usual = count == KEYS && is_whole(work, start, count, 0);
        if (!is_usual || !softmax_in_registers(work, all, is_first)) {
            int column = 0;
            score_columns<COLS>(work, all, columns / W, column);
            score_columns<2>(work, all, columns / W, column);
            score_columns<1>(work, all, columns / W, column);
            online_softmax(work, start, count, 0, work.rows);
        }
        int at = 0;
        for (; at + COLS * W <= wide; at += COLS * W) accumulate_pv_columns<COLS>(work, values, num_values, at, is_first);
        for (; at < wide; at += W) accumulate_pv_columns<1>(work, values, num_values, at, is_first);
    }

    Groups groups_of(const Task& task, int64_t head, int start, bool is_value) const {
        Groups groups;
        if (!layer.is_tiled) return groups;
        const int32_t* table = plan.table + plan.members[task.first_member].seq * plan.table_width;
        const int block_size = int(layer.block_size);
        groups.count = computed(tile_end(task, start) - start) / GROUP;
        groups.stride = (is_value ? GROUP : block_size) * N * int(sizeof(S));
        int block = start / block_size, offset = start % block_size;
        for (int g = 0; g < groups.count; g++) {
            groups.at[g] = cache.at(table[block], head, is_value) + offset * (is_value ? size : N);
            groups.offsets[g] = offset;
            offset += GROUP;
            if (offset == block_size) block++, offset = 0;
        }
        return groups;
    }

    // A tile by AMX, a block of rows at a time. The next operands are prefetched to L1: few prefetches are in flight at a
    // time, and lines in L2 would take a second one.
    void tile_by_blocks(Work& work, int start) const {
        const int after = tile_end(work.task, start), count = after - start, groups = computed(count) / GROUP;
        const bool is_first = start == work.first_key, is_last = after == work.task.last_key;
        const bool is_single = work.rows <= Blocks<P>::ROWS;
        const int32_t* operands[MAX_KEYS / GROUP];
        for (int g = 0; g < groups && !layer.is_tiled; g++) {
            const int32_t* table = plan.table + work.members->seq * plan.table_width;
            pack_rows(work, table, start + g * GROUP, std::min(GROUP, count - g * GROUP), g);
        }
        const Groups keys = groups_of(work.task, work.head, start, false);
        const Groups values = groups_of(work.task, work.head, start, true);
        const Task& next = is_last ? *work.next.task : work.task;
        const int64_t next_head = is_last ? work.next.head : work.head;
        const int next_start = is_last ? next.first_key : after;
        const Groups next_keys = groups_of(next, next_head, next_start, false);
        const Groups next_values = is_single ? values : groups_of(next, next_head, next_start, true);

        auto fetch_values = [&](int g, int piece) { next_values.fetch(g, piece, groups); };
        auto fetch_keys = [&](int g, int piece) { next_keys.fetch(g, piece, groups); };
        auto fetch_none = [](int, int) {};
        const int stride = find_keys(work, keys, groups, operands, fetch_values);
        const Columns<int32_t> columns{operands, nullptr, stride};
        if constexpr (IS_QUANTISED<S>) copy_scales(work, keys, values);
        if (!is_single) pack_values(work, values, count, fetch_keys);
        for (int row = 0; row < work.rows; row += Blocks<P>::ROWS) {
            const int rows = std::min(Blocks<P>::ROWS, work.rows - row), end = row + rows;
            int seen = seen_by(work, end - 1, start, count);
            if (seen <= 0 && !is_first) continue;
            seen = std::max(seen, 1);
            const int some = computed(seen) / GROUP;
            const int32_t* queries = work.queries + row * words;
            float* sums = work.range.sums + row * wide;
            if (end < work.rows) Blocks<P>::score(rows, queries, words, columns, some, work.scores, fetch_none);
            else Blocks<P>::score(rows, queries, words, columns, some, work.scores, fetch_values);
            online_softmax(work, start, seen, row, end);
            if (is_single) pack_values(work, values, count, fetch_keys);
            auto accumulate_pv = [&](const auto& fetch) {
                Blocks<P>::accumulate_pv(rows, work.weights, work.values, some, wide, words, sums, is_first, fetch);
            };
            if (end < work.rows) accumulate_pv(fetch_none);
            else accumulate_pv(fetch_keys);
        }
    }

    // A tile's V in one piece: a step over keys takes two groups, which may lie in two blocks.
    template <class F>
    void pack_values(Work& work, const Groups& values, int count, const F& fetch) const {
        const int groups = computed(count) / GROUP, group_words = GROUP / N * wide;
        for (int g = 0; g < groups && layer.is_tiled; g++) {
            const char* from = (const char*)values.at[g];
            int32_t* to = work.values + g * group_words;
            for (int w = 0; w < words; w++, from += values.stride, to += GROUP) {
                if (!IS_DIRECT && w % PREFETCH_LINES == 0) fetch(g, w);
                P::words((const S*)from, to, GROUP);
            }
        }
        const int present = count - (groups - 1) * GROUP;
        if (present < GROUP) cut(work.values + (groups - 1) * group_words, present);
        if (groups % 2) memset(work.values + groups * group_words, 0, group_words * 4);
    }

    // Keys of a tile up to the last that a row, or one before it, sees.
    int seen_by(const Work& work, int row, int start, int count) const {
        if (work.task.num_members > 1 || plan.tree) return count;
        return std::min(work.members->place + row / group + 1 - start, count);
    }

    // A tile's K, in place or repacked. Returns the words between rows.
    template <class F>
    int find_keys(Work& work, const Groups& keys, int count, const int32_t** found, const F& fetch) const {
        const bool is_there = IS_DIRECT && layer.is_tiled;
        for (int g = 0; g < count; g++) {
            int32_t* const made = work.keys + g * GROUP * words;
            found[g] = is_there ? (const int32_t*)keys.at[g] : made;
            if (is_there || !layer.is_tiled) continue;
            for (int w = 0; w < words; w++) {
                if (!IS_DIRECT && w % PREFETCH_LINES == 0) fetch(g, w);
                P::words((const S*)((const char*)keys.at[g] + w * keys.stride), made + w * GROUP, GROUP);
            }
        }
        return is_there ? int(layer.block_size) : GROUP;
    }

    void copy_scales(Work& work, const Groups& keys, const Groups& values) const {
        for (int g = 0; g < keys.count; g++) {
            const int64_t offset = keys.offsets[g];
            memcpy(work.key_scales + g * GROUP, cache.scales(keys.at[g] - offset * N) + offset * 4, GROUP * 4);
            memcpy(work.value_scales + g * GROUP, cache.scales(values.at[g] - offset * size) + offset * 4, GROUP * 4);
        }
    }

    // Zeros in the place of keys that a group has not, whatever lies there.
    void cut(int32_t* v, int present) const {
        const int rows = (present + N - 1) / N;
        for (int i = 0; i < wide && present % N; i++) v[(rows - 1) * wide + i] &= 0xffff;
        memset(v + rows * wide, 0, (GROUP / N - rows) * wide * 4);
    }

    // The block that will be read when this place has been passed by a tile: of the same task, or of what probably comes
    // next.
    S* next_of(const Work& work, int64_t place) const {
        const Task* task = &work.task;
        int64_t head = work.head;
        if (place >= task->last_key) {
            place -= task->last_key;
            task = work.next.task, head = work.next.head;
            place = std::min<int64_t>(place + task->first_key, task->last_key - 1);
        }
        const int32_t* table = plan.table + plan.members[task->first_member].seq * plan.table_width;
        return cache.at(table[place / layer.block_size], head, false);
    }

    template <int C, class E>
    void score_columns(Work& work, const Columns<E>& keys, int num_vectors, int& column) const {
        for (; column + C <= num_vectors; column += C) {
            const Columns<E> some{keys.at + column, keys.next + column, keys.stride};
            score_rows<P, C>(work.rows, work.queries, words, some, words, [&](int row, const vf (&sums)[C]) {
                for (int i = 0; i < C; i++) store(work.scores + row * MAX_KEYS + (column + i) * W, sums[i]);
            });
        }
    }

    // Online softmax of a tile without masked keys, while its scores are in registers; the same result as `online_softmax`.
    // Returns false, having changed nothing, if a row may need another reference.
    template <class E>
    bool softmax_in_registers(Work& work, const Columns<E>& keys, bool is_first) const {
        const float scale = layer.scale * LOG2_E;
        vf lane_max = splat(MINUS_INF), lane_min = splat(1.0f);
        for (int column = 0; column < KEYS / W; column += COLS) {
            const Columns<E> some{keys.at + column, keys.next + column, keys.stride};
            auto put = [=, &lane_max, &lane_min, &work](int row, const vf (&sums)[COLS]) {
                const float reference = is_first ? 0 : work.range.references[row];
                vf total = column ? load(work.tile_sum + row * W) : vf{};
                auto weight_of = [&](int i) {
                    const vf e = vexp2<IS_EXACT>(sums[i / W] * scale - reference);
                    total += e;
                    return e;
                };
#pragma GCC unroll 8
                for (int i = 0; i < COLS * W; i += N * W)
                    P::pack(work.weights + (row * MAX_KEYS + column * W + i) / N, i, COLS * W, weight_of);
                store(work.tile_sum + row * W, total);
                lane_max = vmax(total, lane_max);
                lane_min = total < lane_min ? total : lane_min;
            };
            score_rows<P, COLS>(work.rows, work.queries, words, some, words, put);
        }
        if (reduce_max(lane_max) > MAX_WEIGHT_SUM) return false;
        if (is_first) {
            if (reduce_max(-lane_min) > -MIN_WEIGHT_SUM) return false;
            memset(work.range.references, 0, work.rows * sizeof(float));
        }
        for (int i = 0; i < work.rows * W; i += W) store(work.range.weights + i, load(work.range.weights + i) + load(work.tile_sum + i));
        return true;
    }

    template <int C, class E>
    void accumulate_pv_columns(Work& work, const Values<E>* values, int num_values, int at, bool is_first) const {
        Values<E> part[MAX_KEYS / GROUP + 1];
        for (int i = 0; i < num_values; i++) part[i] = {values[i].at + at, values[i].next + at, values[i].rows};
        accumulate_pv_rows<P, C>(work.rows, work.weights, part, num_values, wide, work.range.sums + at, wide, is_first);
    }

    // Repack a group's keys and values from rows to a tile. Words of missing keys are zero.
    void pack_rows(Work& work, const int32_t* table, int64_t place, int present, int g) const {
        int32_t *k = work.keys + g * GROUP * words, *v = work.values + g * GROUP / N * wide;
        memset(k, 0, GROUP * words * 4);
        memset(v, 0, GROUP / N * wide * 4);
        for (int j = 0; j < present; j++, place++) {
            const int64_t block = table[place / layer.block_size], offset = place % layer.block_size;
            S *from_k = cache.at(block, work.head, false), *from_v = cache.at(block, work.head, true);
            if constexpr (IS_QUANTISED<S>) {
                memcpy(work.key_scales + g * GROUP + j, cache.scales(from_k) + offset * 4, 4);
                memcpy(work.value_scales + g * GROUP + j, cache.scales(from_v) + offset * 4, 4);
            }
            for (int i = 0; i < size; i++) {
                set_number(k + i / N * GROUP, j * N + i % N, to_float(from_k[offset * size + i]));
                set_number(v + j / N * wide, i * N + j % N, to_float(from_v[offset * size + i]));
            }
        }
    }

    // Columns of a tile that a token sees, ignoring trees: [low, high).
    void range(const Tokens& member, int token, int start, int count, int& low, int& high) const {
        const int64_t place = member.place + token;
        low = 0, high = count;
        if (plan.tree) return;
        if (layer.window) low = int(std::max<int64_t>(0, place - layer.window + 1 - start));
        high = int(std::min<int64_t>(place + 1 - start, count));
    }

    // Hide keys from a row of scores by a tree mask. start: place of the tile's first key.
    void hide_by_tree(const Tokens& member, int token, int start, int count, float* s) const {
        const int64_t t = member.first + token, offset = member.place - member.past + token;
        const uint8_t* sees = plan.tree + t * plan.tree_width;
        const int64_t position = plan.positions[t];
        for (int j = 0; j < count; j++) {
            int64_t key = start + j, at = key;
            if (key >= member.past) {
                if (!sees[key - member.past]) {
                    s[j] = MINUS_INF;
                    continue;
                }
                at = plan.positions[t - offset + key - member.past];
            }
            if (layer.window && at <= position - layer.window) s[j] = MINUS_INF;
        }
    }

    // Online softmax over one tile. A row's reference, the running maximum or 0, is only updated when a score exceeds it by SPAN
    // (as in FlashAttention-4), which saves rescaling the accumulator. Three passes over the rows, to avoid the latency of one
    // row's maximum.
    void online_softmax(Work& work, int start, int count, int first, int last) const {
        const bool is_scaled = IS_QUANTISED<S> || layer.soft_cap != 0;
        const float scale = is_scaled ? 1.0f : layer.scale * LOG2_E;  // to units of the binary logarithm
        const int columns = computed(count);
        hide(work, start, count, first, last);
        find_row_max(work, scale, columns, first, last);
        for (int r = first; r < last; r += W) {
            const vf none = splat(MINUS_INF), before = load(work.range.references + r), peak = load(work.row_max + r);
            const vi is_near = (before == none) & (peak >= -SPAN) & (peak <= SPAN);
            const vf top = is_near ? vf{} : peak > before + SPAN ? peak : before;
            store(work.factors + r, before == none ? vf{} : vexp2<true>(before - top));
            store(work.range.references + r, top);
            store(work.row_max + r, top == none ? vf{} : top);  // all masked so far: any finite number serves
        }
        for (int r = first; r < last && start > work.first_key; r++)
            for (int i = r * wide; i < (r + 1) * wide && work.factors[r] != 1.0f; i += W)
                store(work.range.sums + i, load(work.range.sums + i) * work.factors[r]);
        if (columns == KEYS) exponents(work, scale, KEYS, first, last);
        else exponents(work, scale, columns, first, last);
    }

    void find_row_max(Work& work, float scale, int columns, int first, int last) const {
        int row = first;
        for (; row + W <= last && columns == KEYS; row += W)
            store(work.row_max + row, rows_max_of<KEYS>(work.scores + (row - first) * MAX_KEYS, MAX_KEYS) * scale);
        for (; row < last; row++) {
            const float* s = work.scores + (row - first) * MAX_KEYS;
            vf lane_max = load(s);
            for (int i = W; i < columns; i += W) lane_max = vmax(load(s + i), lane_max);
            work.row_max[row] = reduce_max(lane_max) * scale;
        }
    }

    __attribute__((always_inline)) void exponents(Work& work, float scale, int columns, int first, int last) const {
        for (int r = first; r < last; r++) {
            const float* s = work.scores + (r - first) * MAX_KEYS;
            const float reference = work.row_max[r];
            vf total{};
            auto weight_of = [&](int i) {
                const vf e = vexp2<IS_EXACT>(load(s + i) * scale - reference);
                total += e;
                if constexpr (!IS_QUANTISED<S>) return e;
                return e == vf{} ? vf{} : e * load(work.value_scales + i);  // masked keys may hold NaN
            };
            int32_t* weights = work.weights + (r - first) * (MAX_KEYS / N);
            for (int i = 0; i < columns; i += N * W) P::pack(weights + i / N, i, columns, weight_of);
            store(work.range.weights + r * W, load(work.range.weights + r * W) * work.factors[r] + total);
        }
    }

    // Whether all rows from `row` on see a tile's keys, and all factors of its scores are the same.
    bool is_whole(const Work& work, int start, int count, int row) const {
        if (IS_QUANTISED<S> || layer.soft_cap != 0 || count % GROUP) return false;
        if (work.task.num_members > 1) return true;
        const Tokens& first = *work.members;
        const bool starts_whole = !layer.window || first.place + first.count - layer.window <= start;
        return !plan.tree && starts_whole && start + count <= first.place + row / group + 1;
    }

    // Apply per-key scales and the soft cap to scores, and set masked ones to MINUS_INF.
    void hide(Work& work, int start, int count, int row, int last) const {
        if (is_whole(work, start, count, row)) return;
        const Tokens& first = *work.members;
        const bool is_shared = work.task.num_members > 1, is_scaled = IS_QUANTISED<S> || layer.soft_cap != 0;
        const bool needs_tree = plan.tree && !is_shared && (layer.window || start + count > first.past);
        const int columns = computed(count);
        int low = 0, high = count;
        for (int r = row; r < last; r++) {
            float* s = work.scores + (r - row) * MAX_KEYS;
            if (is_scaled) scale_row(work, s, columns);
            if (!is_shared) range(first, r / group, start, count, low, high);
            for (int j = 0; j < std::min(low, columns); j++) s[j] = MINUS_INF;
            for (int j = std::max(high, 0); j < columns; j++) s[j] = MINUS_INF;
            if (needs_tree) hide_by_tree(first, r / group, start, count, s);
        }
    }

    void scale_row(const Work& work, float* s, int columns) const {
        for (int i = 0; i < columns; i += W) {
            vf x = load(s + i) * layer.scale;
            if (IS_QUANTISED<S>) x *= load(work.key_scales + i);
            if (layer.soft_cap != 0) x = soft_capped(x, layer.soft_cap);
            store(s + i, x * LOG2_E);
        }
    }

    __attribute__((noinline)) void finish(Work& work) const {
        const int64_t heads = layer.num_kv_heads;
        auto rows_of = [&](const Outcome& all, int row) {
            return Outcome{all.sums + row * wide, all.weights + row * W, all.references + row};
        };
        auto part = [&](int64_t index) {  // its sums, weights and references lie one after another
            float* at = plan.parts + (index * heads + work.head) * plan.part_rows * (wide + W + 1);
            return Outcome{at, at + plan.part_rows * wide, at + plan.part_rows * (wide + W)};
        };
        int row = 0;
        for (int m = 0; m < work.task.num_members; m++) {
            const Tokens& member = work.members[m];
            const int rows = member.count * group;
            const Outcome own = rows_of(work.joined, row);
            row += rows;
            if (member.part < 0) {
                write(member, work.head, own, rows);
                continue;
            }
            const Outcome to = part(member.part), first = part(member.first_part);
            memcpy(to.sums, own.sums, size_t(rows) * wide * 4);
            memcpy(to.weights, own.weights, size_t(rows) * W * 4);
            memcpy(to.references, own.references, size_t(rows) * 4);
            int32_t* counter = plan.finished + member.first_part * heads + work.head;
            if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) < member.num_parts) continue;
            *counter = 0;  // for the next layer
            for (int p = 1; p < member.num_parts; p++) join(first, part(member.first_part + p), rows);
            write(member, work.head, first, rows);
        }
    }

    void write(const Tokens& member, int64_t head, const Outcome& from, int rows) const {
        for (int r = 0; r < rows; r++) {
            const float *sums = from.sums + r * wide, scale = 1.0f / reduce_add(load(from.weights + r * W));
            T* to = out + ((member.first + r / group) * layer.num_heads + head * group + r % group) * size;
            int i = 0;
            for (; i + W <= size; i += W) store(to + i, load(sums + i) * scale);
            for (; i < size; i++) store_one(to + i, sums[i] * scale);
        }
    }

    void all(fwk::PoolThread& m) const {
        const int heads = int(layer.num_kv_heads);
        const bool are_few = !Blocks<P>::ARE_USED || plan.num_tokens * group <= plan.num_tasks * W;  // rows of a task
        if (are_few && plan.num_tasks >= MIN_PARALLEL_TASKS)  // heads of a task lie side by side
            return m.parallel_for_ordered(plan.num_tasks, [&](int64_t i, int64_t next) {
                const Task *task = plan.tasks + i, *after = plan.tasks + next;
                for (int head = 0; head < heads; head++)
                    run({task, head}, head + 1 < heads ? Piece{task, head + 1} : Piece{after, 0});
            });
        auto piece = [&](int64_t i) {  // of a prompt, keys of one head are read by many tasks
            if (are_few) return Piece{plan.tasks + i / heads, int(i % heads)};
            return Piece{plan.tasks + i % plan.num_tasks, int(i / plan.num_tasks)};
        };
        m.parallel_for_ordered(plan.num_tasks * heads, [&](int64_t i, int64_t next) { run(piece(i), piece(next)); });
    }
};

// Store k and v of all new tokens, then attend.
template <class T, class S, class P>
void attend(const Attend& a, fwk::PoolThread& m) {
    const Layer& layer = *a.layer;
    const Plan& plan = *a.plan;
    const Cache<S, P> cache{(S*)a.cache, layer};
    m.parallel_for_ordered((plan.num_tokens + TOKENS_PER_CHUNK - 1) / TOKENS_PER_CHUNK, [&](int64_t i, int64_t) {
        for (int64_t t = i * TOKENS_PER_CHUNK; t < std::min((i + 1) * TOKENS_PER_CHUNK, plan.num_tokens); t++) {
            const int64_t block = plan.slots[t] / layer.block_size, offset = plan.slots[t] % layer.block_size;
            for (int64_t h = 0; h < layer.num_kv_heads; h++) {
                cache.put((const T*)a.k + t * a.k_stride + h * layer.head_size, block, offset, h, false);
                cache.put((const T*)a.v + t * a.v_stride + h * layer.head_size, block, offset, h, true);
            }
        }
    });
#if defined(FWK_TILES)
    const fwk::tiles::Region region;
#endif
    Step<T, S, P>{(const T*)a.q, a.q_stride, cache, (T*)a.out, layer, plan}.all(m);
}

#ifdef __AVX512BF16__
typedef Pairs Bfloats;
#else
typedef Floats Bfloats;
#endif

}  // namespace
