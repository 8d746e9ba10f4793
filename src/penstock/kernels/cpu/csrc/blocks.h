// Packed weights in the block formats of GGUF files, and their product with rounded activations.
//
// A weight is scale * (q - zero) + offset: q has 2 to 8 bits, or is looked up in a table of 16; `zero` belongs to the
// format; scale and offset belong to an output and a group of 16 or 32 inputs. A panel holds 32 outputs as a run of
// records, one for each 32 or 256 inputs:
//     d        [32] float16
//     m        [32] float16, in formats with offsets
//     scales   [groups][32] bytes, in records of 256 inputs: scale = d * s; Q2_K keeps its offsets in their upper halves
//     offsets  [groups][32] bytes, in records of 256 inputs: offset = -m * o; in shorter ones offset = m
//     values   for each 32 inputs a low plane, then a high plane (`UnitOf`): quads of inputs, as VPDPBUSD takes them
//
// All formats share one product. A part of a panel, at most 128 inputs, is unpacked once into bytes, scales and offsets
// (BlockPart), and all rows of a tile are multiplied with it. Activations are rounded per row and group of inputs
// (rounded_rows.h), the groups as short as the shortest of the matrix. The sum of q - zero times activations is exact in
// integers; per group it becomes a float, is multiplied by both scales and added, then the offset times the sum of the
// activations. So a row gives the same numbers whatever its company, and whatever the instruction set (up to the
// rounding of a missing fused multiply-add).
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

constexpr int64_t kUnitInputs = 32;  // whose planes lie together
constexpr int64_t kPartInputs = 128;
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
    bool has_codebook;  // q is the number of an entry

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
    static constexpr int kQuads = kUnitInputs / kQuad;
    static constexpr int64_t kLowBytes = low_bits * kQuadLine;

    template <int bits>
    [[gnu::always_inline]] static u32r plane(const uint8_t* at, int quad) {
        constexpr int kAtOnce = 8 / bits;  // quads of a line
        constexpr uint32_t kMask = ((1u << bits) - 1) * 0x01010101u;
        u32r words = load_words(at + quad / kAtOnce * kQuadLine);
        if constexpr (bits == 8) return words;
        return words >> (quad % kAtOnce * bits) & kMask;
    }

    // bytes: [8 quads][32 outputs][4]
    [[gnu::always_inline]] static void unpack(const uint8_t* unit, uint8_t* bytes) {
        for (int64_t column = 0; column < kQuadLine; column += sizeof(u32r))
#pragma GCC unroll 8
            for (int quad = 0; quad < kQuads; quad++) {
                u32r words = plane<low_bits>(unit + column, quad);
                if constexpr (high_bits > 0) words |= plane<high_bits>(unit + kLowBytes + column, quad) << low_bits;
                if constexpr (has_codebook) words = look_up(words);
                memcpy(bytes + quad * kQuadLine + column, &words, sizeof(words));
            }
    }
};

// At most 128 inputs of a panel, unpacked.
struct BlockPart {
    static constexpr int64_t kMostGroups = kPartInputs / 16;
    alignas(64) uint8_t bytes[kPartInputs * kPanel];        // [inputs / 4][32][4]
    alignas(64) float scales[kMostGroups * kPanel];   // [groups][32]
    alignas(64) float offsets[kMostGroups * kPanel];  // the same, in formats that have them
};

INLINE f32x16 bytes_as_floats(const uint8_t* from, uint8_t mask, int shift, int32_t zero) {
    return by_registers([=](int i) {
        u8r narrow;
        memcpy(&narrow, from + i, sizeof(narrow));
        i32r wide = __builtin_convertvector(narrow, i32r);
        return __builtin_convertvector((wide >> shift & mask) - zero, f32r);
    });
}

// Unpacks `units` units of a record from unit `first` on; the groups go behind one another, as the bytes do.
template <int64_t type>
INLINE void unpack_units(const uint8_t* record, int64_t first, int64_t units, uint8_t* bytes, float* scales, float* offsets) {
    constexpr BlockForm kForm = kFormOf<type>;
    const uint8_t* values = record + kForm.values_at() + first * kForm.unit_bytes();
    for (int64_t unit = 0; unit < units; unit++)
        UnitOf<kForm.low_bits, kForm.high_bits, kForm.has_codebook>::unpack(values + unit * kForm.unit_bytes(),
                                                                            bytes + unit * kUnitInputs * kPanel);
    const uint16_t *d = (const uint16_t*)record, *m = d + kPanel;
    constexpr int64_t kGroups = kUnitInputs / kForm.group;
    for (int64_t half = 0; half < kPanel; half += kLanes) {
        const f32x16 scale = load_float16(d + half);
        if (!kForm.has_scales()) {
            store(scales + half, scale);
            if (kForm.has_offsets) store(offsets + half, load_float16(m + half));
            continue;
        }
        f32x16 offset{};
        if (kForm.has_offsets) offset = -load_float16(m + half);
        for (int64_t group = 0; group < units * kGroups; group++) {
            const int64_t to = group * kPanel + half, from = first * kGroups * kPanel + to;
            constexpr uint8_t kMask = kForm.is_halved ? 15 : 255;
            store(scales + to, bytes_as_floats(record + kForm.scales_at() + from, kMask, 0, kForm.scale_zero) * scale);
            if (!kForm.has_offsets) continue;
            const uint8_t* own = record + (kForm.is_halved ? kForm.scales_at() : kForm.offsets_at()) + from;
            store(offsets + to, bytes_as_floats(own, kMask, kForm.is_halved ? 4 : 0, 0) * offset);
        }
    }
}

// How products of bytes are added up: `kAtOnce` quads in 16 bits before they are widened to 32; 0: in 32 bits at once.
template <int rows, int kAtOnce>
struct QuadSums {
    static constexpr int kParts = kPanel / kRegister;
    i32r of[rows][kParts];

    [[gnu::always_inline]] void add(const uint8_t* w, const int8_t* x, int64_t x_stride, int quads) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
        if constexpr (kAtOnce > 0) {
            for (int quad = 0; quad < quads; quad += kAtOnce, w += kAtOnce * kQuadLine, x += kAtOnce * kQuad)
                add_narrow(w, x, x_stride);
            return;
        }
#endif
        for (int quad = 0; quad < quads; quad++, w += kQuadLine, x += kQuad)
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) {
                i32r weights;
                memcpy(&weights, w + i * sizeof(i32r), sizeof(i32r));
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) of[r][i] = add_quads(of[r][i], weights, spread(quad_at(x + r * x_stride)));
            }
    }

private:
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    [[gnu::always_inline]] void add_narrow(const uint8_t* w, const int8_t* x, int64_t x_stride) {
        __m256i halves[rows][kParts];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) halves[r][i] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int quad = 0; quad < kAtOnce; quad++, w += kQuadLine, x += kQuad)  // unrolled, it would run out of registers
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const __m256i own = _mm256_set1_epi32(quad_at(x + r * x_stride));
#pragma GCC unroll 8
                for (int i = 0; i < kParts; i++) {
                    const __m256i weights = _mm256_load_si256((const __m256i*)w + i);
                    halves[r][i] = _mm256_add_epi16(halves[r][i], _mm256_maddubs_epi16(weights, own));
                }
            }
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < kParts; i++) of[r][i] += (i32r)_mm256_madd_epi16(halves[r][i], ones);
    }
#endif
};

// Quads whose products with activations (at most 127 in magnitude) fit 16 bits when added up: a power of 2 up to 8, or
// 0. A 16-bit lane takes two of a quad's four products.
INLINE constexpr int quads_in_16_bits(int largest) {
    for (int quads = 8; quads >= 2; quads /= 2)
        if (2 * 127 * largest * quads <= 32767) return quads;
    return 0;
}

// Where the weights of a panel lie, and in which format.
struct BlockPanel {
    const uint8_t* records;
    int64_t type;
};

// As DensePanels, over rows that have been rounded and panels of block formats.
struct BlockPanels {
    using Shapes = NoShapes;
    static constexpr bool kTakesMany = false;
    static constexpr int kMostRows = 48;
    static int rows_at_once() { return kMostRows; }

    RoundedRows x;
    const BlockPanel* panels;
    int64_t in_size;

    void operator()(Shapes&, int64_t first_row, int rows, int64_t panel, float* tile) const;
};

// Rows as the product with block formats takes them: they bring the sum of each group.
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

// The same over whichever form the weight has.
template <class Use>
void with_rounded_panels(const QuantizedLinearArgs& args, int64_t num_rows, const Use& use) {
    if (args.bits == kBlocks)
        with_block_panels(args, num_rows, use);
    else
        with_quantized_panels(args, num_rows, use);
}
