// Packed weights in the block formats of GGUF files, and their product with rounded activations.
//
// A weight is scale * (q - zero) + offset: q has 2 to 8 bits, or is looked up in a table of 16; `zero` belongs to the
// format; scale and offset belong to an output and a group of 16 or 32 inputs. A panel holds 32 outputs as a run of
// records, one for each 32 or 256 inputs:
//     d        [32] float16
//     m        [32] float16, in formats with offsets
//     scales   [groups][32] bytes s, in records of 256 inputs: scale = d * (s - scale_zero); in shorter ones scale = d
//     offsets  [groups][32] bytes o, in records of 256 inputs: offset = -m * o; in shorter ones offset = m. Q2_K keeps
//              them in the upper halves of the bytes of scales
//     values   for each 32 inputs a low plane, then a high plane (`UnitOf`): quads of inputs, as VPDPBUSD takes them
//
// All formats share one product (blocks.cpp): a few rows at a time go over a panel, whose weights are unpacked in
// registers (`UnitOf`, `RecordScales`) and never lie in memory as bytes. Activations are rounded per row and group of
// inputs (rounded_rows.h), the groups as short as the shortest of the matrix. The sum of (q - zero) * activation over a
// group is exact in integers. It becomes a float, is multiplied by both scales and added to the result; then the offset
// times the sum of the activations is added. So a row gives the same numbers whatever rows are computed beside it, and
// whatever the instruction set (up to the rounding of a missing fused multiply-add).
#pragma once
#include "quantized.h"

// GGUF's numbers of the formats.
enum BlockType : int64_t {
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ2_K = 10,
    kQ3_K = 11,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
    kIQ4_NL = 20,
    kIQ4_XS = 23,
};

constexpr int64_t kUnitInputs = 32;  // inputs of a unit: their planes lie together
constexpr int64_t kQuadLine = kPanel * kQuad;  // bytes of a quad of inputs for all outputs

// What a format is made of.
struct BlockForm {
    int low_bits, high_bits;  // of the planes
    int64_t inputs;           // of a record
    int64_t group;            // inputs that share scale and offset
    int32_t zero;
    int32_t scale_zero;  // what is subtracted from a byte of scales
    bool has_offsets;
    bool is_halved;     // scales and offsets share a byte
    bool has_codebook;  // q is the number of an entry of kCodebook

    constexpr bool has_scales() const { return inputs > kUnitInputs; }
    constexpr int64_t groups() const { return inputs / group; }
    constexpr int64_t unit_bytes() const { return kQuadLine * (low_bits + high_bits); }
    constexpr int64_t scales_at() const { return 2 * kPanel * (has_offsets ? 2 : 1); }
    constexpr int64_t offsets_at() const { return scales_at() + (has_scales() ? groups() * kPanel : 0); }
    constexpr int64_t values_at() const {
        return offsets_at() + (has_scales() && has_offsets && !is_halved ? groups() * kPanel : 0);
    }
    constexpr int64_t record_bytes() const { return values_at() + inputs / kUnitInputs * unit_bytes(); }
    constexpr int largest() const { return has_codebook ? 255 : (1 << (low_bits + high_bits)) - 1; }
};

//                                       low high inputs group zero scale_zero offsets halved codebook
template <int64_t type>
constexpr BlockForm kFormOf{};
template <>
constexpr BlockForm kFormOf<kQ4_0>{4, 0, 32, 32, 8, 0, false, false, false};
template <>
constexpr BlockForm kFormOf<kQ4_1>{4, 0, 32, 32, 0, 0, true, false, false};
template <>
constexpr BlockForm kFormOf<kQ5_0>{4, 1, 32, 32, 16, 0, false, false, false};
template <>
constexpr BlockForm kFormOf<kQ5_1>{4, 1, 32, 32, 0, 0, true, false, false};
template <>
constexpr BlockForm kFormOf<kQ8_0>{8, 0, 32, 32, 128, 0, false, false, false};
template <>
constexpr BlockForm kFormOf<kQ2_K>{2, 0, 256, 16, 0, 0, true, true, false};
template <>
constexpr BlockForm kFormOf<kQ3_K>{2, 1, 256, 16, 4, 32, false, false, false};
template <>
constexpr BlockForm kFormOf<kQ4_K>{4, 0, 256, 32, 0, 0, true, false, false};
template <>
constexpr BlockForm kFormOf<kQ5_K>{4, 1, 256, 32, 0, 0, true, false, false};
template <>
constexpr BlockForm kFormOf<kQ6_K>{4, 2, 256, 16, 32, 128, false, false, false};
template <>
constexpr BlockForm kFormOf<kIQ4_NL>{4, 0, 32, 32, 128, 0, false, false, true};
template <>
constexpr BlockForm kFormOf<kIQ4_XS>{4, 0, 256, 32, 128, 32, false, false, true};

// The table of IQ4_NL and IQ4_XS, plus 128.
alignas(16) constexpr uint8_t kCodebook[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Calls use(form) with the form of a type as a constant.
template <class Use>
INLINE void with_form(int64_t type, const Use& use) {
    switch (type) {
#define PENSTOCK_FORM(type) \
    case type: return use(std::integral_constant<int64_t, type>{});
        PENSTOCK_FORM(kQ4_0)
        PENSTOCK_FORM(kQ4_1)
        PENSTOCK_FORM(kQ5_0)
        PENSTOCK_FORM(kQ5_1)
        PENSTOCK_FORM(kQ8_0)
        PENSTOCK_FORM(kQ2_K)
        PENSTOCK_FORM(kQ3_K)
        PENSTOCK_FORM(kQ4_K)
        PENSTOCK_FORM(kQ5_K)
        PENSTOCK_FORM(kQ6_K)
        PENSTOCK_FORM(kIQ4_NL)
        PENSTOCK_FORM(kIQ4_XS)
#undef PENSTOCK_FORM
    }
}

INLINE BlockForm form_of(int64_t type) {
    BlockForm form{};
    with_form(type, [&](auto number) { form = kFormOf<number()>; });
    return form;
}

INLINE u32r load_words(const uint8_t* from) {
    u32r words;
    memcpy(&words, from, sizeof(words));
    return words;
}

// Entries of the table, byte by byte; each byte of `numbers` is at most 15.
INLINE u32r look_up(u32r numbers) {
#if defined(__AVX512BW__)
    __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kCodebook));
    return (u32r)_mm512_shuffle_epi8(table, (__m512i)numbers);
#elif defined(__AVX2__)
    __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kCodebook));
    return (u32r)_mm256_shuffle_epi8(table, (__m256i)numbers);
#else
    uint8_t bytes[sizeof(numbers)];
    memcpy(bytes, &numbers, sizeof(numbers));
    for (uint8_t& byte : bytes) byte = kCodebook[byte];
    memcpy(&numbers, bytes, sizeof(numbers));
    return numbers;
#endif
}

// The planes of 32 inputs. A plane of b bits is b lines of 128 bytes; the line l of 4 bits holds the quads 2 l and
// 2 l + 1, of 2 bits the quads 4 l to 4 l + 3, of 1 bit all eight, each in the bits of every byte from the lowest on.
template <int low_bits, int high_bits, bool has_codebook>
struct UnitOf {
    static constexpr int64_t kLowBytes = low_bits * kQuadLine;

    // The bits of a quad in a plane, moved so that bit `to` of each byte is the lowest of them.
    template <int bits, int to>
    [[gnu::always_inline]] static u32r plane(const uint8_t* at, int quad) {
        constexpr int kAtOnce = 8 / bits;  // quads of a line
        constexpr uint32_t kMask = ((1u << bits) - 1) * 0x01010101u << to;
        const u32r words = load_words(at + quad / kAtOnce * kQuadLine);
        if constexpr (bits == 8) return words;
        const int from = quad % kAtOnce * bits;
        return (from >= to ? words >> (from - to) : words << (to - from)) & kMask;
    }

    // A quad of as many outputs as a register holds; `unit` begins with the first of them.
    [[gnu::always_inline]] static u32r quad_of(const uint8_t* unit, int quad) {
        u32r words = plane<low_bits, 0>(unit, quad);
        if constexpr (high_bits > 0) words |= plane<high_bits, low_bits>(unit + kLowBytes, quad);
        if constexpr (has_codebook) words = look_up(words);
        return words;
    }
};

template <int64_t type>
using UnitOfType = UnitOf<kFormOf<type>.low_bits, kFormOf<type>.high_bits, kFormOf<type>.has_codebook>;

// Scales and offsets of a record's groups, as many outputs as a register holds; `lane` is the first of them.
template <int64_t type>
struct RecordScales {
    static constexpr BlockForm kForm = kFormOf<type>;
    const uint8_t* record;

    [[gnu::always_inline]] f32r scale(int64_t group, int64_t lane) const {
        f32r scale = load_float16_register((const uint16_t*)record + lane);
        if constexpr (!kForm.has_scales()) return scale;
        constexpr uint8_t kMask = kForm.is_halved ? 15 : 255;
        return bytes_at(kForm.scales_at(), group, lane, kMask, 0, kForm.scale_zero) * scale;
    }

    [[gnu::always_inline]] f32r offset(int64_t group, int64_t lane) const {
        f32r offset = load_float16_register((const uint16_t*)record + kPanel + lane);
        if constexpr (!kForm.has_scales()) return offset;
        if constexpr (kForm.is_halved) return bytes_at(kForm.scales_at(), group, lane, 15, 4, 0) * -offset;
        return bytes_at(kForm.offsets_at(), group, lane, 255, 0, 0) * -offset;
    }

private:
    [[gnu::always_inline]] f32r bytes_at(int64_t at, int64_t group, int64_t lane, uint8_t mask, int shift,
                                         int32_t zero) const {
        i32r wide = load_register(record + at + group * kPanel + lane);
        if (mask != 255) wide = wide >> shift & mask;
        return __builtin_convertvector(wide - zero, f32r);
    }
};

// Where the records of a panel lie, and in which format.
struct BlockPanel {
    const uint8_t* records;
    int64_t type;
};

// As DensePanels, over rows that have been rounded and panels of block formats.
struct BlockPanels {
    using Shapes = NoShapes;
    static constexpr bool kTakesMany = false;
    static constexpr int kMostRows = 50;  // which go over a panel a few at a time, while it is in a cache
    static int rows_at_once() { return kMostRows; }

    RoundedRows x;
    const BlockPanel* panels;
    int64_t in_size;

    void operator()(Shapes&, int64_t first_row, int rows, int64_t panel, float* tile) const;
};

// Rounded rows for the product with block formats, which needs the sum of each group.
INLINE RoundedRows rounded_for_blocks(void* scratch, int64_t in_size, int64_t group_size) {
    constexpr int kBitsOfSums = 1;  // RoundedGroup::start is minus the sum
    return RoundedRows(scratch, in_size, group_size < in_size ? group_size : in_size / 2, kBitsOfSums);
}

// Rounds the first `num_rows` rows of args.x into args.scratch and calls use(panels) for the product with them.
template <class Use>
void with_block_panels(const QuantizedLinearArgs& args, int64_t num_rows, const Use& use) {
    RoundedRows rounded = rounded_for_blocks(args.scratch, args.in_size, args.group_size);
    if (args.dtype == kBFloat16)
        round_rows((const bf16*)args.x, args.x_stride, num_rows, rounded);
    else
        round_rows((const float*)args.x, args.x_stride, num_rows, rounded);
    use(BlockPanels{rounded, (const BlockPanel*)args.weight, args.in_size});
}

// As `with_block_panels`, for whichever form the weight has: block formats, 8 bits or 4.
template <class Use>
void with_rounded_panels(const QuantizedLinearArgs& args, int64_t num_rows, const Use& use) {
    if (args.bits == kBlocks)
        with_block_panels(args, num_rows, use);
    else
        with_quantized_panels(args, num_rows, use);
}
