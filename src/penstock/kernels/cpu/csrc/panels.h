// Packed weights, and the product of a few rows with one panel of them: the heart of every linear kernel.
//
// A panel holds 32 outputs, one after another for each step of the inputs, so that it is read as one stream:
//     bfloat16  [ceil(out / 32)][ceil(in / 2)][32][2]      pairs of inputs, as VDPBF16PS takes them
//     float32   [ceil(out / 32)][in][32]
// Outputs and inputs that fill up the last panel and pair are zero.
//
// Each number of a tile is summed over the inputs in one order, whatever the number of rows: a row's result does not
// depend on the rows beside it (batch invariance). It is the order of the inputs, in one accumulator, or that of the
// matrix unit (tiles.h).
#pragma once
#include <type_traits>

#include "half_panels.h"
#include "many_rows.h"
#include "shares.h"
#include "tiles.h"
#include "vec.h"

constexpr int kPanel = 32;
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 2 accumulators a row, 24 of 32 registers
#else
#define PENSTOCK_HALF_PANELS
constexpr int kMaxRows = 5;  // 2 half-width accumulators a row, 10 of 16
#endif

INLINE int64_t num_panels(int64_t out_size) { return (out_size + kPanel - 1) / kPanel; }

INLINE int64_t panel_elements(const bf16*, int64_t in_size) { return (in_size + 1) / 2 * 2 * kPanel; }
INLINE int64_t panel_elements(const float*, int64_t in_size) { return in_size * kPanel; }

// Two inputs in the 32 bits that a product step takes.
INLINE uint32_t pair_at(const bf16* x) {
    uint32_t pair;
    memcpy(&pair, x, 4);
    return pair;
}

// total += w.even * x.even + w.odd * x.odd, lane by lane
INLINE f32r add_products(f32r total, const bf16* weights, uint32_t pair) {
    u32r both;
    memcpy(&both, weights, sizeof(both));
#if defined(__AVX512BF16__)
    return (f32r)_mm512_dpbf16_ps((__m512)total, (__m512bh)both, (__m512bh)_mm512_set1_epi32((int32_t)pair));
#else
    total = fma((f32r)(both << 16), widen((bf16)pair) - f32r{}, total);
    return fma((f32r)(both & 0xffff0000u), widen((bf16)(pair >> 16)) - f32r{}, total);
#endif
}

INLINE f32r add_products(f32r total, const float* weights, float value) {
    f32r own;
    memcpy(&own, weights, sizeof(own));
    return fma(own, value - f32r{}, total);
}

// Whether weights are fetched ahead for however few rows. With AVX-512 the processor's own prefetching keeps up with few
// rows, and this would be in its way; it lags behind on processors with AVX2 alone.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kFetchesForFew = true;
#else
constexpr bool kFetchesForFew = false;
#endif
constexpr int64_t kAheadForFew = 3072;  // bytes; measured (docs/perf-log.md)

// Fetches 128 bytes that are needed later. The bytes go to the second-level cache, since the first has too few buffers.
// Rows and distances were measured (docs/perf-log.md): the gain is up to a third.
template <int rows>
INLINE void fetch_ahead(const void* weights) {
    if (rows <= 4 && !kFetchesForFew) return;
    const char* at = (const char*)weights + (rows <= 4 ? kAheadForFew : rows <= 6 ? 6144 : 8192);
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
}

// The sums of some rows for 16 and 16 lanes that lie apart, each over steps of the inputs: a step is one input, of
// bfloat16 a pair.
template <int rows>
struct PanelSums {
    static constexpr int kParts = kLanes / kRegister;
    f32r low[rows][kParts] = {}, high[rows][kParts] = {};

    template <class T, class Input>
    [[gnu::always_inline]] void add(int r, const T* low_lanes, const T* high_lanes, Input input) {
        constexpr int kPart = kRegister * sizeof(Input) / sizeof(T);
#pragma GCC unroll 4
        for (int i = 0; i < kParts; i++) {
            low[r][i] = add_products(low[r][i], low_lanes + i * kPart, input);
            high[r][i] = add_products(high[r][i], high_lanes + i * kPart, input);
        }
    }

    [[gnu::always_inline]] void store_low(int r, float* to) const { memcpy(to, low[r], sizeof(low[r])); }
    [[gnu::always_inline]] void store_high(int r, float* to) const { memcpy(to, high[r], sizeof(high[r])); }
};

template <int rows>
INLINE void multiply(const bf16* x, int64_t x_stride, const bf16* panel, int64_t in_size, float* tile) {
    PanelSums<rows> sums;
    const bf16* w = panel;
    for (int64_t k = 0; k + 1 < in_size; k += 2, w += 2 * kPanel) {
        fetch_ahead<rows>(w);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums.add(r, w, w + kPanel, pair_at(x + r * x_stride + k));
    }
    if (in_size % 2)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums.add(r, w, w + kPanel, (uint32_t)x[r * x_stride + in_size - 1]);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sums.store_low(r, tile + r * kPanel);
        sums.store_high(r, tile + r * kPanel + kLanes);
    }
}

template <int rows>
INLINE void multiply(const float* x, int64_t x_stride, const float* panel, int64_t in_size, float* tile) {
    PanelSums<rows> sums;
    const float* w = panel;
    for (int64_t k = 0; k < in_size; k++, w += kPanel) {
        fetch_ahead<rows>(w);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) sums.add(r, w, w + kLanes, x[r * x_stride + k]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sums.store_low(r, tile + r * kPanel);
        sums.store_high(r, tile + r * kPanel + kLanes);
    }
}

// What a thread sets up to multiply, and gives back at the end: nothing, or the registers of the matrix unit.
struct NoShapes {};

// How many rows a tile has at most, and what a thread needs to multiply them.
template <class T>
struct TileForm {
    using Shapes = NoShapes;
    static constexpr bool kTakesMany = false;  // whether for_many_rows can take the product
    static constexpr int kMostRows = kMaxRows;
    static int rows_at_once() { return kMaxRows; }
};

#if defined(PENSTOCK_TILES)
template <>
struct TileForm<bf16> {
    using Shapes = TileShapes;
    static constexpr bool kTakesMany = true;
    static constexpr int kMostRows = 256;
    static int rows_at_once() { return kHasTiles ? kMostRows : kMaxRows; }
};
#endif

// Whether a product of so many rows takes all 32 outputs at once. Without AVX-512 three rows do: half of a panel is too
// little work for them to wait for memory beside it.
template <int rows>
#if defined(PENSTOCK_HALF_PANELS)
constexpr bool kTakesWhole = rows == 1 || rows == 3;
#else
constexpr bool kTakesWhole = true;
#endif

// Rows and packed weights, as code that runs over panels takes them. A call with (shapes, first_row, rows, panel, tile)
// computes tile[r * 32 + j] = <x[first_row + r], W[32 * panel + j]>, with 1 <= rows <= rows_at_once() <= kMostRows.
template <class T>
struct DensePanels : TileForm<T> {
    const T* x;
    int64_t x_stride;
    const T* weight;
    int64_t in_size;

    DensePanels(const T* x, int64_t x_stride, const T* weight, int64_t in_size)
        : x(x), x_stride(x_stride), weight(weight), in_size(in_size) {}

    template <int rows>
    __attribute__((noinline)) void of(int64_t first_row, int64_t panel, float* tile) const {
        const T *own = x + first_row * x_stride, *weights = weight + panel * panel_elements(weight, in_size);
        if constexpr (kTakesWhole<rows>)
            multiply<rows>(own, x_stride, weights, in_size, tile);
        else
            multiply_by_halves<rows>(own, x_stride, weights, in_size, tile);
    }

    __attribute__((noinline)) void operator()(typename TileForm<T>::Shapes& shapes, int64_t first_row, int rows,
                                              int64_t panel, float* tile) const {
#if defined(PENSTOCK_TILES)
        if constexpr (std::is_same_v<T, bf16>)
            if (kHasTiles) return multiply_by_tiles(shapes, first_row, rows, panel, tile);
#endif
        (void)shapes;
        switch (rows) {
            case 1: return of<1>(first_row, panel, tile);
            case 2: return of<2>(first_row, panel, tile);
            case 3: return of<3>(first_row, panel, tile);
            case 4: return of<4>(first_row, panel, tile);
            case 5: return of<5>(first_row, panel, tile);
#if defined(__AVX512F__)
            case 6: return of<6>(first_row, panel, tile);
            case 7: return of<7>(first_row, panel, tile);
            case 8: return of<8>(first_row, panel, tile);
            case 9: return of<9>(first_row, panel, tile);
            case 10: return of<10>(first_row, panel, tile);
            case 11: return of<11>(first_row, panel, tile);
            case 12: return of<12>(first_row, panel, tile);
#endif
        }
    }

#if defined(PENSTOCK_TILES)
    static bool is_many(int64_t num_rows) { return kHasTiles && num_rows > kPassRows; }

    ManyRows many(int64_t num_rows, int64_t num_panels) const {
        return {(const bf16*)x, x_stride, (const bf16*)weight, in_size, num_rows, num_panels};
    }

private:
    void multiply_by_tiles(TileShapes& shapes, int64_t first_row, int rows, int64_t panel, float* tile) const {
        int64_t bytes = panel_elements(weight, in_size) * (int64_t)sizeof(T);
        auto rows_at = [&](int64_t row, int64_t k) -> TileRows {
            return {(const bf16*)x + (first_row + row) * x_stride + k, x_stride, kTileInputs};
        };
        int64_t block = rows > kPassRows ? kBlockInputs : in_size;  // a block's weights stay in the first-level cache
        for (int64_t first = 0; first < in_size; first += block) {
            int64_t end = first + block < in_size ? first + block : in_size;
            multiply_tile_block(shapes, rows_at, rows, (const char*)weight + panel * bytes, bytes, first, end, tile,
                                [](int, int) {});
        }
    }
#endif
};

// Compiled once, in linear.cpp.
extern template struct DensePanels<bf16>;
extern template struct DensePanels<float>;

// Calls use(first_row, rows, panel, tile) for every tile of the product, over all threads. All tiles have about as many
// rows.
template <class Panels, class Use>
void for_each_tile(const Panels& tile_of, int64_t num_rows, int64_t out_size, const Use& use) {
    if (num_rows == 0) return;
    int64_t panels = num_panels(out_size);
#if defined(PENSTOCK_TILES)
    if constexpr (Panels::kTakesMany)
        if (tile_of.is_many(num_rows)) return for_many_rows(tile_of.many(num_rows, panels), num_rows, panels, use);
#endif
    int64_t most = Panels::rows_at_once();
    int64_t row_tiles = (num_rows + most - 1) / most;
    Shares shares(panels);
#pragma omp parallel
    {
        typename Panels::Shapes shapes;
        shares.each([&](int64_t panel) {
            alignas(64) float tile[Panels::kMostRows * kPanel];
            for (int64_t t = 0; t < row_tiles; t++) {
                int64_t first = num_rows * t / row_tiles, end = num_rows * (t + 1) / row_tiles;
                tile_of(shapes, first, (int)(end - first), panel, tile);
                use(first, (int)(end - first), panel, tile);
            }
        });
    }
}
