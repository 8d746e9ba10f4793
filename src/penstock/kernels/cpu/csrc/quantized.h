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
// Activations are rounded per row and group of inputs (rounded_rows.h): the weights' group, or 128 inputs if that is a
// whole row or a multiple of 128.
// sum (q - zero) r = sum q r - zero * sum r is exact in 32 bits (up to 66,000 inputs); each group's sum becomes a
// float, is multiplied by both scales and added to the total in the order of groups. Whatever the number of rows,
// the instruction set or the order of integer sums, a row gives the same numbers (up to the rounding of a missing
// fused multiply-add).
#pragma once
#include "abi.h"
#include "panels.h"
#include "quad_sums.h"
#include "quantized_tiles.h"
#include "rounded_rows.h"

INLINE int64_t quantized_panel_bytes(int64_t in_size, int bits) {
    return divide_up(in_size, 32 / bits) * kPanel * kQuad;
}

INLINE i32x16 load_lanes(const void* from) {
    i32x16 lanes;
    memcpy(&lanes, from, 64);
    return lanes;
}

// Whether sums of weights of so many bits are taken in 16 bits (quad_sums.h). With 8 bits that is slower than products
// of halves are.
template <int bits>
#if defined(PENSTOCK_ADDS_IN_16_BITS)
constexpr bool kAddsIn16Bits = bits == 4;
#else
constexpr bool kAddsIn16Bits = false;
#endif

template <int bits>
#if defined(__AVX512F__)
constexpr int kRowsOfBytes = kMaxRows;
#else
constexpr int kRowsOfBytes = kAddsIn16Bits<bits> ? kRowsAtOnce : 3;  // 4 half-width sums a row, 12 of 16
#endif

// The sums of a group for some rows and the 32 outputs of a panel.
template <int rows>
struct GroupSums {
    static constexpr int kParts = kPanel / kRegister;
    i32r of[rows][kParts];

    [[gnu::always_inline]] void begin(int r, const i32x16& low, const i32x16& high) {
        split(low, high, of[r]);
    }

    // Adds the products with the quads at `x` of all rows. `shift` is 0 or 4, the half of a byte that holds weights of
    // 4 bits; -1: weights have 8 bits.
    template <int shift>
    [[gnu::always_inline]] void add(const uint8_t* w, const int8_t* x, int64_t x_stride) {
#pragma GCC unroll 8
        for (int i = 0; i < kParts; i++) {
            i32r weights;
            memcpy(&weights, w + i * sizeof(i32r), sizeof(i32r));
            if (shift >= 0) weights = weights >> (shift & 31) & 0x0f0f0f0f;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) of[r][i] = add_quads(of[r][i], weights, spread(quad_at(x + r * x_stride)));
        }
    }
};

// Adds the products of `count` inputs. `x` is zero from the row's end on.
template <int bits, int rows>
INLINE void add_group(GroupSums<rows>& sums, const uint8_t* w, const int8_t* x, int64_t x_stride, int64_t count) {
    constexpr int64_t kStep = 32 / bits;
    for (int64_t k = 0; k < count; k += kStep, w += 2 * kCacheLine) {
        fetch_ahead<rows>(w);
        if (bits == 8) {
            sums.template add<-1>(w, x + k, x_stride);
        } else {
            sums.template add<0>(w, x + k, x_stride);
            sums.template add<4>(w, x + k + kQuad, x_stride);
        }
    }
}

// Loads as many float16 numbers as a register holds floats.
INLINE f32r load_float16_register(const uint16_t* from) {
#if defined(__AVX512F__)
    return (f32r)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX__) && defined(__F16C__)
    return (f32r)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    u16r narrow;
    memcpy(&narrow, from, sizeof(narrow));
    u32r bits = __builtin_convertvector(narrow, u32r);
    f32r magnitude = (f32r)((bits & 0x7fffu) << 13) * 0x1p112f;  // exponent bias 15 becomes 127
    return (f32r)((u32r)magnitude | (bits & 0x8000u) << 16);
#endif
}

INLINE f32x16 load_float16(const uint16_t* from) {
    return by_registers([=](int i) { return load_float16_register(from + i); });
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
        return by_registers([=](int i) { return load_register(zeros + at + i); });
    }
};

// As TileForm, for products of bytes.
template <int bits>
struct ByteTileForm {
#if defined(PENSTOCK_BYTE_TILES)
    using Shapes = TileShapes;
    static constexpr bool kTakesMany = true;
    static constexpr int kMostRows = 256;
    static int rows_at_once() { return kHasTiles ? kMostRows : kRowsOfBytes<bits>; }
#else
    using Shapes = NoShapes;
    static constexpr bool kTakesMany = false;
    static constexpr int kMostRows = kRowsOfBytes<bits>;
    static int rows_at_once() { return kRowsOfBytes<bits>; }
#endif
};

// As DensePanels, over rows that have been rounded.
template <int bits>
struct QuantizedPanels : ByteTileForm<bits> {
    using typename ByteTileForm<bits>::Shapes;

    RoundedRows x;
    QuantizedWeight w;

    QuantizedPanels(const RoundedRows& x, const QuantizedWeight& w) : x(x), w(w) {}

    template <int rows>
    __attribute__((noinline)) void of(int64_t first_row, int64_t panel, float* tile) const {
        if (w.zeros)
            few_rows<rows, true>(first_row, panel, tile);
        else
            few_rows<rows, false>(first_row, panel, tile);
    }

    __attribute__((noinline)) void operator()(Shapes& shapes, int64_t first_row, int rows, int64_t panel,
                                              float* tile) const {
#if defined(PENSTOCK_BYTE_TILES)
        if (rows > kRowsOfBytes<bits> && has_byte_tiles())
            return by_tiles(shapes, first_row, rows, panel, 0, num_parts(), tile);
#endif
        (void)shapes;
        const int turns = divide_up(rows, kRowsOfBytes<bits>);
        for (int turn = 0; turn < turns; turn++) {
            const int first = rows * turn / turns, end = rows * (turn + 1) / turns;
            tile_of<kRowsOfBytes<bits>>(first_row + first, end - first, panel, tile + first * kPanel);
        }
    }

#if defined(PENSTOCK_BYTE_TILES)
    // Many rows, as for_many_rows takes them: a block is some parts of the inputs.
    bool is_many(int64_t num_rows) const { return kHasTiles && num_rows > kPassRows && has_byte_tiles(); }
    const QuantizedPanels& many(int64_t, int64_t) const { return *this; }
    int64_t parts_at_once() const { return kBlockInputs / x.group; }
    int64_t num_blocks() const { return divide_up(num_parts(), parts_at_once()); }
    void prepare() const {}

    template <class Use>
    void add_block(Shapes& shapes, int64_t first_row, int rows, int64_t panel, int64_t block, float* tile,
                   const Use& use) const {
        int64_t begin = block * parts_at_once(), end = begin + parts_at_once();
        by_tiles(shapes, first_row, rows, panel, begin, end < num_parts() ? end : num_parts(), tile);
        if (end >= num_parts()) use(first_row, rows, panel, tile);
    }
#endif

private:
    template <int rows, bool has_zeros>
    [[gnu::always_inline]] void few_rows(int64_t first_row, int64_t panel, float* tile) const {
        if constexpr (kAddsIn16Bits<bits>) return rows_in_16_bits<rows, has_zeros>(first_row, panel, tile);
        for (int i = 0; i < rows * kPanel; i++) tile[i] = 0.0f;
        for_parts(panel, 0, num_parts(), [&](const Group& group, int64_t part, int64_t start, int64_t count,
                                             const uint8_t* from) __attribute__((always_inline)) {
            GroupSums<rows> sums;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const RoundedGroup& rounded = x.groups(first_row + r)[part];
                sums.begin(r, start_of<has_zeros>(rounded, group.zero_low), start_of<has_zeros>(rounded, group.zero_high));
            }
            add_group<bits>(sums, from, x.values(first_row) + start, x.stride, count);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                add_scaled(sums.of[r], x.groups(first_row + r)[part], group, tile + r * kPanel);
        });
    }

    // Some registers of outputs after the others: so the sums of all rows, and what is made of the weights, fit.
    template <int rows, bool has_zeros>
    [[gnu::always_inline]] void rows_in_16_bits(int64_t first_row, int64_t panel, float* tile) const {
        constexpr int kAtOnce = registers_at_once(rows, 1);
        memset(tile, 0, rows * kPanel * sizeof(float));
        for_parts(panel, 0, num_parts(), [&](const Group& group, int64_t part, int64_t start, int64_t count,
                                             const uint8_t* from) __attribute__((always_inline)) {
            f32r scales[kParts];
            i32r zeros[kParts];
            split(group.scale_low, group.scale_high, scales);
            split(group.zero_low, group.zero_high, zeros);
            for (int64_t line = 0; line < quantized_panel_bytes(count, bits); line += kCacheLine)
                __builtin_prefetch(from + kAheadForFew + line, 0, 2);
#pragma GCC unroll 4
            for (int first = 0; first < kParts; first += kAtOnce) {
                QuadSums<rows, (1 << bits) - 1, kAtOnce> sums;
                const int8_t* values[rows];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const RoundedGroup& rounded = x.groups(first_row + r)[part];
                    for (int i = 0; i < kAtOnce; i++) sums.of[r][i] = start_of<has_zeros>(rounded, zeros[first + i]);
                    values[r] = x.values(first_row + r) + start;
                }
                add_registers(sums, from + first * sizeof(i32r), values, count);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int i = 0; i < kAtOnce; i++) {
                        float* result = tile + r * kPanel + (first + i) * kRegister;
                        const f32r scale = scales[first + i] * (x.groups(first_row + r)[part].scale - f32r{});
                        store(result, fma(__builtin_convertvector(sums.of[r][i], f32r), scale, load_register(result)));
                    }
            }
        });
    }

    // Adds the products of `count` inputs, of 4 bits, for some registers of outputs. `values` is zero from the row's
    // end.
    template <int rows, int largest, int parts>
    [[gnu::always_inline]] static void add_registers(QuadSums<rows, largest, parts>& sums, const uint8_t* from,
                                                     const int8_t* (&values)[rows], int64_t count) {
        constexpr int kOfLine = 2;  // quads
        const auto weights = [&from](int quad, int i) __attribute__((always_inline)) {
            i32r words;
            memcpy(&words, from + quad / kOfLine * kPanel * kQuad + i * sizeof(words), sizeof(words));
            return words >> quad % kOfLine * 4 & 0x0f0f0f0f;
        };
        const auto pass = [&](int quads) __attribute__((always_inline)) {
            from += quads / kOfLine * kPanel * kQuad;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) values[r] += quads * kQuad;
        };
        int64_t lines = divide_up(count, kOfLine * kQuad);
        for (; lines >= 8 / kOfLine; lines -= 8 / kOfLine) {
            sums.template add<8>(weights, values);
            pass(8);
        }
        for (; lines > 0; lines--) {
            sums.template add<kOfLine>(weights, values);
            pass(kOfLine);
        }
    }

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
    template <bool has_zeros, class Lanes>
    [[gnu::always_inline]] static Lanes start_of(const RoundedGroup& rounded, const Lanes& zeros) {
        constexpr int kMiddleBits = bits - 1;  // rounded.start >> kMiddleBits is minus the sum, exactly
        return has_zeros ? (rounded.start >> kMiddleBits) * zeros : rounded.start - Lanes{};
    }

    // Adds the sums of a row over a part of its inputs to its 32 results.
    [[gnu::always_inline]] static void add_scaled(const i32r* sums, const RoundedGroup& rounded, const Group& group,
                                                  float* results) {
        constexpr int kParts = kPanel / kRegister;
        const f32r scale = rounded.scale - f32r{};
        f32r scales[kParts];
        split(group.scale_low, group.scale_high, scales);
#pragma GCC unroll 8
        for (int i = 0; i < kParts; i++) {
            f32r result;
            memcpy(&result, results + i * kRegister, sizeof(f32r));
            result = fma(__builtin_convertvector(sums[i], f32r), scales[i] * scale, result);
            memcpy(results + i * kRegister, &result, sizeof(f32r));
        }
    }

    // Parts of the inputs that have scales of their own.
    int64_t num_parts() const { return num_groups(w.in_size, x.group); }

    const uint8_t* weights_of(int64_t panel, int64_t part) const {
        return w.weight + panel * quantized_panel_bytes(w.in_size, bits) + quantized_panel_bytes(part * x.group, bits);
    }

    // Calls use(group, part, start, count, from) for some parts, in order; `from` is where a panel's weights of its
    // inputs lie.
    template <class Use>
    [[gnu::always_inline]] void for_parts(int64_t panel, int64_t part, int64_t end, const Use& use) const {
        const uint8_t* from = weights_of(panel, part);
        int64_t groups = num_groups(w.in_size, w.group_size), start = part * x.group, g = start / w.group_size;
        for (; part < end; g++) {
            Group group = group_at((panel * groups + g) * kPanel);
            int64_t group_end = (g + 1) * w.group_size < w.in_size ? (g + 1) * w.group_size : w.in_size;
            for (; start < group_end && part < end; start += x.group, part++) {
                int64_t count = group_end - start < x.group ? group_end - start : x.group;
                use(group, part, start, count, from);
                from += quantized_panel_bytes(count, bits);
            }
        }
    }

#if defined(PENSTOCK_BYTE_TILES)
    bool has_byte_tiles() const { return x.group <= ByteTiles::kMostInputs; }

    using Sums = int32_t[ByteTiles::kRows][kPanel];
    static constexpr int64_t kPartsAhead = 4;  // with few rows, how far ahead weights are fetched

    // Sums of some rows over a part of the inputs, to be added to their results.
    struct Pending {
        Group group;
        int64_t part, first_row;
        int rows;
        const Sums* sums;
        float* results;
    };

    // Adds the products of parts [begin, end) to the results of some rows for a panel; part 0 begins the results.
    //
    // All rows take a part of the inputs before the next one: its weights stay in the first-level cache, and what comes
    // next is fetched. While the unit multiplies for some rows, the sums of those before are added to their results.
    void by_tiles(TileShapes& shapes, int64_t first_row, int rows, int64_t panel, int64_t begin, int64_t end,
                  float* tile) const {
        if (begin == 0) memset(tile, 0, rows * kPanel * sizeof(float));
        const int64_t passes = divide_up(rows, ByteTiles::kRows), part_bytes = quantized_panel_bytes(x.group, bits);
        const int64_t lines = divide_up(part_bytes, passes * kCacheLine);
        ByteSteps steps((int)(part_bytes / ByteTiles::kQuadBytes * (8 / bits)), lines);
        alignas(64) Sums sums[2];
        Pending pending{};
        bool turn = false;
        for_parts(panel, begin, end, [&](const Group& group, int64_t part, int64_t start, int64_t count,
                                         const uint8_t* from) {
            alignas(64) uint8_t unpacked[ByteTiles::kMostInputs / kQuad * ByteTiles::kQuadBytes];
            int64_t packed_quads = divide_up(count, 32 / bits);
            if (bits == 4) ByteTiles::unpack(from, packed_quads, unpacked);
            if (count < x.group) steps = ByteSteps((int)packed_quads * (8 / bits), lines);
            const char* next = (const char*)(passes == 1    ? from + kPartsAhead * part_bytes
                                             : part + 1 < end ? from + part_bytes
                                                              : weights_of(panel + 1, begin));
            for (int first = 0; first < rows; first += ByteTiles::kRows, turn = !turn) {
                int own = rows - first < ByteTiles::kRows ? rows - first : ByteTiles::kRows;
                auto beside = [&](int row, int last)
                                  __attribute__((always_inline)) { add_pending(pending, row, last); };
                ByteTiles::multiply(shapes, x.values(first_row + first) + start, x.stride, own,
                                    bits == 4 ? unpacked : from, steps, next, sums[turn], beside);
                pending = {group, part, first_row + first, own, &sums[turn], tile + first * kPanel};
                next += lines * kCacheLine;
            }
        });
        add_pending(pending, 0, kPanel);
    }

    // Adds the sums of its rows [begin, end); there may be fewer rows.
    [[gnu::always_inline]] void add_pending(const Pending& pending, int begin, int end) const {
        if (end > pending.rows) end = pending.rows;
        if (w.zeros)
            add_pending_rows<true>(pending, begin, end);
        else
            add_pending_rows<false>(pending, begin, end);
    }

    template <bool has_zeros>
    [[gnu::always_inline]] void add_pending_rows(const Pending& pending, int begin, int end) const {
        const Group group = pending.group;
        const int64_t stride = x.stride;
        const uint8_t* own = (const uint8_t*)(x.groups(pending.first_row + begin) + pending.part);
        const int32_t* sums = (*pending.sums)[begin];
        float* results = pending.results + begin * kPanel;
        for (int r = begin; r < end; r++, own += stride, sums += kPanel, results += kPanel) {
            const RoundedGroup& rounded = *(const RoundedGroup*)own;
            i32x16 low = load_lanes(sums) + start_of<has_zeros>(rounded, group.zero_low);
            i32x16 high = load_lanes(sums + kLanes) + start_of<has_zeros>(rounded, group.zero_high);
            i32r both[kPanel / kRegister];
            split(low, high, both);
            add_scaled(both, rounded, group, results);
        }
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
