// The vocabulary head: logits of the rows, and in the same pass the k best candidates of each.
//
// Logits are float32 as they leave the product, never rounded. A row's candidates are the k largest of its biased,
// allowed logits, the largest first; of equal ones the lower id comes first. Whether a row is finite is decided by its
// logits before bias and mask.
//
// Every thread collects, for every row, the logits of its panels that may still be among the row's k best; the
// collections are put together at the end. The order of candidates is total, so the outcome depends neither on the
// number of threads nor on which thread took which panel.
#include <float.h>
#include <omp.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "abi.h"
#include "blocks.h"
#include "panels.h"
#include "quantized.h"

// Ordered like (value, lower id first): a float's bits, made monotonic, above the complement of the id.
INLINE uint64_t key_of(float value, int64_t id) {
    float positive_zero = value + 0.0f;  // -0 equals 0
    uint32_t bits;
    memcpy(&bits, &positive_zero, 4);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}

INLINE float value_of(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE int64_t id_of(uint64_t key) { return (uint32_t)~key; }

// The best of one row among the panels that one thread has seen.
struct alignas(64) Collection {
    f32x16 unsound = {};         // 0 as long as all logits were finite: 0 * x is NaN for the others
    float threshold = -FLT_MAX;  // smaller logits are not wanted any more; minus infinity never is
    int32_t wanted = 0;
    int64_t count = 0;
    uint64_t floor = 0;        // the key of the threshold: up to here nothing is wanted
    int64_t entry = -1;        // entry of the row's bias where the last search ended
    uint64_t* keys = nullptr;  // [room(wanted)]

    // Twice what is wanted: cutting back to the best half is then cheap for each key that came.
    static int64_t room(int64_t wanted) { return (2 * wanted + 7) / 8 * 8; }

    void offer(uint64_t key) {
        if (key <= floor) return;
        keys[count++] = key;
        if (count == 2 * wanted) keep_best();
    }

    __attribute__((noinline)) void keep_best() {
        std::nth_element(keys, keys + wanted - 1, keys + count, std::greater<uint64_t>());
        count = wanted;
        floor = keys[wanted - 1];
        threshold = value_of(floor);
    }
};

// Bit i: lane i reaches the threshold. NaN reaches none.
INLINE uint32_t lanes_reaching(f32r lanes, float threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(threshold), _CMP_GE_OQ);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)lanes, _mm256_set1_ps(threshold), _CMP_GE_OQ));
#else
    i32r reached = lanes >= splat<f32r>(threshold);
    uint32_t bits = 0;
    for (int i = 0; i < kRegister; i++) bits |= ((uint32_t)reached[i] & 1u) << i;
    return bits;
#endif
}

template <class Half>
INLINE uint32_t lanes_reaching(const Pair<Half>& lanes, float threshold) {
    return lanes_reaching(lanes.low, threshold) | lanes_reaching(lanes.high, threshold) << sizeof(Half) / sizeof(float);
}

// One call of the head: scratch, and what is done with each tile.
class Head {
public:
    Head(const HeadArgs& args, int64_t vocab) : args(args), vocab(vocab), num_threads(omp_get_max_threads()) {
        int64_t room = 0;
        for (int64_t r = 0; r < args.num_rows; r++) room += Collection::room(args.num_candidates[r]);
        // Kept by the calling thread from step to step; ranks may be threads of one process.
        static thread_local std::vector<Collection> kept_collections;
        static thread_local std::vector<uint64_t> kept_keys;
        kept_collections.assign(num_threads * args.num_rows, Collection{});
        if ((int64_t)kept_keys.size() < num_threads * room) kept_keys.resize(num_threads * room);
        collections = kept_collections.data();
        uint64_t* keys = kept_keys.data();
        for (int64_t r = 0; r < args.num_rows; r++)
            for (int64_t t = 0; t < num_threads; t++) {
                Collection& own = collection(t, r);
                own.wanted = (int32_t)args.num_candidates[r];
                own.keys = keys;
                keys += Collection::room(own.wanted);
            }
    }

    template <class Panels>
    void run(const Panels& panels) {
        const bool is_bent = args.multiplier != 1.0f || args.soft_cap > 0;
        for_each_tile(panels, args.num_rows, vocab, [this, is_bent](int64_t first, int rows, int64_t panel, const float* tile) {
            int64_t thread = omp_get_thread_num();
            bool is_whole = (panel + 1) * kPanel <= vocab;
            alignas(64) float bent[Panels::kMostRows * kPanel];
            if (is_bent) tile = bend(tile, rows, bent);
            for (int r = 0; r < rows; r++) {
                const float* logits = tile + r * kPanel;
                Collection& own = collection(thread, first + r);
                is_whole ? take<true>(own, first + r, panel, logits) : take<false>(own, first + r, panel, logits);
            }
        });
        // Sorting a few keys is quicker than waking the other threads, and never waits for a busy core.
#pragma omp parallel for schedule(static) if (args.num_rows * args.width > 1024)
        for (int64_t r = 0; r < args.num_rows; r++) finish(r);
    }

private:
    const HeadArgs& args;
    const int64_t vocab;
    const int64_t num_threads;
    Collection* collections;  // [num_threads, num_rows]

    Collection& collection(int64_t thread, int64_t row) { return collections[thread * args.num_rows + row]; }

    // Logits as the model gives them, from bare products. A product that is not finite gives a logit that is not
    // finite, also under a cap: 0 * x is added.
    const float* bend(const float* tile, int rows, float* bent) const {
        for (int64_t i = 0; i < rows * kPanel; i += kLanes) {
            f32x16 logits = load(tile + i) * args.multiplier;
            if (args.soft_cap > 0)
                logits = fma(logits, splat(0.0f), tanh(logits * (1.0f / args.soft_cap)) * args.soft_cap);
            store(bent + i, logits);
        }
        return bent;
    }

    template <bool is_whole>
    void take(Collection& own, int64_t row, int64_t panel, const float* logits) {
        int64_t count = is_whole ? kPanel : vocab - panel * kPanel;
        uint32_t allowed = is_whole ? ~0u : (1u << count) - 1;
        float padded[kPanel] = {};
        if (!is_whole) logits = (const float*)memcpy(padded, logits, count * sizeof(float));
        f32x16 low = load(logits), high = load(logits + kLanes);
        own.unsound = fma(high, splat(0.0f), fma(low, splat(0.0f), own.unsound));
        if (args.logits[row]) memcpy(args.logits[row] + panel * kPanel, logits, count * sizeof(float));
        if (own.wanted == 0) return;
        if (args.allowed) allowed &= (uint32_t)args.allowed[row * args.allowed_stride + panel];
        if (args.bias_starts[row] < args.bias_starts[row + 1]) {
            int64_t first = first_entry(own, row, panel);
            if (first < args.bias_starts[row + 1] && args.bias_ids[first] < (panel + 1) * kPanel) {
                if (logits != padded) memcpy(padded, logits, sizeof(padded));
                own.entry = change(first, row, panel, padded);
                logits = padded;
                low = load(logits), high = load(logits + kLanes);
            }
        }
        uint32_t reaching = lanes_reaching(low, own.threshold) | lanes_reaching(high, own.threshold) << kLanes;
        for (reaching &= allowed; reaching; reaching &= reaching - 1) {
            int lane = __builtin_ctz(reaching);
            own.offer(key_of(logits[lane], panel * kPanel + lane));
        }
    }

    // The first entry of the row's bias whose id is not before the panel. A thread mostly takes panels in rising order:
    // then it is the entry behind those of the panel before.
    int64_t first_entry(Collection& own, int64_t row, int64_t panel) const {
        const int64_t *ids = args.bias_ids, begin = args.bias_starts[row], end = args.bias_starts[row + 1];
        int64_t found = own.entry, id = panel * kPanel;
        bool is_it = begin <= found && found <= end && (found == end || ids[found] >= id) &&
                     (found == begin || ids[found - 1] < id);
        if (!is_it) found = std::lower_bound(ids + begin, ids + end, id) - ids;
        return own.entry = found;
    }

    // Applies the panel's entries, from `entry` on; returns the entry behind them.
    int64_t change(int64_t entry, int64_t row, int64_t panel, float* logits) const {
        const int64_t end = args.bias_starts[row + 1], last_id = (panel + 1) * kPanel;
        for (; entry < end && args.bias_ids[entry] < last_id; entry++) {
            float& logit = logits[args.bias_ids[entry] - panel * kPanel];
            if (args.bias_scales) {
                float scale = args.bias_scales[entry];
                float scaled = logit > 0 ? logit / scale : logit * scale;
                asm volatile("" : "+m"(scaled));  // rounded before the sum: no fused multiply-add
                logit = scaled;
            }
            logit += args.bias_values[entry];
        }
        return entry;
    }

    // Puts the threads' collections of a row together and writes its candidates.
    void finish(int64_t row) {
        Collection all = collection(0, row);
        for (int64_t t = 1; t < num_threads; t++) {
            const Collection& other = collection(t, row);  // its keys lie behind ours
            std::copy(other.keys, other.keys + other.count, all.keys + all.count);
            all.count += other.count;
            all.unsound += other.unsound;
        }
        bool is_finite = sum(all.unsound) == 0.0f;
        int64_t found = is_finite ? std::min<int64_t>(all.count, all.wanted) : 0;
        std::partial_sort(all.keys, all.keys + found, all.keys + all.count, std::greater<uint64_t>());
        args.is_finite[row] = is_finite;
        for (int64_t i = 0; i < args.width; i++) {
            args.values[row * args.width + i] = i < found ? value_of(all.keys[i]) : -INFINITY;
            args.ids[row * args.width + i] = i < found ? id_of(all.keys[i]) : -1;
        }
    }
};

template <class T>
static void dense_head(const HeadArgs& args, const LinearArgs& product) {
    DensePanels<T> panels{(const T*)product.x, product.x_stride, (const T*)product.weight, product.in_size};
    Head(args, product.out_size).run(panels);
}

static void quantized_head(const HeadArgs& args, const QuantizedLinearArgs& product) {
    with_rounded_panels(product, args.num_rows,
                        [&](const auto& panels) { Head(args, product.out_size).run(panels); });
}

PENSTOCK_EXPORT void penstock_head(const void* args, const Step*) {
    const HeadArgs& head_args = *(const HeadArgs*)args;
    if (head_args.quantized)
        quantized_head(head_args, *head_args.quantized);
    else if (head_args.dense->dtype == kBFloat16)
        dense_head<bf16>(head_args, *head_args.dense);
    else
        dense_head<float>(head_args, *head_args.dense);
}
