// Rows of activations, rounded to 8 bits for products with 8- and 4-bit weights (quantized.h).
//
// Per row and group of inputs: x = scale * r, r = round(x * (127 / absmax)), scale = absmax / 127.
// A group with a NaN or an infinity has the scale NaN: the results of its row are NaN, and those of other rows are not
// changed.
#pragma once
#include "vec.h"

constexpr int64_t kActivationGroup = 128;
constexpr int64_t kCacheLine = 64;

INLINE int64_t num_groups(int64_t in_size, int64_t group_size) { return divide_up(in_size, group_size); }

INLINE int64_t activation_group(int64_t in_size, int64_t group_size) {
    return group_size >= in_size || group_size % kActivationGroup == 0 ? kActivationGroup : group_size;
}

INLINE constexpr int32_t middle_of(int bits) { return 1 << (bits - 1); }

// The scale of a row's group of inputs, and the sum of their values.
struct RoundedGroup {
    float scale;
    int32_t start;  // -middle * the sum, where the sum of its products starts. middle = 128 or 8; 1 for block formats
};

// Where the rounded activations of a step lie: rows of [int8 values, zero beyond in_size][groups].
struct RoundedRows {
    uint8_t* rows;
    int64_t in_size;
    int64_t group;
    int32_t middle;
    int64_t value_bytes;  // of a row
    int64_t stride;       // bytes from row to row: an odd number of cache lines, so that the rows of a tile never share
                          // the same few sets of the cache

    RoundedRows(void* scratch, int64_t in_size, int64_t group_size, int bits)
        : rows((uint8_t*)scratch),
          in_size(in_size),
          group(activation_group(in_size, group_size)),
          middle(middle_of(bits)),
          value_bytes(divide_up(in_size + kLanes, kCacheLine) * kCacheLine) {
        int64_t bytes = value_bytes + num_groups(in_size, group) * (int64_t)sizeof(RoundedGroup);
        stride = (divide_up(bytes, kCacheLine) | 1) * kCacheLine;
    }

    int8_t* values(int64_t row) const { return (int8_t*)(rows + row * stride); }
    RoundedGroup* groups(int64_t row) const { return (RoundedGroup*)(rows + row * stride + value_bytes); }
};

INLINE i32r to_nearest(f32r lanes) {
#if defined(__AVX512F__)
    return (i32r)_mm512_cvtps_epi32((__m512)lanes);
#elif defined(__AVX__)
    return (i32r)_mm256_cvtps_epi32((__m256)lanes);
#else
    i32r whole;
    for (int i = 0; i < kRegister; i++) whole[i] = (int32_t)rintf(lanes[i]);
    return whole;
#endif
}

template <class Half>
INLINE auto to_nearest(const Pair<Half>& lanes) -> Pair<decltype(to_nearest(lanes.low))> {
    return {to_nearest(lanes.low), to_nearest(lanes.high)};
}

// The largest magnitude, as bits: ordered like the numbers, infinities and NaNs above all of them.
template <class T>
INLINE uint32_t largest_magnitude(const T* x, int64_t count) {
    i32x16 largest = {};
    for (int64_t k = 0; k < count; k += kLanes)
        largest = max(largest, bits_of(load_some(x + k, count - k)) & 0x7fffffff);
    return (uint32_t)max(largest);
}

// Rounds one group: writes its values and its scale, and returns the sum of the values. Writes up to 15 zeros beyond
// `count`.
template <class T>
INLINE int32_t round_group(const T* x, int64_t count, int8_t* values, float* scale) {
    constexpr float kSmallest = 1e-36f;  // below it 127 / absmax overflows
    uint32_t bits = largest_magnitude(x, count);
    float absmax;
    memcpy(&absmax, &bits, 4);
    bool is_finite = bits < 0x7f800000u, is_zero = absmax < kSmallest;
    f32x16 inverse = splat(is_finite && !is_zero ? 127.0f / absmax : 0.0f);
    i32x16 whole_sum = {};
    for (int64_t k = 0; k < count; k += kLanes) {
        i32x16 whole = {};
        if (is_finite) whole = to_nearest(load_some(x + k, count - k) * inverse);
        whole_sum += whole;
        store(values + k, whole);
    }
    *scale = is_zero ? 0.0f : is_finite ? absmax / 127.0f : NAN;
    return sum(whole_sum);
}

template <class T>
void round_rows(const T* x, int64_t x_stride, int64_t num_rows, const RoundedRows& rounded) {
#pragma omp parallel for schedule(static) if (num_rows > 8)
    for (int64_t row = 0; row < num_rows; row++) {
        int8_t* values = rounded.values(row);
        RoundedGroup* group = rounded.groups(row);
        for (int64_t first = 0; first < rounded.in_size; first += rounded.group, group++) {
            int64_t left = rounded.in_size - first, count = left < rounded.group ? left : rounded.group;
            int32_t sum = round_group(x + row * x_stride + first, count, values + first, &group->scale);
            group->start = -rounded.middle * sum;
        }
    }
}
