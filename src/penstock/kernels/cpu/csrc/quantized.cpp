// y = x W^T + bias over 8- or 4-bit weights, or weights in block formats; how 8- and 4-bit weights are packed, and read
// back row by row.
#include "quantized.h"

#include "blocks.h"
#include "epilogue.h"

template struct QuantizedPanels<8>;
template struct QuantizedPanels<4>;

template <class T>
static void quantized_linear(const QuantizedLinearArgs& args, int64_t num_tokens) {
    with_rounded_panels(args, num_tokens, [&](const auto& panels) {
        write_product<T>(panels, num_tokens, args.out_size, (const T*)args.bias, (T*)args.y, args.y_stride, args.gated);
    });
}

PENSTOCK_EXPORT void penstock_quantized_linear(const void* args, const Step* step) {
    const QuantizedLinearArgs& linear_args = *(const QuantizedLinearArgs*)args;
    if (linear_args.dtype == kBFloat16)
        quantized_linear<bf16>(linear_args, step->num_tokens);
    else
        quantized_linear<float>(linear_args, step->num_tokens);
}

static int64_t scale_bytes(int32_t scale_dtype) { return scale_dtype == kFloat32 ? 4 : 2; }

// `out_size` counts both halves of a gated matrix.
PENSTOCK_EXPORT void penstock_quantized_sizes(int64_t out_size, int64_t in_size, int64_t group_size, int32_t bits,
                                              int32_t gated, int32_t scale_dtype, void* sizes) {
    int64_t panels = gated ? divide_up(out_size / 2, kLanes) : num_panels(out_size);
    int64_t scales = panels * num_groups(in_size, group_size) * kPanel;
    *(QuantizedSizes*)sizes = {panels * quantized_panel_bytes(in_size, bits), scales * scale_bytes(scale_dtype), scales,
                               RoundedRows(nullptr, in_size, group_size, bits).stride};
}

static void pack_values(const uint8_t* q, int64_t in_size, int bits, uint8_t* column) {
    constexpr int64_t kLine = kPanel * kQuad;
    if (bits == 8)
        for (int64_t k = 0; k < in_size; k++) column[k / kQuad * kLine + k % kQuad] = q[k];
    else
        for (int64_t k = 0; k < in_size; k++) {
            uint8_t& both = column[k / (2 * kQuad) * kLine + k % kQuad];
            both = k / kQuad % 2 ? (uint8_t)((both & 0x0f) | q[k] << 4) : (uint8_t)(q[k] & 0x0f);
        }
}

PENSTOCK_EXPORT void penstock_pack_quantized(const void* args) {
    const QuantizedPackArgs& pack = *(const QuantizedPackArgs*)args;
    int64_t groups = num_groups(pack.in_size, pack.group_size), width = scale_bytes(pack.scale_dtype);
    int64_t panel_bytes = quantized_panel_bytes(pack.in_size, pack.bits);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < pack.num_rows; r++) {
        int64_t packed = packed_column(pack.first_row + r, pack.role);
        int64_t panel = packed / kPanel, column = packed % kPanel;
        pack_values(pack.q + r * pack.in_size, pack.in_size, pack.bits,
                    pack.weight + panel * panel_bytes + column * kQuad);
        for (int64_t g = 0; g < groups; g++) {
            int64_t from = r * groups + g, to = (panel * groups + g) * kPanel + column;
            memcpy((uint8_t*)pack.packed_scales + to * width, (const uint8_t*)pack.scales + from * width, width);
            if (pack.packed_zeros) pack.packed_zeros[to] = pack.zeros ? pack.zeros[from] : middle_of(pack.bits);
        }
    }
}

static float scale_at(const QuantizedGatherArgs& args, int64_t at) {
    if (args.scale_dtype == kFloat32) return ((const float*)args.scales)[at];
    uint16_t lanes[kLanes] = {((const uint16_t*)args.scales)[at]};
    return first_lane(args.scale_dtype == kBFloat16 ? load((const bf16*)lanes) : load_float16(lanes));
}

// Writes the weights of one output for inputs [first, first + count), all of one group, to y.
template <class T>
static void gather_group(const QuantizedGatherArgs& args, const uint8_t* column, int64_t first, int64_t count,
                         int32_t zero, float scale, T* y) {
    constexpr int64_t kLine = kPanel * kQuad;
    for (int64_t start = 0; start < count; start += kLanes) {
        int64_t some = count - start < kLanes ? count - start : kLanes;
        int32_t whole[kLanes] = {};
        for (int64_t i = 0; i < some; i++) {
            int64_t k = first + start + i;
            int32_t q = args.bits == 8 ? column[k / kQuad * kLine + k % kQuad]
                                       : column[k / (2 * kQuad) * kLine + k % kQuad] >> k / kQuad % 2 * 4 & 0x0f;
            whole[i] = q - zero;
        }
        f32x16 values = by_registers([&](int i) { return __builtin_convertvector(load_register(whole + i), f32r); });
        store_some(y + first + start, values * scale, count - start);
    }
}

template <class T>
static void gather(const QuantizedGatherArgs& args, const Step& step) {
    int64_t groups = num_groups(args.in_size, args.group_size);
    int64_t panel_bytes = quantized_panel_bytes(args.in_size, args.bits);
#pragma omp parallel for schedule(static) if (step.num_tokens > 16)
    for (int64_t t = 0; t < step.num_tokens; t++) {
        int64_t id = step.input_ids[t];
        T* y = (T*)args.y + t * args.in_size;
        if (id < 0 || id >= args.out_size) {
            memset(y, 0, args.in_size * sizeof(T));
            continue;
        }
        int64_t panel = id / kPanel, column = id % kPanel;
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = (panel * groups + g) * kPanel + column, first = g * args.group_size;
            int64_t left = args.in_size - first;
            int32_t zero = args.zeros ? ((const uint8_t*)args.zeros)[at] : middle_of(args.bits);
            gather_group(args, args.weight + panel * panel_bytes + column * kQuad, first,
                         left < args.group_size ? left : args.group_size, zero, scale_at(args, at), y);
        }
    }
}

PENSTOCK_EXPORT void penstock_gather_quantized(const void* args, const Step* step) {
    const QuantizedGatherArgs& gather_args = *(const QuantizedGatherArgs*)args;
    if (gather_args.dtype == kBFloat16)
        gather<bf16>(gather_args, *step);
    else
        gather<float>(gather_args, *step);
}
