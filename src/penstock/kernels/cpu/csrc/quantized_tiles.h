// Products of bytes by the processor's matrix unit (AMX-INT8), where there is one: quantized.h with more than a few
// rows.
//
// Quads of inputs already lie as the unit takes them; 4-bit weights are unpacked so, once for all rows:
//
//                     64 inputs                     16 outputs | 16 outputs
//     x  32 rows  [ ............ ]    w  16 quads   [ ....... ] | [ ....... ]     sums  32 rows [ ... ] | [ ... ]
//
// Sums of integers are exact in any order, so that few rows need not take this way.
#pragma once
#include "tiles.h"
#include "vec.h"

#if defined(PENSTOCK_TILES) && defined(__AMX_INT8__)
#define PENSTOCK_BYTE_TILES 1

// How some quads of inputs are cut into the unit's instructions, and what is done beside each step of them.
struct ByteSteps {
    int words;  // of an instruction
    int count;
    int rows_beside;  // of other work, two times a step
    int64_t lines_beside;

    // `lines` are to be fetched beside all of them.
    ByteSteps(int quads, int64_t lines)
        : words(words_at_once(quads)),
          count(quads / words),
          rows_beside((int)divide_up(kPassRows, 2 * count)),
          lines_beside(divide_up(lines, 2 * count)) {}
};

// The integer sums of at most 32 rows for the 32 outputs of a panel, over a group of inputs.
class ByteTiles {
public:
    static constexpr int kRows = kPassRows;
    static constexpr int64_t kMostInputs = 128;  // so many are unpacked at once
    static constexpr int64_t kQuadBytes = 128;   // of a panel: a quad of inputs for 32 outputs

    // Beside the unit's instructions, lines of memory are fetched from `next` on, and `beside(begin, end)` does other
    // work for rows [begin, end) of 32.
    template <class Beside>
    [[gnu::always_inline]] static void multiply(TileShapes& shapes, const int8_t* x, int64_t x_stride, int rows,
                                                const uint8_t* w, const ByteSteps& steps, const char* next,
                                                int32_t (*sums)[2 * kTileRows], const Beside& beside) {
        shapes.set(rows, steps.words);
        settle_memory();
        if (rows > kTileRows)
            multiply_rows<true>(x, x_stride, w, steps, next, (float*)sums, beside);
        else
            multiply_rows<false>(x, x_stride, w, steps, next, (float*)sums, beside);
        settle_memory();
    }

    // Two quads lie in the halves of bytes; they become bytes, one quad after the other.
    static void unpack(const uint8_t* w, int64_t num_octets, uint8_t* bytes) {
        for (const uint8_t* end = w + num_octets * kQuadBytes; w < end; w += kQuadBytes, bytes += 2 * kQuadBytes)
            for (int64_t half = 0; half < kQuadBytes; half += 64) {
                u32x16 both;
                memcpy(&both, w + half, 64);
                u32x16 first = both & 0x0f0f0f0fu, second = both >> 4 & 0x0f0f0f0fu;
                memcpy(bytes + half, &first, 64);
                memcpy(bytes + kQuadBytes + half, &second, 64);
            }
    }

private:
    // A sum in a register has 32 bits, as a float or as an integer: so `TileSums` clears and stores either.
    template <bool beyond_16, class Beside>
    [[gnu::always_inline]] static void multiply_rows(const int8_t* x, int64_t x_stride, const uint8_t* w,
                                                     const ByteSteps& steps, const char* next, float* sums,
                                                     const Beside& beside) {
        int begin = 0;
        FetchAhead ahead{next, steps.lines_beside};
        auto some = [&]() __attribute__((always_inline)) {
            ahead.fetch();
            beside(begin, begin + steps.rows_beside);
            begin += steps.rows_beside;
        };
        TileSums<beyond_16>::clear();
        for (int step = 0; step < steps.count; step++, x += 4 * steps.words, w += kQuadBytes * steps.words) {
            _tile_loadd(4, x, x_stride);
            _tile_loadd(6, w, kQuadBytes);
            _tile_loadd(7, w + kQuadBytes / 2, kQuadBytes);
            if (beyond_16) _tile_loadd(5, x + kTileRows * x_stride, x_stride);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            some();
            if (beyond_16) _tile_dpbsud(2, 5, 6);
            if (beyond_16) _tile_dpbsud(3, 5, 7);
            some();
        }
        TileSums<beyond_16>::store(sums, 2 * kTileRows);
    }
};
#endif
