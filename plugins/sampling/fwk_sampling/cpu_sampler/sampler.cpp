// From logits to tokens, a row at a time: temperature, top_k, top_p and min_p, then inverse CDF.
//
// A row's logits are read once for the maxima of blocks of token ids. The k-th largest block maximum is a lower bound of the
// k-th largest logit, so with top_k a second pass gathers the few entries above it. Otherwise the weights of all entries are
// computed, and the end of the nucleus is found by a search with several thresholds per pass.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fwk/thread_pool.h"
#include "fwk/vectors.h"

extern "C" {

struct Settings {
    double draw;        // in (0, 1)
    float temperature;  // 0: the most likely token
    float top_p;        // 1: off
    float min_logit;    // ln(min_p); -inf: off
    int32_t top_k;      // 0: off
};

struct Sample {
    const void* logits;  // [num_rows, vocab_size]; numbers from row to row
    int64_t stride, vocab_size, num_rows;
    const Settings* settings;  // [num_rows], or null: the most likely token of each
    int64_t* tokens;           // [num_rows]
};

struct Mask {
    void* logits;  // [num_rows, vocab_size]; stride numbers from row to row
    int64_t stride, vocab_size, num_masks;
    const int64_t* rows;    // [num_masks]
    const uint32_t* masks;  // [num_masks, ceil(vocab_size / 32)]: a set bit is allowed
};

}  // extern "C"

namespace {

using namespace fwk;

constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int CHUNK = 1024;          // entries of a block, which has one maximum per lane
constexpr int THRESHOLDS = 7;        // per pass of the search for the end of a nucleus
constexpr int64_t MAX_SORTED = 256;  // entries from which down sorting is faster than another pass

constexpr float LOWEST = -std::numeric_limits<float>::max();

struct Entry {
    float value;
    int32_t id;
    double weight;
};

// The rows of one thread. T: number of the logits.
template <class T>
class Row {
  public:
    // Token id, or -1 for a row with NaN or +inf, or without a finite logit.
    int64_t pick(const T* logits, int64_t n, const Settings& wanted) {
        x = logits, count = n, settings = &wanted;
        if (!scan()) return -1;
        if (wanted.temperature == 0 || wanted.top_k == 1 || wanted.min_logit >= 0) return first_of_largest();
        scale = LOG2_E / wanted.temperature;
        lowest = wanted.min_logit * LOG2_E;
        if (wanted.top_k > 0 && wanted.top_k < n) return pick_of(largest(wanted.top_k));
        is_alone = false;
        const float end = wanted.top_p < 1 ? nucleus_end() : MINUS_INF;
        return is_alone ? first_of_largest() : pick_of_all(end);
    }

  private:
    const T* x;
    int64_t count;
    const Settings* settings;
    float top;     // the largest logit
    float scale;   // from logits to binary logarithms of weights
    bool is_alone;  // the nucleus has room for one entry
    float lowest;  // binary logarithm of the least weight that is kept, the largest being 1
    std::vector<float> maxima, ranked, weights;
    std::vector<Entry> entries;
    std::vector<double> sums;

    // W logits from this place on; what lies past the end is -inf.
    vf load_at(int64_t i) const {
        if (i + W <= count) return load(x + i);
        T rest[W];
        for (int j = 0; j < W; j++) rest[j] = i + j < count ? x[i + j] : minus_infinity();
        return load(rest);
    }
    static T minus_infinity() { return sizeof(T) == 2 ? T(0xff80) : T(MINUS_INF); }

    // f(place, numbers) for all logits from one place to another.
    template <class F>
    void each(int64_t from, int64_t to, F f) const {
        for (; from + W <= to; from += W) f(from, load(x + from));
        if (from < to) f(from, load_at(from));
    }

    bool scan() {
        maxima.resize((count + CHUNK - 1) / CHUNK * W);
        vi worst{};  // bits without the sign: what is not a number has the largest
        vf all = splat(MINUS_INF);
        for (int64_t i = 0; i < count; i += CHUNK) {
            vf lane_max[4] = {splat(MINUS_INF), splat(MINUS_INF), splat(MINUS_INF), splat(MINUS_INF)};
            auto take = [&](vf& lane_max, vf y) {
                const vi size = (vi)y & 0x7fffffff;
                worst = size > worst ? size : worst;
                lane_max = vmax(y, lane_max);
            };
            int64_t j = i;
            const int64_t end = std::min(i + CHUNK, count);
            for (; j + 4 * W <= end; j += 4 * W)
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) take(lane_max[k], load(x + j + k * W));
            each(j, end, [&](int64_t, vf y) { take(lane_max[0], y); });
            const vf both = vmax(vmax(lane_max[0], lane_max[1]), vmax(lane_max[2], lane_max[3]));
            store(maxima.data() + i / CHUNK * W, both);
            all = vmax(both, all);
        }
        for (int j = 0; j < W; j++)
            if (worst[j] > 0x7f800000) return false;
        top = reduce_max(all);
        return top - top == 0;
    }

    int64_t first_of_largest() const {
        for (int64_t i = 0; i < count; i += CHUNK) {
            const float* lane_max = maxima.data() + i / CHUNK * W;
            if (std::find(lane_max, lane_max + W, top) == lane_max + W) continue;
            for (int64_t j = i;; j++)
                if (number(j) == top) return j;
        }
        return -1;
    }

    float number(int64_t i) const { return to_float(x[i]); }
    double weight(float value) const { return std::exp2(double(value - top) * scale); }
    vf log_weights(vf y) const { return (y - top) * scale; }

    void gather(float low, float high) {
        entries.clear();
        each(0, count, [&](int64_t i, vf y) {
#ifdef __AVX512F__
            const __mmask16 above = _mm512_cmp_ps_mask((__m512)y, _mm512_set1_ps(low), _CMP_GE_OQ);
            uint32_t hits = _mm512_mask_cmp_ps_mask(above, (__m512)y, _mm512_set1_ps(high), _CMP_LT_OQ);
            for (; hits; hits &= hits - 1) add(y[__builtin_ctz(hits)], i + __builtin_ctz(hits));
#else
            const vi hits = (y >= low) & (y < high);
            for (int j = 0; j < W; j++)
                if (hits[j]) add(y[j], i + j);
#endif
        });
    }
    void add(float value, int64_t id) { entries.push_back({value, int32_t(id), 0}); }

    // The k largest entries and those that equal the k-th, largest first.
    int64_t largest(int64_t k) {
        float bound = LOWEST;
        if (k <= int64_t(maxima.size())) {
            ranked = maxima;
            std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater<float>());
            bound = std::max(bound, ranked[k - 1]);
        }
        gather(bound, -MINUS_INF);
        if (k < int64_t(entries.size())) {
            std::nth_element(entries.begin(), entries.begin() + (k - 1), entries.end(), is_larger);
            const float last = entries[k - 1].value;
            auto is_less = [&](const Entry& e) { return e.value < last; };
            entries.erase(std::remove_if(entries.begin(), entries.end(), is_less), entries.end());
        }
        std::sort(entries.begin(), entries.end(), is_larger);
        for (Entry& e : entries) e.weight = weight(e.value);
        return int64_t(entries.size());
    }
    static bool is_larger(const Entry& a, const Entry& b) {
        return a.value > b.value || (a.value == b.value && a.id < b.id);
    }

    // How many of the first n entries, largest first, it takes to hold ``share``, equals of the last included.
    int64_t num_held(int64_t n, double share, double held) const {
        int64_t kept = 0;
        do held += entries[kept++].weight;
        while (kept < n && held < share);
        while (kept < n && entries[kept].value == entries[kept - 1].value) kept++;
        return kept;
    }

    // Draw from the first n entries, largest first, as far as top_p and min_p leave them; by id.
    int64_t pick_of(int64_t n) {
        double total = 0;
        for (int64_t i = 0; i < n; i++) total += entries[i].weight;
        if (settings->top_p < 1 && entries[0].weight >= total * settings->top_p) return entries[0].id;  // enough alone
        if (settings->top_p < 1) n = num_held(n, total * settings->top_p, 0);
        while (n > 1 && (entries[n - 1].value - top) * scale < lowest) n--;
        std::sort(entries.begin(), entries.begin() + n, [](const Entry& a, const Entry& b) { return a.id < b.id; });
        total = 0;
        for (int64_t i = 0; i < n; i++) total += entries[i].weight;
        const double target = std::min(settings->draw * total, std::nextafter(total, 0.0));
        double below = 0;
        int64_t last = 0;
        for (int64_t i = 0; i < n && below <= target; i++) {
            if (entries[i].weight > 0) last = i;
            below += entries[i].weight;
        }
        return entries[last].id;
    }

    // The logit at which the largest entries hold top_p of all weights.
    float nucleus_end() {
        weights.resize((count + W - 1) / W * W);
        double total = 0;
        for (int64_t i = 0; i < count; i += CHUNK) {
            vf sum{};
            each(i, std::min(i + CHUNK, count), [&](int64_t j, vf y) {
                const vf w = vexp2<true>(log_weights(y));
                store(weights.data() + j, w);
                sum += w;
            });
            total += reduce_add(sum);
        }
        const double share = total * settings->top_p;
        is_alone = share <= 1;  // the weight of the largest
        if (is_alone) return top;
        // Entries from ``high`` on hold less than the share, those from ``low`` on at least as much (but for what is
        // too small to count).
        float low = std::max(top - 64 / scale, LOWEST), high = std::nextafter(top, -MINUS_INF);
        double held = 0;
        for (int64_t between = count, before = 0; between > MAX_SORTED && between != before;) {
            before = between;
            narrow(share, low, high, held, between);
        }
        gather(low, high);
        if (entries.empty()) return low;
        std::sort(entries.begin(), entries.end(), is_larger);
        for (Entry& e : entries) e.weight = weights[e.id];
        return entries[num_held(int64_t(entries.size()), share, held) - 1].value;
    }

    // Divide the interval by thresholds, and keep the part in which the share is reached. held: by entries above it.
    void narrow(double share, float& low, float& high, double& held, int64_t& between) const {
        float at[THRESHOLDS + 2];
        for (int k = 0; k <= THRESHOLDS; k++) {
            const float part = float(k) / (THRESHOLDS + 1);
            at[k] = low * (1 - part) + high * part;
        }
        at[THRESHOLDS + 1] = high;
        double sums[THRESHOLDS + 1]{};
        int64_t counts[THRESHOLDS + 2]{};
        for (int64_t i = 0; i < count; i += CHUNK) {
            vf sum[THRESHOLDS + 1]{};
            vi number[THRESHOLDS + 2]{};
            each(i, std::min(i + CHUNK, count), [&](int64_t j, vf y) {
                const vf w = load(weights.data() + j);
#pragma GCC unroll 8
                for (int k = 0; k <= THRESHOLDS; k++) {
                    const vi is_above = y >= at[k];
                    sum[k] += is_above ? w : vf{};
                    number[k] -= is_above;
                }
                number[THRESHOLDS + 1] -= y >= high;
            });
            for (int k = 0; k <= THRESHOLDS; k++) sums[k] += reduce_add(sum[k]);
            for (int k = 0; k <= THRESHOLDS + 1; k++)
                for (int j = 0; j < W; j++) counts[k] += number[k][j];
        }
        int k = THRESHOLDS;
        while (k > 0 && sums[k] < share) k--;
        if (k < THRESHOLDS) held = sums[k + 1];
        between = counts[k] - counts[k + 1];
        low = at[k], high = at[k + 1];
    }

    // Draw from all entries that are not below ``cutoff``, as far as min_p leaves them.
    int64_t pick_of_all(float cutoff) {
        auto kept = [&](vf y) {
            const vf d = log_weights(y);
            return (y >= cutoff) & (d >= lowest) ? vexp2<true>(d) : vf{};
        };
        sums.clear();
        double total = 0;
        for (int64_t i = 0; i < count; i += CHUNK) {
            vf sum{};
            each(i, std::min(i + CHUNK, count), [&](int64_t, vf y) { sum += kept(y); });
            sums.push_back(reduce_add(sum));
            total += sums.back();
        }
        double rest = std::min(settings->draw * total, std::nextafter(total, 0.0));
        int64_t chunk = 0, last_chunk = 0;
        for (; chunk < int64_t(sums.size()) && rest >= sums[chunk]; rest -= sums[chunk++])
            if (sums[chunk] > 0) last_chunk = chunk;
        if (chunk == int64_t(sums.size())) chunk = last_chunk;
        int64_t found = -1;
        double below = 0;
        each(chunk * CHUNK, std::min((chunk + 1) * CHUNK, count), [&](int64_t i, vf y) {
            const vf w = kept(y);
            for (int j = 0; j < W && below <= rest; j++) {
                if (w[j] > 0) found = i + j;
                below += w[j];
            }
        });
        return found;
    }
};

template <class T>
void sample(const Sample& a, fwk::PoolThread& m) {
    static const Settings greedy{};
    m.parallel_for(a.num_rows, [&](int64_t i) {
        thread_local Row<T> row;
        const Settings& settings = a.settings ? a.settings[i] : greedy;
        a.tokens[i] = row.pick((const T*)a.logits + i * a.stride, a.vocab_size, settings);
    });
}

constexpr int64_t TOKENS = 8192;  // of a row that a thread masks at a time

template <class T>
void mask_span(T* logits, const uint32_t* masks, int64_t n, T minus_inf) {
    for (int64_t i = 0; i < n; i += 32) {
        const uint32_t word = masks[i / 32];
        if (word == ~0u) continue;
        if (n - i >= 32)
            for (int j = 0; j < 32; j++) logits[i + j] = word >> j & 1 ? logits[i + j] : minus_inf;
        else
            for (int64_t j = 0; j < n - i; j++) logits[i + j] = word >> j & 1 ? logits[i + j] : minus_inf;
    }
}

template <class T>
void mask(const Mask& a, fwk::PoolThread& m, T minus_inf) {
    const int64_t spans = (a.vocab_size + TOKENS - 1) / TOKENS, words = (a.vocab_size + 31) / 32;
    m.parallel_for(a.num_masks * spans, [&](int64_t i) {
        const int64_t row = i / spans, start = i % spans * TOKENS;
        mask_span((T*)a.logits + a.rows[row] * a.stride + start, a.masks + row * words + start / 32,
                  std::min(TOKENS, a.vocab_size - start), minus_inf);
    });
}

}  // namespace

extern "C" {

void mask_float32(const void* args, fwk::PoolThread& m) { mask<float>(*(const Mask*)args, m, MINUS_INF); }
void mask_bfloat16(const void* args, fwk::PoolThread& m) { mask<uint16_t>(*(const Mask*)args, m, 0xFF80); }
void sample_float32(const void* args, fwk::PoolThread& m) { sample<float>(*(const Sample*)args, m); }
void sample_bfloat16(const void* args, fwk::PoolThread& m) { sample<uint16_t>(*(const Sample*)args, m); }

}  // extern "C"
