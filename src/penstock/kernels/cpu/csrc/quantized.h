// Packed 8- and 4-bit weights, activations rounded to int8, and their product: as panels.h, in integers.
//
// A weight is scale * (q - zero) with an unsigned q, one scale and zero per output and group of `group_size`
// inputs (a multiple of 8, or >= in_size: one group). A panel holds 32 outputs:
//     8 bits   [ceil(out / 32)][ceil(in / 4)][32][4]      quads of inputs, as VPDPBUSD takes them
//     4 bits   [ceil(out / 32)][ceil(in / 8)][32][4]      input 8 o + i in the low half of a byte, input
//                                                         8 o + 4 + i in the high half
//     scales   [ceil(out / 32)][groups][32]               float32, bfloat16 or float16: scale_dtype
//     zeros    [ceil(out / 32)][groups][32] uint8         or none: 128 or 8 for all
// Outputs and inputs that fill up a panel or quad are zero, scales too.
//
// Activations are rounded per row and group of inputs: x = scale * r, r = round(x * (127 / absmax)), scale =
// absmax / 127. The groups are the weights', or 128 inputs where a weight's group is one or more times that.
// sum (q - zero) r = sum q r - zero * sum r is exact in 32 bits (up to 66,000 inputs); each group's sum becomes a
// float, is multiplied by both scales and added to the total in the order of groups. Whatever the number of rows,
// the instruction set or the order of integer sums, a row gives the same numbers (up to the rounding of a missing
// fused multiply-add).
// A group with a NaN or an infinity has the scale NaN: its row comes out NaN, others never see it.
#pragma once
#include "abi.h"
#include "panels.h"
#include "quantized_tiles.h"

constexpr int kQuad = 4;
constexpr int64_t kActivationGroup = 128;
constexpr int64_t kCacheLine = 64;

using u8x16 = uint8_t __attribute__((vector_size(16)));
using i8x16 = int8_t __attribute__((vector_size(16)));

INLINE int64_t num_groups(int64_t in_size, int64_t group_size) { return divide_up(in_size, group_size); }

INLINE int64_t activation_group(int64_t in_size, int64_t group_size) {
    return group_size >= in_size || group_size % kActivationGroup == 0 ? kActivationGroup : group_size;
}

INLINE constexpr int32_t middle_of(int bits) { return 1 << (bits - 1); }

INLINE int64_t quantized_panel_bytes(int64_t in_size, int bits) {
    return divide_up(in_size, 32 / bits) * kPanel * kQuad;
}

// Where the rounded activations of a step lie: rows of [int8 values, zero beyond in_size][float scales][int32 starts].
// A start is -middle * sum of a group's values, middle = 128 or 8: where its products' sum starts from.
struct RoundedRows {
    uint8_t* rows;
    int64_t in_size;
    int64_t group;
    int32_t middle;

    RoundedRows(void* scratch, int64_t in_size, int64_t group_size, int bits)
        : rows((uint8_t*)scratch),
          in_size(in_size),
          group(activation_group(in_size, group_size)),
          middle(middle_of(bits)) {}

    int64_t groups() const { return num_groups(in_size, group); }
    int64_t value_bytes() const { return divide_up(in_size + kLanes, kCacheLine) * kCacheLine; }

    // An odd number of cache lines, so that the rows of a tile never share the same few sets of the cache.
    int64_t stride() const { return ((value_bytes() + groups() * 8 + kCacheLine - 1) / kCacheLine | 1) * kCacheLine; }

    int8_t* values(int64_t row) const { return (int8_t*)(rows + row * stride()); }
    float* scales(int64_t row) const { return (float*)(rows + row * stride() + value_bytes()); }
    int32_t* starts(int64_t row) const { return (int32_t*)(scales(row) + groups()); }
};

INLINE i32x16 to_nearest(f32x16 lanes) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)lanes);
#else
    i32x16 whole;
    for (int i = 0; i < kLanes; i++) whole[i] = (int32_t)rintf(lanes[i]);
    return whole;
#endif
}

// The largest magnitude, as bits: ordered like the numbers, infinities and NaNs above all of them.
template <class T>
INLINE uint32_t largest_magnitude(const T* x, int64_t count) {
    i32x16 largest = {};
    for (int64_t k = 0; k < count; k += kLanes) {
        i32x16 magnitude = (i32x16)load_some(x + k, count - k) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t found = 0;
    for (int i = 0; i < kLanes; i++) found = largest[i] > found ? largest[i] : found;
    return (uint32_t)found;
}

// Rounds one group; gives its scale and the sum of its values. Writes up to 15 zeros beyond `count`.
template <class T>
INLINE int32_t round_group(const T* x, int64_t count, int8_t* values, float* scale) {
    constexpr float kSmallest = 1e-36f;  // below it 127 / absmax overflows
    uint32_t bits = largest_magnitude(x, count);
    float absmax;
    memcpy(&absmax, &bits, 4);
    bool is_finite = bits < 0x7f800000u, is_zero = absmax < kSmallest;
    f32x16 inverse = splat(is_finite && !is_zero ? 127.0f / absmax : 0.0f);
    i32x16 sum = {};
    for (int64_t k = 0; k < count; k += kLanes) {
        i32x16 whole = {};
        if (is_finite) whole = to_nearest(load_some(x + k, count - k) * inverse);
        sum += whole;
        i8x16 narrow = __builtin_convertvector(whole, i8x16);
        memcpy(values + k, &narrow, kLanes);
    }
    *scale = is_zero ? 0.0f : is_finite ? absmax / 127.0f : NAN;
    int32_t total = 0;
    for (int i = 0; i < kLanes; i++) total += sum[i];
    return total;
}

template <class T>
void round_rows(const T* x, int64_t x_stride, int64_t num_rows, const RoundedRows& rounded) {
#pragma omp parallel for schedule(static) if (num_rows > 8)
    for (int64_t row = 0; row < num_rows; row++) {
        int8_t* values = rounded.values(row);
        float* scales = rounded.scales(row);
        int32_t* starts = rounded.starts(row);
        for (int64_t first = 0, g = 0; first < rounded.in_size; first += rounded.group, g++) {
            int64_t left = rounded.in_size - first;
            int64_t count = left < rounded.group ? left : rounded.group;
            starts[g] = -rounded.middle * round_group(x + row * x_stride + first, count, values + first, scales + g);
        }
    }
}

#if defined(__AVX512VNNI__)
using Quads = i32x16;

INLINE Quads spread(int32_t quad) { return quad - i32x16{}; }

// total += the 4 products of unsigned weights and signed activations, lane by lane, in 32 bits
INLINE i32x16 add_quads(i32x16 total, i32x16 weights, const Quads& x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)x);
}
#else
using i16x32 = int16_t __attribute__((vector_size(64)));

// Even and odd bytes as 16-bit numbers. (VPMADDUBSW would need no widening, but saturates.)
struct Quads {
    i32x16 even, odd;
};

INLINE Quads spread(int32_t quad) {
    i16x32 halves = (i16x32)(quad - i32x16{});
    return {(i32x16)(halves << 8 >> 8), (i32x16)(halves >> 8)};
}

// a.even * b.even + a.odd * b.odd over the 16-bit halves of each lane
INLINE i32x16 multiply_halves(i32x16 a, i32x16 b) {
#if defined(__AVX512BW__)
    return (i32x16)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    __m256i left[2], right[2];
    memcpy(left, &a, 64);
    memcpy(right, &b, 64);
    for (int i = 0; i < 2; i++) left[i] = _mm256_madd_epi16(left[i], right[i]);
    memcpy(&a, left, 64);
    return a;
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE i32x16 add_quads(i32x16 total, i32x16 weights, const Quads& x) {
    total += multiply_halves(weights & 0x00ff00ff, x.even);
    return total + multiply_halves(weights >> 8 & 0x00ff00ff, x.odd);
}
#endif

INLINE i32x16 load_lanes(const void* from) {
    i32x16 lanes;
    memcpy(&lanes, from, 64);
    return lanes;
}

INLINE int32_t quad_at(const int8_t* x) {
    int32_t quad;
    memcpy(&quad, x, kQuad);
    return quad;
}

// The sums of a group for some rows and one panel: low[r] for outputs 0 to 15, high[r] for 16 to 31.
template <int rows>
struct GroupSums {
    i32x16 low[rows], high[rows];

    [[gnu::always_inline]] void add(i32x16 w_low, i32x16 w_high, const int8_t* x, int64_t x_stride) {
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            Quads quads = spread(quad_at(x + r * x_stride));
            low[r] = add_quads(low[r], w_low, quads);
            high[r] = add_quads(high[r], w_high, quads);
        }
    }
};

// Adds the products of `count` inputs. `x` is zero from the row's end on.
template <int bits, int rows>
INLINE void add_group(GroupSums<rows>& sums, const uint8_t* w, const int8_t* x, int64_t x_stride, int64_t count) {
    constexpr int64_t kStep = 32 / bits;
    for (int64_t k = 0; k < count; k += kStep, w += 2 * kCacheLine) {
        fetch_ahead<rows>(w);
        i32x16 low = load_lanes(w), high = load_lanes(w + kCacheLine);
        if (bits == 8) {
            sums.add(low, high, x + k, x_stride);
        } else {
            sums.add(low & 0x0f0f0f0f, high & 0x0f0f0f0f, x + k, x_stride);
            sums.add(low >> 4 & 0x0f0f0f0f, high >> 4 & 0x0f0f0f0f, x + k + kQuad, x_stride);
        }
    }
}

INLINE f32x16 load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    u16x16 narrow;
    memcpy(&narrow, from, 32);
    u32x16 bits = __builtin_convertvector(narrow, u32x16);
    f32x16 magnitude = (f32x16)((bits & 0x7fffu) << 13) * 0x1p112f;  // exponent bias 15 becomes 127
    return (f32x16)((u32x16)magnitude | (bits & 0x8000u) << 16);
#endif
}

// Where the packed matrix lies.
struct QuantizedWeight {
    const uint8_t* weight;
    const void* scales;
    const uint8_t* zeros;
    int64_t in_size;
    int64_t group_size;  // <= in_size
    int32_t scale_dtype;

    explicit QuantizedWeight(const QuantizedLinearArgs& args)
        : weight(args.weight),
          scales(args.scales),
          zeros((const uint8_t*)args.zeros),
          in_size(args.in_size),
          group_size(args.group_size < args.in_size ? args.group_size : args.in_size),
          scale_dtype(args.scale_dtype) {}

    // Scales of 16 outputs; `at` counts them from the first of the matrix.
    f32x16 scales_at(int64_t at) const {
        if (scale_dtype == kBFloat16) return load((const bf16*)scales + at);
        if (scale_dtype == kFloat16) return load_float16((const uint16_t*)scales + at);
        return load((const float*)scales + at);
    }

    i32x16 zeros_at(int64_t at) const {
        u8x16 narrow;
        memcpy(&narrow, zeros + at, kLanes);
        return __builtin_convertvector(narrow, i32x16);
    }
};

// As TileForm, of bytes.
struct ByteTileForm {
#if defined(PENSTOCK_BYTE_TILES)
    using Shapes = TileShapes;
    static constexpr int kMostRows = 256;
    static int rows_at_once() { return kHasTiles ? kMostRows : kMaxRows; }
#else
    using Shapes = NoShapes;
    static constexpr int kMostRows = kMaxRows;
    static int rows_at_once() { return kMaxRows; }
#endif
};

// As DensePanels, over rows that have been rounded.
template <int bits>
struct QuantizedPanels : ByteTileForm {
    RoundedRows x;
    QuantizedWeight w;

    QuantizedPanels(const RoundedRows& x, const QuantizedWeight& w) : x(x), w(w) {}

    template <int rows>
    __attribute__((noinline)) void of(int64_t first_row, int64_t panel, float* tile) const {
        for (int i = 0; i < rows * kPanel; i++) tile[i] = 0.0f;
        for_parts(panel, [&](const Group& group, int64_t part, int64_t start, int64_t count, const uint8_t* from)
                             __attribute__((always_inline)) {
            GroupSums<rows> sums;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                sums.low[r] = start_of(first_row + r, part, group.zero_low);
                sums.high[r] = start_of(first_row + r, part, group.zero_high);
            }
            add_group<bits>(sums, from, x.values(first_row) + start, x.stride(), count);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                add_scaled(sums.low[r], sums.high[r], first_row + r, part, group, tile + r * kPanel);
        });
    }

    __attribute__((noinline)) void operator()(Shapes& shapes, int64_t first_row, int rows, int64_t panel,
                                              float* tile) const {
#if defined(PENSTOCK_BYTE_TILES)
        if (rows > kMaxRows && x.group <= ByteTiles::kMostInputs) return by_tiles(shapes, first_row, rows, panel, tile);
#endif
        (void)shapes;
        for (int first = 0; first < rows; first += kMaxRows) {
            int own = rows - first < kMaxRows ? rows - first : kMaxRows;
            tile_of<kMaxRows>(first_row + first, own, panel, tile + first * kPanel);
        }
    }

private:
    // Scales and zeros of a panel for one group of weights.
    struct Group {
        f32x16 scale_low, scale_high;
        i32x16 zero_low, zero_high;
    };

    Group group_at(int64_t at) const {
        Group group{w.scales_at(at), w.scales_at(at + kLanes), {}, {}};
        if (w.zeros) group.zero_low = w.zeros_at(at), group.zero_high = w.zeros_at(at + kLanes);
        return group;
    }

    // What the sum of a row's products over a part of its inputs starts from: minus the zeros times the inputs' sum.
    [[gnu::always_inline]] i32x16 start_of(int64_t row, int64_t part, i32x16 zeros) const {
        constexpr int kMiddleBits = bits - 1;  // back to minus the sum, exactly
        i32x16 start = x.starts(row)[part] - i32x16{};
        return w.zeros ? (start >> kMiddleBits) * zeros : start;
    }

    // Adds the sums of a row over a part of its inputs to its 32 results.
    [[gnu::always_inline]] void add_scaled(i32x16 low, i32x16 high, int64_t row, int64_t part, const Group& group,
                                           float* results) const {
        f32x16 scale = splat(x.scales(row)[part]);
        store(results, fma(__builtin_convertvector(low, f32x16), group.scale_low * scale, load(results)));
        store(results + kLanes,
              fma(__builtin_convertvector(high, f32x16), group.scale_high * scale, load(results + kLanes)));
    }

    // Calls use(group, part, start, count, from) for each part of the inputs that has scales of its own, in order;
    // `from` is where a panel's weights of its inputs lie.
    template <class Use>
    [[gnu::always_inline]] void for_parts(int64_t panel, const Use& use) const {
        const uint8_t* from = w.weight + panel * quantized_panel_bytes(w.in_size, bits);
        int64_t groups = num_groups(w.in_size, w.group_size);
        for (int64_t g = 0, start = 0, part = 0; g < groups; g++) {
            Group group = group_at((panel * groups + g) * kPanel);
            int64_t end = start + w.group_size < w.in_size ? start + w.group_size : w.in_size;
            for (; start < end; start += x.group, part++) {
                int64_t count = end - start < x.group ? end - start : x.group;
                use(group, part, start, count, from);
                from += quantized_panel_bytes(count, bits);
            }
            start = end;
        }
    }

#if defined(PENSTOCK_BYTE_TILES)
    // All rows take a part of the inputs before the next one: its weights stay in the first-level cache.
    void by_tiles(TileShapes& shapes, int64_t first_row, int rows, int64_t panel, float* tile) const {
        memset(tile, 0, rows * kPanel * sizeof(float));
        for_parts(panel, [&](const Group& group, int64_t part, int64_t start, int64_t count, const uint8_t* from) {
            alignas(64) uint8_t unpacked[ByteTiles::kMostInputs / kQuad * ByteTiles::kQuadBytes];
            int64_t packed_quads = divide_up(count, 32 / bits), quads = packed_quads * (8 / bits);
            if (bits == 4) ByteTiles::unpack(from, packed_quads, unpacked);
            for (int first = 0; first < rows; first += ByteTiles::kRows) {
                int own = rows - first < ByteTiles::kRows ? rows - first : ByteTiles::kRows;
                alignas(64) int32_t sums[ByteTiles::kRows][kPanel];
                ByteTiles::multiply(shapes, x.values(first_row + first) + start, x.stride(), own,
                                    bits == 4 ? unpacked : from, quads, sums);
                for (int r = 0; r < own; r++) {
                    int64_t row = first_row + first + r;
                    i32x16 low = load_lanes(sums[r]) + start_of(row, part, group.zero_low);
                    i32x16 high = load_lanes(sums[r] + kLanes) + start_of(row, part, group.zero_high);
                    add_scaled(low, high, row, part, group, tile + (first + r) * kPanel);
                }
            }
        });
    }
#endif

    template <int most>
    void tile_of(int64_t first_row, int rows, int64_t panel, float* tile) const {
        if (rows == most) return of<most>(first_row, panel, tile);
        if constexpr (most > 1) tile_of<most - 1>(first_row, rows, panel, tile);
    }
};

// Compiled once, in quantized.cpp.
extern template struct QuantizedPanels<8>;
extern template struct QuantizedPanels<4>;

// Rounds the first `num_rows` rows of args.x into args.scratch and calls use(panels) for the product with them.
template <class Use>
void with_quantized_panels(const QuantizedLinearArgs& args, int64_t num_rows, const Use& use) {
    QuantizedWeight weight(args);
    RoundedRows rounded(args.scratch, weight.in_size, weight.group_size, args.bits);
    if (args.dtype == kBFloat16)
        round_rows((const bf16*)args.x, args.x_stride, num_rows, rounded);
    else
        round_rows((const float*)args.x, args.x_stride, num_rows, rounded);
    if (args.bits == 8)
        use(QuantizedPanels<8>{rounded, weight});
    else
        use(QuantizedPanels<4>{rounded, weight});
}
