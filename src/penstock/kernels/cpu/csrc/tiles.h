// The processor's matrix unit (AMX), where there is one, and products of bfloat16 rows with a panel by it; many_rows.h
// says in which order hundreds of rows take it. Products of bytes are in quantized_tiles.h, those of attention in
// attention_tiles.h.
//
// Panels already lie as the unit takes them: sixteen pairs of inputs of a panel are sixteen rows of 128 bytes, the
// first half of each for outputs 0 to 15, the second for 16 to 31. An instruction adds the products of 32 inputs to a
// tile of at most 16 rows by 16 outputs. It sums the products of even inputs and those of odd inputs, each one after
// the other, adds both sums, and adds the result to the tile. Each number is summed in this order whatever the number
// of rows, since even a single row takes this way.
//
// The unit has eight registers, whose shapes a thread sets (`TileShapes`); the system must allow their use.
#pragma once
#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define PENSTOCK_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

constexpr int kTileRows = 16;        // of a register
constexpr int64_t kTileInputs = 32;  // of an instruction
constexpr int kTileWords = 16;       // the same in words of 4 bytes
constexpr int kPassRows = 32;        // of two registers: so many rows pass by a panel at once
constexpr int64_t kPairBytes = 128;  // of a panel: a pair of inputs for 32 outputs
constexpr int64_t kStepBytes = kTileInputs / 2 * kPairBytes;

// Whether the system lets this process use the unit; asked once, when the library is loaded (linear.cpp).
extern const bool kHasTiles;

// The most words that an instruction can take and that divide `words`, so that all instructions have one shape.
INLINE int words_at_once(int64_t words) {
    int most = kTileWords;
    while (words % most) most--;
    return most;
}

// The intrinsics do not tell the compiler which memory they read. This makes it write everything to memory before them.
INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

INLINE bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Registers 0 to 3 hold sums ([rows | rows beyond 16] x [outputs | outputs from 16]), 4 and 5 rows, 6 and 7 weights.
// Each thread has one. It gives the registers back at the end, so that the system need not save them for the thread.
class TileShapes {
public:
    ~TileShapes() {
        if (rows_) _tile_release();
    }

    // Sets shapes for at most 32 rows, and instructions that add products of up to 16 words of each: a word is two
    // numbers of bfloat16 or four bytes.
    void set(int rows, int words = kTileWords) {
        if (rows == rows_ && words == words_) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        int first = rows < kTileRows ? rows : kTileRows, second = rows - first;
        const int each[8] = {first, first, second, second, first, second, words, words};
        for (int i = 0; i < 8; i++) {
            if (each[i] == 0) continue;
            shapes.rows[i] = (uint8_t)each[i];
            shapes.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? words * 4 : 64);
        }
        settle_memory();
        _tile_loadconfig(&shapes);
        rows_ = rows, words_ = words;
    }

private:
    int rows_ = 0;
    int words_ = 0;
};

// Memory to fetch: with each step so many lines of 64 bytes, from `at` on.
struct FetchAhead {
    const char* at;
    int64_t lines;

    void fetch() {
        for (int64_t line = 0; line < lines; line++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// Where rows lie: 32 of them, `stride` numbers apart, and `step` numbers from 32 inputs to the next 32.
struct TileRows {
    const bf16* at;
    int64_t stride;
    int64_t step;
};

// The sums of at most 32 rows for 32 outputs; storing them between two blocks of inputs loses nothing.
template <bool beyond_16>
struct TileSums {
    // `stride`: floats from a row of sums to the next.
    static void load(const float* sums, int64_t stride) {
        _tile_loadd(0, sums, stride * 4);
        _tile_loadd(1, sums + kTileRows, stride * 4);
        if (!beyond_16) return;
        _tile_loadd(2, sums + kTileRows * stride, stride * 4);
        _tile_loadd(3, sums + kTileRows * stride + kTileRows, stride * 4);
    }

    static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        if (!beyond_16) return;
        _tile_zero(2);
        _tile_zero(3);
    }

    static void store(float* sums, int64_t stride) {
        store_low(sums, stride);
        _tile_stored(1, sums + kTileRows, stride * 4);
        if (beyond_16) _tile_stored(3, sums + kTileRows * stride + kTileRows, stride * 4);
    }

    // Stores the sums of outputs 0 to 15 alone.
    static void store_low(float* sums, int64_t stride) {
        _tile_stored(0, sums, stride * 4);
        if (beyond_16) _tile_stored(2, sums + kTileRows * stride, stride * 4);
    }

    // Adds the products of some rows and the weights of outputs 0 to 15 and 16 to 31, whose pairs of inputs are
    // `pair_bytes` apart.
    static void add(const bf16* x, int64_t x_stride, const char* low, const char* high, int64_t pair_bytes) {
        _tile_loadd(4, x, x_stride * 2);
        _tile_loadd(6, low, pair_bytes);
        _tile_loadd(7, high, pair_bytes);
        if (beyond_16) _tile_loadd(5, x + kTileRows * x_stride, x_stride * 2);
        multiply();
    }

    // Adds the products of `inputs` inputs of `rows` rows and a panel, from `x` and `w` on, to the sums; with `begins`
    // the sums begin here. A register is loaded for the next step as soon as the products of this step have read it.
    static void add_block(TileRows x, int rows, const char* w, int64_t inputs, bool begins, FetchAhead ahead,
                          float* sums) {
        constexpr int64_t kStride = kPairBytes / 4, kHigh = kPairBytes / 2;
        const int64_t rest = inputs % kTileInputs, x_bytes = x.stride * 2, second = kTileRows * x.stride;
        int64_t steps = inputs / kTileInputs;
        settle_memory();
        begins ? clear() : load(sums, kStride);
        if (steps) {
            _tile_loadd(4, x.at, x_bytes);
            _tile_loadd(6, w, kPairBytes);
            _tile_loadd(7, w + kHigh, kPairBytes);
            if (beyond_16) _tile_loadd(5, x.at + second, x_bytes);
        }
        for (; steps > 1; steps--) {
            ahead.fetch();
            w += kStepBytes, x.at += x.step;
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(4, x.at, x_bytes);
            if (beyond_16) _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(6, w, kPairBytes);
            if (beyond_16) _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(7, w + kHigh, kPairBytes);
            if (beyond_16) _tile_loadd(5, x.at + second, x_bytes);
        }
        if (steps) {
            ahead.fetch();
            w += kStepBytes, x.at += x.step;
            multiply();
        }
        if (rest) {  // filled up with zeros
            alignas(64) bf16 last_x[2 * kTileRows * kTileInputs] = {};
            alignas(64) char last_w[kStepBytes] = {};
            for (int r = 0; r < rows; r++) memcpy(last_x + r * kTileInputs, x.at + r * x.stride, rest * 2);
            memcpy(last_w, w, (rest + 1) / 2 * kPairBytes);
            settle_memory();
            add(last_x, kTileInputs, last_w, last_w + kHigh, kPairBytes);
        }
        store(sums, kStride);
    }

private:
    static void multiply() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!beyond_16) return;
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};

INLINE void add_tile_block(TileShapes& shapes, TileRows x, int rows, const char* w, int64_t inputs, bool begins,
                           FetchAhead ahead, float* sums) {
    shapes.set(rows);
    if (rows > kTileRows)
        TileSums<true>::add_block(x, rows, w, inputs, begins, ahead, sums);
    else
        TileSums<false>::add_block(x, rows, w, inputs, begins, ahead, sums);
}
#endif
