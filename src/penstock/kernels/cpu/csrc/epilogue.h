// What becomes of a tile of products: bias, gate, rounding, and its place in the output.
#pragma once
#include "abi.h"
#include "panels.h"

// Where row `row` of a weight lies among the packed columns. Gate and up projections share panels half by half,
// so that the gate finds both in one tile. role: 0 = plain, 1 = gate, 2 = up.
INLINE int64_t packed_column(int64_t row, int32_t role) {
    if (role == 0) return row;
    return row / kLanes * kPanel + row % kLanes + (role == 2 ? kLanes : 0);
}

template <class T, class Panels>
void write_product(const Panels& panels, int64_t num_rows, int64_t out_size, const T* bias, T* y, int64_t y_stride,
                   int32_t gated) {
    int64_t width = gated ? out_size / 2 : out_size;
    int64_t packed_size = gated ? (width + kLanes - 1) / kLanes * kPanel : out_size;
    for_each_tile(panels, num_rows, packed_size, [=](int64_t first, int rows, int64_t panel, const float* tile) {
        int64_t column = panel * (gated ? kLanes : kPanel);
        int64_t low_count = width - column, high_count = low_count - kLanes;
        f32x16 bias_low = {}, bias_high = {};
        if (bias && gated) {
            bias_low = load_some(bias + column, low_count);
            bias_high = load_some(bias + width + column, low_count);
        } else if (bias) {
            bias_low = load_some(bias + column, low_count);
            if (high_count > 0) bias_high = load_some(bias + column + kLanes, high_count);
        }
        for (int r = 0; r < rows; r++) {
            T* to = y + (first + r) * y_stride + column;
            f32x16 low = load(tile + r * kPanel) + bias_low;
            f32x16 high = load(tile + r * kPanel + kLanes) + bias_high;
            if (gated) {
                f32x16 product = (gated == kGeluTanh ? gelu_tanh(low) : silu(low)) * high;
                store_some(to, product, low_count);
                continue;
            }
            if (high_count >= kLanes) {
                store(to, low, high);
                continue;
            }
            store_some(to, low, low_count);
            if (high_count > 0) store_some(to + kLanes, high, high_count);
        }
    });
}
