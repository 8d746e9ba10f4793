// Products of a panel of weights in block formats; how such weights are packed, and read back row by row.
#include "blocks.h"

#include "epilogue.h"

// Memory that is needed later, fetched piece by piece beside a product.
struct Fetching {
    const uint8_t* from;
    int64_t piece;  // bytes, for each unit

    [[gnu::always_inline]] void go_on() {
        for (int64_t line = 0; line < piece; line += kCacheLine) __builtin_prefetch(from + line, 0, 2);
        from += piece;
    }
};

// The product of a few rows with a panel. The weights go from their planes into it, and the results of one row stay in
// registers.
template <int64_t type, int rows>
struct RowsProduct {
    static constexpr BlockForm kForm = kFormOf<type>;
    static constexpr int kAtOnce = registers_at_once(rows, kForm.high_bits ? 2 : 1);
    using Sums = QuadSums<rows, kForm.largest(), kAtOnce>;

    Fetching fetching;
    bool is_halved;  // activations have two groups in a unit
    const int8_t* values[rows];
    const RoundedGroup* rounded[rows];
    f32r results[rows][kParts] = {};

    RowsProduct(const RoundedRows& x, int64_t first_row, Fetching fetching)
        : fetching(fetching), is_halved(x.group != kUnitInputs) {
        for (int r = 0; r < rows; r++) {
            values[r] = x.values(first_row + r);
            rounded[r] = x.groups(first_row + r);
        }
    }

    [[gnu::always_inline]] void add_record(const uint8_t* record) {
        const uint8_t* unit = record + kForm.values_at();
        const RecordScales<type> scales{record};
        for (int64_t input = 0; input < kForm.inputs; input += kUnitInputs, unit += kForm.unit_bytes()) {
            const int64_t group = input / kForm.group;
            fetching.go_on();
            if (kForm.group == kUnitInputs && !is_halved) {
                add_group<kUnitInputs / kQuad>(unit, 0, scales, group);
            } else {
                constexpr int kHalf = kUnitInputs / kQuad / 2;
                add_group<kHalf>(unit, 0, scales, group);
                add_group<kHalf>(unit, kHalf, scales, group + (kForm.group < kUnitInputs));
            }
        }
    }

private:
    // Quads [first, first + quads) of a unit, which have one scale, of activations too.
    template <int quads>
    [[gnu::always_inline]] void add_group(const uint8_t* unit, int first, const RecordScales<type>& scales, int64_t group) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; part += kAtOnce) {
            Sums sums;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sums.begin(r, start_of(*rounded[r]));
            const auto weights = [unit, part, first](int quad, int i) __attribute__((always_inline)) {
                return (i32r)UnitOfType<type>::quad_of(unit + (part + i) * sizeof(u32r), first + quad);
            };
            sums.template add<quads>(weights, values);
#pragma GCC unroll 4
            for (int i = 0; i < kAtOnce; i++) add_sums(sums.of, i, part + i, scales, group);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            values[r] += quads * kQuad;
            rounded[r]++;
#if defined(__AVX512F__)
            // Else GCC makes every address anew from the row's number, and has no registers left for them. With AVX2,
            // where registers for numbers are short and not those for addresses, it does better without.
            asm("" : "+r"(values[r]), "+r"(rounded[r]));
#endif
        }
    }

    // Where the sums of a row start: at minus the format's zero times the sum of its activations.
    [[gnu::always_inline]] static i32r start_of(const RoundedGroup& rounded) {
        return (Sums::kTakesSigned ? 0 : rounded.start * kForm.zero) - i32r{};
    }

    // Adds sums to the results for register `part` of the outputs: as floats, in one order everywhere.
    [[gnu::always_inline]] void add_sums(const i32r (*sums)[kAtOnce], int i, int part,
                                         const RecordScales<type>& scales, int64_t group) {
        const f32r scale = scales.scale(group, part * kRegister);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            results[r][part] = fma(__builtin_convertvector(sums[r][i], f32r), scale * rounded[r]->scale, results[r][part]);
        if constexpr (kForm.has_offsets) {
            const f32r offset = scales.offset(group, part * kRegister);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const float inputs_sum = rounded[r]->scale * (float)-rounded[r]->start;
                results[r][part] = fma(offset, inputs_sum - f32r{}, results[r][part]);
            }
        }
    }
};

// Some rows of a tile over a panel of one format, a few at a time.
template <int64_t type>
struct PanelProduct {
    static constexpr BlockForm kForm = kFormOf<type>;

    const RoundedRows& x;
    const uint8_t* records;
    int64_t in_size;

    void multiply(int64_t first_row, int rows, float* tile) const {
        const int turns = (int)divide_up(rows, kRowsAtOnce);
        for (int turn = 0; turn < turns; turn++) {
            const int row = rows * turn / turns, end = rows * (turn + 1) / turns;
            add<kRowsAtOnce>(first_row + row, end - row, fetching(turn, turns), tile + row * kPanel);
        }
    }

private:
    // If the rows pass in one turn, lines are fetched ahead that the processor is late with: those that are not read in
    // the order of memory, or all of them. The distances were measured (docs/perf-log.md). With more turns, each turn
    // fetches its part of the next panel, so that memory does not wait while rows pass by this panel again.
    Fetching fetching(int turn, int turns) const {
        constexpr bool kIsLate = kFetchesForFew || kForm.high_bits > 0 || kForm.has_scales();
        constexpr int64_t kAhead = kFetchesForFew ? kAheadForFew : 8192;
        constexpr int64_t kUnits = kForm.inputs / kUnitInputs, kShare = kForm.record_bytes() / kUnits;
        if (turns == 1) return {records + kAhead, kIsLate ? kShare : 0};
        const int64_t bytes = in_size / kForm.inputs * kForm.record_bytes();
        return {records + bytes + bytes * turn / turns, kShare / turns};
    }

    template <int most>
    void add(int64_t first_row, int rows, Fetching fetching, float* results) const {
        if constexpr (most > 1)
            if (rows < most) return add<most - 1>(first_row, rows, fetching, results);
        of_rows<most>(first_row, fetching, results);
    }

    template <int rows>
    __attribute__((noinline)) void of_rows(int64_t first_row, Fetching fetching, float* results) const {
        RowsProduct<type, rows> product{x, first_row, fetching};
        const uint8_t* record = records;
        for (int64_t first = 0; first < in_size; first += kForm.inputs, record += kForm.record_bytes())
            product.add_record(record);
        memcpy(results, product.results, sizeof(product.results));
    }
};

void BlockPanels::operator()(Shapes&, int64_t first_row, int rows, int64_t panel, float* tile) const {
    const BlockPanel& own = panels[panel];
    with_form(own.type, [&](auto type) {
        PanelProduct<type()>{x, own.records, in_size}.multiply(first_row, rows, tile);
    });
}

// Bytes of a panel with `in_size` inputs; 0 for a type that is not known.
PENSTOCK_EXPORT int64_t penstock_block_panel_bytes(int64_t type, int64_t in_size) {
    BlockForm form = form_of(type);
    return form.inputs ? in_size / form.inputs * form.record_bytes() : 0;
}

// Bytes of scratch that a token takes.
PENSTOCK_EXPORT int64_t penstock_block_token_bytes(int64_t in_size, int64_t group_size) {
    return rounded_for_blocks(nullptr, in_size, group_size).stride;
}

// The lowest `bits` bits of each of four bytes.
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

// Where the planes of an input's unit lie in a record, for one output.
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
