// Products of one to five rows with 16 outputs, where 16 registers hold all sums, weights and values: no AVX-512.
//
// With three rows by 32 outputs the compiler runs out of registers, and keeps sums in memory. Here a pass has all rows
// and 16 outputs, and a value is loaded again for each use, so that no register holds it for longer.
//
// The product of rows with a panel takes two passes. Rows are made floats first, some inputs at a time: so a value
// takes one load. The weights of these inputs stay in the first-level cache for the second pass. Each sum is over the
// inputs from the first to the last, as in panels.h: storing it in between loses nothing.
#pragma once
#include <type_traits>

#include "vec.h"

constexpr int kHalfPanel = kLanes;
constexpr int kWideInputs = 64;  // inputs of a pass
constexpr int kHalfParts = kHalfPanel / kRegister;

// Makes the compiler load again what lies at `at`, instead of keeping it in registers that sums need.
template <class T>
INLINE void forget(const T*& at) {
    asm("" : "+r"(at));
}

INLINE u32r pairs_at(const void* from) {
    u32r pairs;
    memcpy(&pairs, from, sizeof(pairs));
    return pairs;
}

INLINE f32r even_of(u32r pairs) { return (f32r)(pairs << 16); }
INLINE f32r odd_of(u32r pairs) { return (f32r)(pairs & 0xffff0000u); }

// Values of rows as `widen_inputs` writes them: of bfloat16 the odd inputs lie behind the even ones.
struct WideValues {
    const float* at;

    [[gnu::always_inline]] f32r even(int r) const { return at[r * kWideInputs] - f32r{}; }
    [[gnu::always_inline]] f32r odd(int r) const { return at[r * kWideInputs + kWideInputs / 2] - f32r{}; }
};

// Values of rows that lie `stride` apart: floats, or pairs of bfloat16 in a number of 32 bits or two of 16.
template <class Factor, int stride>
struct PairValues {
    const Factor* at;

    [[gnu::always_inline]] f32r even(int r) const {
        if constexpr (std::is_same_v<Factor, float>) return at[r * stride] - f32r{};
        else return even_of(pair(r));
    }
    [[gnu::always_inline]] f32r odd(int r) const { return odd_of(pair(r)); }

private:
    [[gnu::always_inline]] u32r pair(int r) const {
        uint32_t number;
        memcpy(&number, at + r * stride, sizeof(number));
        u32r all = number - u32r{};
#if defined(__SSE2__)
        asm("" : "+x"(all));  // else GCC takes the pair apart before, which takes three instructions
#endif
        return all;
    }
};

// Sums of some rows for 16 outputs.
template <int rows>
struct HalfSums {
    f32r of[rows][kHalfParts] = {};

    // Takes the sums of half a panel from a tile of 32 outputs.
    [[gnu::always_inline]] void load_from(const float* tile) {
        each([&](int r, int i) { of[r][i] = load_register(tile + r * 2 * kHalfPanel + i * kRegister); });
    }

    [[gnu::always_inline]] void store_to(float* results, int64_t stride) const {
        each([&](int r, int i) { store(results + r * stride + i * kRegister, of[r][i]); });
    }

    // Adds the products with a step of the inputs: of bfloat16 a pair, the even one first.
    template <class Values>
    [[gnu::always_inline]] void add_step(const bf16* w, Values& values) {
        f32r weights[kHalfParts];
        for_parts([&](int i) { weights[i] = even_of(pairs_at(w + 2 * kRegister * i)); });
        add(weights, [&](int r) { return values.even(r); });
        forget(w);
        forget(values.at);
        for_parts([&](int i) { weights[i] = odd_of(pairs_at(w + 2 * kRegister * i)); });
        add(weights, [&](int r) { return values.odd(r); });
        forget(values.at);
    }

    template <class Values>
    [[gnu::always_inline]] void add_step(const float* w, Values& values) {
        f32r weights[kHalfParts];
        for_parts([&](int i) { weights[i] = load_register(w + kRegister * i); });
        add(weights, [&](int r) { return values.even(r); });
        forget(values.at);
    }

private:
    template <class ValueOf>
    [[gnu::always_inline]] void add(const f32r (&weights)[kHalfParts], const ValueOf& value_of) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const f32r value = value_of(r);
            for_parts([&](int i) { of[r][i] = fma(weights[i], value, of[r][i]); });
        }
    }

    template <class Use>
    [[gnu::always_inline]] static void for_parts(const Use& use) {
#pragma GCC unroll 4
        for (int i = 0; i < kHalfParts; i++) use(i);
    }

    template <class Use>
    [[gnu::always_inline]] static void each(const Use& use) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) for_parts([&](int i) { use(r, i); });
    }
};

// One pass of `add_inputs`. It fetches what the same pass over the next inputs reads: every other line alone is no stream
// to the processor.
template <int rows, class T>
INLINE void add_half(const float* x, const T* w, int64_t count, float* tile) {
    constexpr int kStep = 4 / sizeof(T), kLine = 2 * kHalfPanel * kStep;
    HalfSums<rows> sums;
    sums.load_from(tile);
    for (int64_t k = 0; k < count; k += kStep, w += kLine) {
        __builtin_prefetch(w + kWideInputs / kStep * kLine, 0, 2);
        WideValues values{x + k / kStep};
        sums.add_step(w, values);
    }
    sums.store_to(tile, 2 * kHalfPanel);
}

// Adds the products of `count` inputs, whose values `widen_inputs` has written, to the tile.
template <int rows, class T>
INLINE void add_inputs(const float* x, const T* w, int64_t count, float* tile) {
    constexpr int kStep = 4 / sizeof(T), kHalf = kHalfPanel * kStep;
    if constexpr (rows <= 2) {  // both halves fit
        HalfSums<rows> low, high;
        low.load_from(tile);
        high.load_from(tile + kHalfPanel);
        for (int64_t k = 0; k < count; k += kStep, w += 2 * kHalf) {
            WideValues values{x + k / kStep};
            low.add_step(w, values);
            high.add_step(w + kHalf, values);
        }
        low.store_to(tile, 2 * kHalfPanel);
        high.store_to(tile + kHalfPanel, 2 * kHalfPanel);
    } else {
        add_half<rows>(x, w, count, tile);
        add_half<rows>(x, w + kHalf, count, tile + kHalfPanel);
    }
}

// Writes some inputs as floats; of bfloat16 the even ones first, and the odd ones kWideInputs / 2 numbers behind them.
// An input that fills up the last pair is zero.
INLINE void widen_inputs(const bf16* x, int64_t count, float* wide) {
    for (int64_t k = 0; k < count; k += 2 * kRegister) {
        u32r pairs = {};
        if (count - k >= 2 * kRegister) pairs = pairs_at(x + k);
        else memcpy(&pairs, x + k, (count - k) * sizeof(bf16));
        store(wide + k / 2, even_of(pairs));
        store(wide + kWideInputs / 2 + k / 2, odd_of(pairs));
    }
}

INLINE void widen_inputs(const float* x, int64_t count, float* wide) { memcpy(wide, x, count * sizeof(float)); }

template <int rows, class T>
INLINE void multiply_by_halves(const T* x, int64_t x_stride, const T* panel, int64_t in_size, float* tile) {
    alignas(64) float wide[rows * kWideInputs];
    memset(tile, 0, rows * 2 * kHalfPanel * sizeof(float));
    for (int64_t first = 0; first < in_size; first += kWideInputs) {
        int64_t count = in_size - first < kWideInputs ? in_size - first : kWideInputs;
        for (int r = 0; r < rows; r++) widen_inputs(x + r * x_stride + first, count, wide + r * kWideInputs);
        add_inputs<rows>(wide, panel + first * 2 * kHalfPanel, count, tile);
    }
}
