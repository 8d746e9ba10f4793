// The inner loops of attention.cpp: scores of some query rows against a chunk of the context, their weights, the
// weighted values, and the merging of chunks. Micro-kernels as in panels.h and half_panels.h: up to kMaxRows rows by
// two vectors or one, one accumulator for each number, summed in order.
#pragma once
#include <algorithm>
#include <utility>

#include "attention.h"
#include "panels.h"

#define NOINLINE __attribute__((noinline))

constexpr int kTilesPerChunk = 16;
constexpr int kChunk = kTilesPerChunk * kLanes;
constexpr int kChunksPerSegment = kSegmentTokens / kChunk;
constexpr int kTilesPerSegment = kChunksPerSegment * kTilesPerChunk;
constexpr int kRowStride = kChunk + kLanes;  // of scores and weights: rows fall on different sets of the cache
constexpr float kFloor = -1e29f;             // the largest score where a query sees nothing
constexpr float kLog2E = 1.44269504f;
constexpr float kMasked = -1e30f;            // the score of a masked token, so far below that its weight is 0

// 2^x for x <= 0: 0 far below, exactly 1 at 0, NaN for NaN. Minimax polynomials of 2^f - 1 over half a unit to either
// side of 0. Their relative error is 9e-8 for float32, and 1e-4 for weights in bfloat16, whose rounding has 4e-3
// anyway.
INLINE f32r power_series(f32r f, const float*) {
    constexpr auto all = splat<f32r>;
    f32r p = fma(f, all(1.3264727e-3f), all(9.6715127e-3f));
    p = fma(p, f, all(5.5507337e-2f));
    p = fma(p, f, all(2.4022242e-1f));
    p = fma(p, f, all(6.9314698e-1f));
    return fma(p, f, all(1.0f));
}

INLINE f32r power_series(f32r f, const bf16*) {
    constexpr auto all = splat<f32r>;
    f32r p = fma(f, all(5.5008932e-2f), all(2.4221096e-1f));
    p = fma(p, f, all(6.9328293e-1f));
    return fma(p, f, all(1.0f));
}

template <class T>
INLINE f32r power_of_2(f32r x) {
#if defined(__AVX512F__)
    f32r n = (f32r)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (f32r)_mm512_scalef_ps((__m512)power_series(x - n, (const T*)nullptr), (__m512)n);
#else
    f32r bounded = max(splat<f32r>(-126.0f), x);  // NaN passes
    const f32r magic = splat<f32r>(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    f32r n = bounded + magic - magic;
    i32r power = (__builtin_convertvector(n, i32r) + 127) << 23;
    f32r result = power_series(bounded - n, (const T*)nullptr) * (f32r)power;
    return x < -126.0f ? f32r{} : result;
#endif
}

template <class T, class Half>
INLINE Pair<Half> power_of_2(const Pair<Half>& x) {
    return {power_of_2<T>(x.low), power_of_2<T>(x.high)};
}

// What a product step takes at once of a query or a row of weights, the side that is not a stream of vectors.
template <class T>
struct Factor;
template <>
struct Factor<bf16> {
    using type = uint32_t;
    static type at(const bf16* x) { return pair_at(x); }
};
template <>
struct Factor<float> {
    using type = float;
    static type at(const float* x) { return *x; }
};

// Stores the weights of 32 tokens, rounded to their dtype, and returns `total` with the rounded weights added.
INLINE f32x16 store_weights(float* to, f32x16 low, f32x16 high, f32x16 total) {
    store(to, low);
    store(to + kLanes, high);
    return total + (low + high);
}

INLINE f32x16 store_weights(bf16* to, f32x16 low, f32x16 high, f32x16 total) {
#if defined(__AVX512BF16__)
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    memcpy(to, &both, 64);
    return (f32x16)_mm512_dpbf16_ps((__m512)total, both, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // times 1
#else
    store(to, low);
    store(to + kLanes, high);
    return total + (round_to_bf16(low) + round_to_bf16(high));
#endif
}

// The tiles of one chunk of one row's context, for one head.
template <class T>
struct Streams {
    const T* keys[kTilesPerChunk];
    const T* values[kTilesPerChunk];
};

// Partial or merged results of some rows.
struct Sums {
    float* largest;  // [rows] scores in powers of 2
    float* total;    // [rows] of the weights
    float* values;   // [rows, width] weighted

    static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2); }
    static Sums in(float* memory, int64_t rows, int64_t width) {
        return {memory + rows * width, memory + rows * (width + 1), memory};
    }
    Sums from(int64_t row, int64_t width) const { return {largest + row, total + row, values + row * width}; }
};

// How near to the processor lines are fetched: to the second-level cache, since the first would not hold them. A Zen
// fetches them to the first, from where they move on to the second: it drops requests for the first less often
// (docs/perf-log.md: 8 to 14 % faster).
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr int kFetchLocality = 3;
#else
constexpr int kFetchLocality = 2;
#endif

// Brings what is computed next into the cache, line by line between the products. (Without this, reading runs at
// half to two thirds of the rate: the machine's own prefetching needs longer runs.)
class Fetch {
public:
    // Pieces of `size` bytes each, a multiple of 64, from `first` to before `end`; at least one.
    Fetch(const char* const* first, const char* const* end, int64_t size)
        : at_(*first), stop_(*first + size), piece_(first), last_(end - 1), size_(size) {}

    // After the last line the last piece is fetched again, which costs nothing.
    inline __attribute__((always_inline)) void line() {
        __builtin_prefetch(at_, 0, kFetchLocality);
        at_ += 64;
        if (__builtin_expect(at_ == stop_, 0)) {
            piece_ += piece_ < last_;
            at_ = *piece_;
            stop_ = at_ + size_;
        }
    }

private:
    const char* at_;
    const char* stop_;
    const char* const* piece_;
    const char* const* last_;
    int64_t size_;
};

#if defined(PENSTOCK_HALF_PANELS)
// scores[r, tile] = <query r, keys of the tile>.
template <class T, int rows>
NOINLINE static void score(const typename Factor<T>::type* queries, const Streams<T>& tiles,
                                            int begin, int end, int64_t num_steps, Fetch& fetch_ahead,
                                            float* scores) {
    constexpr int64_t kVector = kLanes * KVLayout<T>::kGroup;
    Fetch fetch = fetch_ahead;  // in registers
    for (int i = begin; i < end; i++) {
        PairValues<typename Factor<T>::type, 1> values{queries};
        HalfSums<rows> sums;
        for (int64_t k = 0; k < num_steps; k++, values.at += rows) {
            fetch.line();
            sums.add_step(tiles.keys[i] + k * kVector, values);
        }
        sums.store_to(scores + i * kLanes, kRowStride);
    }
    fetch_ahead = fetch;
}

// values[r] = sum of weight * value over the tokens of tiles [begin, end).
template <class T, int rows>
NOINLINE static void weigh(const T* weights, const Streams<T>& tiles, int begin, int end,
                                            int64_t num_slices, Fetch& fetch_ahead, float* values) {
    constexpr int64_t kGroup = KVLayout<T>::kGroup, kVector = kLanes * kGroup, kSlice = kLanes * kLanes;
    Fetch fetch = fetch_ahead;
    for (int64_t slice = 0; slice < num_slices; slice++) {
        HalfSums<rows> sums;
        for (int i = begin; i < end; i++) {
            PairValues<T, kRowStride> own{weights + i * kLanes};
            const T* from = tiles.values[i] + slice * kSlice;
            for (int64_t k = 0; k < kLanes / kGroup; k++, own.at += kGroup, from += kVector) {
                fetch.line();
                sums.add_step(from, own);
            }
        }
        sums.store_to(values + slice * kLanes, num_slices * kLanes);
    }
    fetch_ahead = fetch;
}
#else
// scores[r, tile] = <query r, keys of the tile>, tiles in pairs from an even one to an even one.
template <class T, int rows>
NOINLINE static void score(const typename Factor<T>::type* queries, const Streams<T>& tiles,
                                            int begin, int end, int64_t num_steps, Fetch& fetch_ahead,
                                            float* scores) {
    constexpr int64_t kVector = kLanes * KVLayout<T>::kGroup;
    Fetch fetch = fetch_ahead;  // in registers
    for (int i = begin; i < end; i += 2) {
        const auto* q = queries;
        const T *low_keys = tiles.keys[i], *high_keys = tiles.keys[i + 1];
        PanelSums<rows> sums;
        for (int64_t k = 0; k < num_steps; k++, q += rows) {
            fetch.line();
            fetch.line();
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sums.add(r, low_keys + k * kVector, high_keys + k * kVector, q[r]);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums.store_low(r, scores + r * kRowStride + i * kLanes);
            sums.store_high(r, scores + r * kRowStride + (i + 1) * kLanes);
        }
    }
    fetch_ahead = fetch;
}

// values[r] = sum of weight * value over the tokens of tiles [begin, end).
template <class T, int rows>
NOINLINE static void weigh(const T* weights, const Streams<T>& tiles, int begin, int end,
                                            int64_t num_slices, Fetch& fetch_ahead, float* values) {
    constexpr int64_t kGroup = KVLayout<T>::kGroup, kVector = kLanes * kGroup, kSlice = kLanes * kLanes;
    int64_t width = num_slices * kLanes;
    Fetch fetch = fetch_ahead;
    for (int64_t slice = 0; slice < num_slices; slice += 2) {
        bool is_last = slice + 1 == num_slices;
        PanelSums<rows> sums;
        for (int i = begin; i < end; i++) {
            const T* low_values = tiles.values[i] + slice * kSlice;
            const T* high_values = is_last ? low_values : low_values + kSlice;
            const T* w = weights + i * kLanes;
#pragma GCC unroll 2
            for (int64_t k = 0; k < kLanes / kGroup; k++) {
                fetch.line();
                fetch.line();
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    sums.add(r, low_values + k * kVector, high_values + k * kVector,
                             Factor<T>::at(w + r * kRowStride + k * kGroup));
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums.store_low(r, values + r * width + slice * kLanes);
            if (!is_last) sums.store_high(r, values + r * width + (slice + 1) * kLanes);
        }
    }
    fetch_ahead = fetch;
}
#endif

template <class T>
using Score = void (*)(const typename Factor<T>::type*, const Streams<T>&, int, int, int64_t, Fetch&, float*);
template <class T>
using Weigh = void (*)(const T*, const Streams<T>&, int, int, int64_t, Fetch&, float*);

template <class T, int... index>
static Score<T> score_of(int rows, std::integer_sequence<int, index...>) {
    static constexpr Score<T> by_rows[] = {score<T, index + 1>...};
    return by_rows[rows - 1];
}
template <class T, int... index>
static Weigh<T> weigh_of(int rows, std::integer_sequence<int, index...>) {
    static constexpr Weigh<T> by_rows[] = {weigh<T, index + 1>...};
    return by_rows[rows - 1];
}
using AllRows = std::make_integer_sequence<int, kMaxRows>;

// Makes weights of the scores of one row of a chunk, relative to the largest score: scores * factor are exponents of 2.
// With each pair of tiles `lines` lines of memory are fetched.
template <class T>
INLINE void weights_of(const float* scores, int begin, int end, float factor, int lines, Fetch& fetch, T* weights,
                       float* largest, float* total) {
    f32x16 low = splat(kFloor), high = low;
    for (int i = begin; i < end; i += 2) {
        low = max(low, load(scores + i * kLanes));
        high = max(high, load(scores + (i + 1) * kLanes));
    }
    float top = max(max(low, high)) * factor;
    f32x16 totals = {};
    for (int i = begin; i < end; i += 2) {
        for (int line = 0; line < lines; line++) fetch.line();
        f32x16 first = fma(load(scores + i * kLanes), splat(factor), splat(-top));
        f32x16 second = fma(load(scores + (i + 1) * kLanes), splat(factor), splat(-top));
        totals = store_weights(weights + i * kLanes, power_of_2<T>(first), power_of_2<T>(second), totals);
    }
    *largest = top;
    *total = sum(totals);
}

// Masks the scores of a tile before lane `from`, and from lane `to` on.
INLINE void hide_lanes(float* scores, int32_t from, int32_t to) {
    static constexpr int32_t kIndices[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += kRegister) {
        i32r lanes = load_register(kIndices + i);
        i32r is_seen = (lanes >= from) & (lanes < to);
        store(scores + i, is_seen ? load_register(scores + i) : splat<f32r>(kMasked));
    }
}

// Adds a part's results of a row to those of all parts before it. A part of which the row sees nothing changes no bit,
// and neither do such parts before the first that is seen. So it does not matter whether they were computed.
INLINE void merge_row(const Sums& part, int64_t r, int64_t width, const Sums& into) {
    if (part.total[r] == 0) return;
    if (into.total[r] == 0) {
        into.largest[r] = part.largest[r], into.total[r] = part.total[r];
        memcpy(into.values + r * width, part.values + r * width, width * sizeof(float));
        return;
    }
    float top = part.largest[r] > into.largest[r] ? part.largest[r] : into.largest[r];
    f32r old_factor = power_of_2<float>(splat<f32r>(into.largest[r] - top));
    f32r new_factor = power_of_2<float>(splat<f32r>(part.largest[r] - top));
    into.largest[r] = top;
    into.total[r] = fma(splat<f32r>(into.total[r]), old_factor, part.total[r] * new_factor)[0];
    for (int64_t d = 0; d < width; d += kRegister) {
        float* merged = into.values + r * width + d;
        f32r own = load_register(merged), next = load_register(part.values + r * width + d);
        store(merged, fma(own, old_factor, next * new_factor));
    }
}

static void merge(const Sums& part, int64_t rows, int64_t width, const Sums& into) {
    for (int64_t r = 0; r < rows; r++) merge_row(part, r, width, into);
}

static void clear(const Sums& sums, int64_t rows, int64_t width) {
    std::fill(sums.largest, sums.largest + rows, kFloor);
    std::fill(sums.total, sums.total + rows, 0.0f);
    std::fill(sums.values, sums.values + rows * width, 0.0f);
}

// y = the weighted mean of a row's values, `size` of them. A sink, where there is one, takes its share of the weights.
template <class T>
INLINE void finish_row(const Sums& sums, int64_t r, int64_t width, int64_t size, const float* sink, T* y) {
    float factor = 1.0f / sums.total[r];
    if (sink) {
        float score = std::max(*sink * kLog2E, kFloor), top = std::max(sums.largest[r], score);
        f32r own = power_of_2<float>(splat<f32r>(sums.largest[r] - top));
        f32r total = fma(splat<f32r>(sums.total[r]), own, power_of_2<float>(splat<f32r>(score - top)));
        factor = own[0] / total[0];
    }
    for (int64_t d = 0; d < size; d += kLanes) store_some(y + d, load(sums.values + r * width + d) * factor, size - d);
}
