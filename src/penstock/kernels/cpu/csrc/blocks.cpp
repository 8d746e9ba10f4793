// Products of a panel of weights in block formats; how they are packed, and read back row by row.
#include "blocks.h"

#include "epilogue.h"

// What the rows of a tile are multiplied with: a part, and where its inputs begin.
struct PartProduct {
    const RoundedRows& x;
    const BlockPart& part;
    int64_t first_input, inputs;
    int64_t weight_group;
    int32_t zero;
    bool has_offsets;

    // Adds the products of some rows to their results for 32 outputs.
    template <int rows, int kAtOnce>
    [[gnu::always_inline]] void add(int64_t first_row, float* results) const {
        constexpr int kParts = kPanel / kRegister;
        const int64_t groups = inputs / x.group;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t start = first_input + g * x.group;
            const RoundedGroup* rounded[rows];
            QuadSums<rows, kAtOnce> sums;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                rounded[r] = &x.groups(first_row + r)[start / x.group];
#pragma GCC unroll 8
                for (int i = 0; i < kParts; i++) sums.of[r][i] = rounded[r]->start * zero - i32r{};
            }
            sums.add(part.bytes + g * x.group * kPanel, x.values(first_row) + start, x.stride, (int)(x.group / kQuad));
            const int64_t own = g * x.group / weight_group * kPanel;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const float scale = rounded[r]->scale, inputs_sum = scale * (float)-rounded[r]->start;
#pragma GCC unroll 8
                for (int i = 0; i < kParts; i++) {
                    float* to = results + r * kPanel + i * kRegister;
                    f32r result = load_register(to), both = load_register(part.scales + own + i * kRegister) * scale;
                    result = fma(__builtin_convertvector(sums.of[r][i], f32r), both, result);
                    if (has_offsets)
                        result = fma(load_register(part.offsets + own + i * kRegister), inputs_sum - f32r{}, result);
                    store(to, result);
                }
            }
        }
    }

    template <int kAtOnce>
    __attribute__((noinline)) void add_rows(int64_t first_row, int rows, float* results) const {
        int row = 0;
        for (; row + kMaxRows <= rows; row += kMaxRows) add<kMaxRows, kAtOnce>(first_row + row, results + row * kPanel);
        if (row < rows) add_rest<kMaxRows - 1, kAtOnce>(first_row + row, rows - row, results + row * kPanel);
    }

    template <int most, int kAtOnce>
    void add_rest(int64_t first_row, int rows, float* results) const {
        if (rows == most) return add<most, kAtOnce>(first_row, results);
        if constexpr (most > 1) add_rest<most - 1, kAtOnce>(first_row, rows, results);
    }

    void add_rows(int largest, int64_t first_row, int rows, float* results) const {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
        const int fitting = quads_in_16_bits(largest), quads = (int)(x.group / kQuad);
        switch (fitting < quads ? fitting : quads) {
            case 8: return add_rows<8>(first_row, rows, results);
            case 4: return add_rows<4>(first_row, rows, results);
            case 2: return add_rows<2>(first_row, rows, results);
        }
#endif
        (void)largest;
        add_rows<0>(first_row, rows, results);
    }
};

template <int64_t type>
static void multiply_panel(const RoundedRows& x, const uint8_t* records, int64_t in_size, int64_t first_row, int rows,
                           float* tile) {
    constexpr BlockForm kForm = kFormOf<type>;
    BlockPart part;
    for (int64_t first = 0; first < in_size; first += kPartInputs) {
        const int64_t inputs = in_size - first < kPartInputs ? in_size - first : kPartInputs;
        const uint8_t* record = records + first / kForm.inputs * kForm.record_bytes();
        if (kForm.has_scales()) {
            unpack_units<type>(record, first % kForm.inputs / kUnitInputs, inputs / kUnitInputs, part.bytes, part.scales,
                               part.offsets);
        } else {
            for (int64_t unit = 0; unit < inputs / kUnitInputs; unit++)
                unpack_units<type>(record + unit * kForm.record_bytes(), 0, 1, part.bytes + unit * kUnitInputs * kPanel,
                                   part.scales + unit * kPanel, part.offsets + unit * kPanel);
        }
        PartProduct{x, part, first, inputs, kForm.group, kForm.zero, kForm.has_offsets}.add_rows(kForm.largest(), first_row,
                                                                                                rows, tile);
    }
}

void BlockPanels::operator()(Shapes&, int64_t first_row, int rows, int64_t panel, float* tile) const {
    memset(tile, 0, rows * kPanel * sizeof(float));
    const BlockPanel& own = panels[panel];
    with_form(own.type, [&](auto type) { multiply_panel<type()>(x, own.records, in_size, first_row, rows, tile); });
}

// Bytes of a panel of so many inputs.
PENSTOCK_EXPORT int64_t penstock_block_panel_bytes(int64_t type, int64_t in_size) {
    BlockForm form = form_of(type);
    return form.inputs ? in_size / form.inputs * form.record_bytes() : 0;
}

// Bytes of scratch that a token takes.
PENSTOCK_EXPORT int64_t penstock_block_token_bytes(int64_t in_size, int64_t group_size) {
    return rounded_for_blocks(nullptr, in_size, group_size).stride;
}

// The bits of four bytes from the lowest on.
static uint32_t low_bits_of(uint32_t quad, int bits) { return quad & ((1u << bits) - 1) * 0x01010101u; }

// Puts the low `bits` bits of the four bytes of a quad, of which a unit has eight, into the column of an output.
static void put_quad(uint8_t* column, int bits, int64_t quad, uint32_t bytes) {
    const int64_t at_once = 8 / bits;
    uint8_t* to = column + quad / at_once * kQuadLine;
    uint32_t line;
    memcpy(&line, to, kQuad);
    line |= low_bits_of(bytes, bits) << (quad % at_once * bits);
    memcpy(to, &line, kQuad);
}

static unsigned take_bits(const uint8_t* column, int bits, int64_t input) {
    const int64_t quad = input / kQuad, at_once = 8 / bits;
    return column[quad / at_once * kQuadLine + input % kQuad] >> (quad % at_once * bits) & ((1u << bits) - 1);
}

// A record's values for one output: where the planes of an input's unit lie.
static uint8_t* values_of(const BlockForm& form, uint8_t* record, int64_t column, int64_t input) {
    return record + form.values_at() + input / kUnitInputs * form.unit_bytes() + column * kQuad;
}

static void pack_record(const BlockForm& form, const BlockPackArgs& pack, int64_t row, int64_t index, uint8_t* record,
                        int64_t column) {
    const int64_t records = pack.in_size / form.inputs, at = row * records + index;
    ((uint16_t*)record)[column] = pack.d[at];
    if (form.has_offsets) ((uint16_t*)record)[kPanel + column] = pack.m[at];
    for (int64_t g = 0; form.has_scales() && g < form.groups(); g++) {
        uint8_t scale = pack.scales[at * form.groups() + g], offset = form.has_offsets ? pack.offsets[at * form.groups() + g] : 0;
        record[form.scales_at() + g * kPanel + column] = form.is_halved ? (uint8_t)(scale | offset << 4) : scale;
        if (form.has_offsets && !form.is_halved) record[form.offsets_at() + g * kPanel + column] = offset;
    }
    const uint8_t* q = pack.q + row * pack.in_size + index * form.inputs;
    for (int64_t k = 0; k < form.inputs; k += kQuad) {
        uint8_t* planes = values_of(form, record, column, k);
        const int64_t quad = k % kUnitInputs / kQuad;
        uint32_t bytes;
        memcpy(&bytes, q + k, kQuad);
        put_quad(planes, form.low_bits, quad, bytes);
        if (form.high_bits)
            put_quad(planes + form.low_bits * kQuadLine, form.high_bits, quad,
                     low_bits_of(bytes >> form.low_bits, form.high_bits));
    }
}

PENSTOCK_EXPORT void penstock_pack_blocks(const void* args) {
    const BlockPackArgs& pack = *(const BlockPackArgs*)args;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < pack.num_rows; r++) {
        const int64_t packed = packed_column(pack.first_row + r, pack.role);
        const BlockPanel& panel = ((const BlockPanel*)pack.panels)[packed / kPanel];
        const BlockForm form = form_of(panel.type);
        for (int64_t index = 0; index < pack.in_size / form.inputs; index++)
            pack_record(form, pack, r, index, (uint8_t*)panel.records + index * form.record_bytes(), packed % kPanel);
    }
}

static float float_of(uint16_t float16) {
    uint16_t lanes[kLanes] = {float16};
    return first_lane(load_float16(lanes));
}

// The weight of an input of a record.
static float weight_at(const BlockForm& form, const uint8_t* record, int64_t column, int64_t input) {
    const uint8_t* planes = values_of(form, (uint8_t*)record, column, input);
    unsigned q = take_bits(planes, form.low_bits, input % kUnitInputs);
    if (form.high_bits)
        q |= take_bits(planes + form.low_bits * kQuadLine, form.high_bits, input % kUnitInputs) << form.low_bits;
    if (form.has_codebook) q = kCodebook[q];
    float scale = float_of(((const uint16_t*)record)[column]), offset = 0.0f;
    if (form.has_offsets) offset = float_of(((const uint16_t*)record)[kPanel + column]);
    if (form.has_scales()) {
        const int64_t at = input / form.group * kPanel + column;
        const unsigned byte = record[form.scales_at() + at];
        scale *= (float)((int)(form.is_halved ? byte & 15 : byte) - form.scale_zero);
        if (form.has_offsets) offset *= -(float)(form.is_halved ? byte >> 4 : record[form.offsets_at() + at]);
    }
    return fmaf(scale, (float)((int)q - form.zero), offset);  // the product is exact: one rounding, as anywhere else
}

template <class T>
static void gather_blocks(const QuantizedGatherArgs& args, const Step& step) {
#pragma omp parallel for schedule(static) if (step.num_tokens > 16)
    for (int64_t t = 0; t < step.num_tokens; t++) {
        int64_t id = step.input_ids[t];
        T* y = (T*)args.y + t * args.in_size;
        if (id < 0 || id >= args.out_size) {
            memset(y, 0, args.in_size * sizeof(T));
            continue;
        }
        const BlockPanel& panel = ((const BlockPanel*)args.weight)[id / kPanel];
        const BlockForm form = form_of(panel.type);
        for (int64_t first = 0; first < args.in_size; first += kLanes) {
            const uint8_t* record = panel.records + first / form.inputs * form.record_bytes();
            float weights[kLanes];
            for (int64_t i = 0; i < kLanes; i++)
                weights[i] = weight_at(form, record, id % kPanel, first % form.inputs + i);
            store(y + first, load(weights));
        }
    }
}

PENSTOCK_EXPORT void penstock_gather_blocks(const void* args, const Step* step) {
    const QuantizedGatherArgs& gather_args = *(const QuantizedGatherArgs*)args;
    if (gather_args.dtype == kBFloat16)
        gather_blocks<bf16>(gather_args, *step);
    else
        gather_blocks<float>(gather_args, *step);
}
