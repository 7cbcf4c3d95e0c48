// What a step consists of. The structures are those of plan.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

constexpr int GROUP = 16;  // keys that stand together in a tile
constexpr int STEP = 2 * GROUP;  // keys that AMX adds up at a time: a window's first is a multiple where blocks are

extern "C" {

struct Tokens {  // query tokens of one sequence in a task
    int32_t seq;         // row of the block table
    int32_t first;       // first query token, in the batch
    int32_t count;       // query tokens
    int32_t place;       // of the first query token in its sequence
    int32_t past;        // keys that are there since earlier steps: a tree mask says who sees the others
    int32_t part;        // index of its partial result; -1: the task has all keys
    int32_t first_part;  // of the sequence's partial results
    int32_t num_parts;
};

struct Task {
    int32_t first_member, num_members;  // several: the range of keys is in their common past
    int32_t first_key, last_key;        // places; the first is a multiple of GROUP
};

struct Plan {
    const Tokens* members;
    const Task* tasks;
    const int64_t* slots;      // [num_tokens]
    const int32_t* table;      // [num_seqs, table_width]
    const int64_t* positions;  // [num_tokens]; only with a tree mask
    const uint8_t* tree;       // [num_tokens, tree_width] or null
    float* parts;              // [num_parts, num_kv_heads, part_rows, padded head size + vector + 1]
    int32_t* finished;         // [num_parts, num_kv_heads] of zeros
    int64_t table_width, tree_width, num_tasks, num_tokens, part_rows;
    int64_t range;             // keys whose results are joined with those before them: a multiple of those of a tile
};

struct Layer {
    int64_t num_heads, num_kv_heads, head_size, block_size, window;  // window: 0 for none
    int64_t is_tiled;
    float scale, soft_cap;  // soft_cap: 0 for none
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

struct Question {  // what a plan is made for
    const int32_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;     // [num_seqs]
    const int32_t* table;        // [num_seqs, table_width]
    const uint8_t* wanted;       // [num_tokens] whether a token's output is needed; null: all are
    int64_t num_seqs, table_width, block_size, group, window, is_tree;
    // Rows of a task; up to few_rows, each range of `range` keys is a task.
    int64_t max_rows, few_rows, range;
};

struct Answer {
    int64_t num_tasks, num_parts, part_rows, num_scores;  // scores of one query head of each group
};

// Fill ``members`` and ``tasks``, which have room for the tokens, the ranges of all sequences and two more for each.
void plan_attention(const Question* question, Tokens* members, Task* tasks, Answer* answer) {
    const Question& ask = *question;
    const int64_t max_tokens = std::max<int64_t>(1, ask.max_rows / ask.group);
    const int64_t blocks = ask.range % ask.block_size ? 0 : ask.range / ask.block_size;  // of a range
    const int64_t step = ask.block_size % STEP ? GROUP : STEP;
    Answer found{};
    int32_t num_members = 0;
    struct Cut {  // a sequence whose keys are split, and where its partial results go
        Tokens member;
        int64_t low, high, shared;  // ranges; those before ``shared`` are all in its past
    };
    std::vector<Cut> cuts;
    auto add = [&](int64_t first_key, int64_t last_key, int32_t count) {
        tasks[found.num_tasks++] = {num_members, count, int32_t(first_key / step * step), int32_t(last_key)};
    };
    for (int64_t seq = 0; seq < ask.num_seqs; seq++) {
        const int64_t start = ask.query_start[seq], num_new = ask.query_start[seq + 1] - start;
        const int64_t length = ask.seq_lens[seq], past = length - num_new;
        for (int64_t at = 0; at < num_new; at += max_tokens) {
            Tokens member{int32_t(seq), int32_t(start + at), int32_t(std::min(max_tokens, num_new - at)),
                          int32_t(past + at), int32_t(past), -1, 0, 1};
            if (ask.wanted && !memchr(ask.wanted + member.first, 1, member.count)) continue;
            const int64_t lowest = ask.is_tree ? past : past + at;
            const int64_t first = ask.window ? std::max<int64_t>(0, lowest - ask.window + 1) : 0;
            const int64_t last = ask.is_tree ? length : past + at + member.count;
            const int64_t low = first / ask.range, high = (last + ask.range - 1) / ask.range;
            found.num_scores += (last - first) * member.count * ask.group;
            if (num_new * ask.group > ask.few_rows || high - low == 1) {
                add(first, last, 1);
                members[num_members++] = member;
                continue;
            }
            member.first_part = int32_t(found.num_parts), member.num_parts = int32_t(high - low);
            found.num_parts += high - low;
            found.part_rows = std::max<int64_t>(found.part_rows, member.count * ask.group);
            cuts.push_back({member, low, high, ask.window || !blocks ? 0 : past / ask.range});
            for (int64_t r = low; r < high; r++) {
                if (r < cuts.back().shared) continue;  // below, together with others
                member.part = int32_t(member.first_part + r - low);
                add(std::max(first, r * ask.range), std::min(last, (r + 1) * ask.range), 1);
                members[num_members++] = member;
            }
        }
    }
    // Sequences with the same blocks in a range (a shared prefix) share one task.
    int64_t max_shared = 0;
    for (const Cut& cut : cuts) max_shared = std::max(max_shared, cut.shared);
    std::unordered_map<uint64_t, std::vector<size_t>> alike;
    for (int64_t r = 0; r < max_shared; r++) {
        alike.clear();
        for (size_t i = 0; i < cuts.size(); i++) {
            if (r >= cuts[i].shared) continue;
            const int32_t* ids = ask.table + cuts[i].member.seq * ask.table_width + r * blocks;
            uint64_t hash = 0;
            for (int64_t b = 0; b < blocks; b++) hash = (hash ^ uint32_t(ids[b])) * 0x9E3779B97F4A7C15u;
            alike[hash].push_back(i);
        }
        for (auto& [hash, indices] : alike) {
            while (!indices.empty()) {
                const Cut& leader = cuts[indices.front()];
                const int32_t* ids = ask.table + leader.member.seq * ask.table_width + r * blocks;
                std::vector<size_t> rest;
                int32_t count = 0;
                int64_t rows = 0;
                const int32_t first_member = num_members;
                for (size_t i : indices) {
                    const Cut& cut = cuts[i];
                    const int32_t* own = ask.table + cut.member.seq * ask.table_width + r * blocks;
                    const int64_t more = cut.member.count * ask.group;
                    if ((count && rows + more > ask.max_rows) || memcmp(own, ids, blocks * 4)) {
                        rest.push_back(i);
                        continue;
                    }
                    members[num_members] = cut.member;
                    members[num_members++].part = int32_t(cut.member.first_part + r - cut.low);
                    rows += more;
                    count++;
                }
                tasks[found.num_tasks++] = {first_member, count, int32_t(r * ask.range), int32_t((r + 1) * ask.range)};
                indices.swap(rest);
            }
        }
    }
    *answer = found;
}

}  // extern "C"
