// Sums of products of bytes: unsigned weights, and activations that were rounded to int8 (rounded_rows.h).
//
// Four inputs and a register of outputs are multiplied at once. Sums are exact in integers, so that every way gives the
// same: VPDPBUSD where there is one, with AVX2 sums in 16 bits as long as they fit, else products of 16-bit halves.
#pragma once
#include "panels.h"
#include "rounded_rows.h"

constexpr int kQuad = 4;

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define PENSTOCK_ADDS_QUADS
#endif

#if defined(PENSTOCK_ADDS_QUADS)
using Quads = i32r;

INLINE Quads spread(int32_t quad) { return quad - i32r{}; }

// total += the 4 products of unsigned weights and signed activations, lane by lane, in 32 bits
INLINE i32r add_quads(i32r total, i32r weights, const Quads& x) {
#if defined(__AVX512F__)
    return (i32r)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)x);
#else
    return (i32r)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, (__m256i)x);
#endif
}
#else
using i16r = int16_t __attribute__((vector_size(4 * kRegister)));

// Even and odd bytes as 16-bit numbers. (VPMADDUBSW would need no widening, but saturates.)
struct Quads {
    i32r even, odd;
};

INLINE Quads spread(int32_t quad) {
    i16r halves = (i16r)(quad - i32r{});
    return {(i32r)(halves << 8 >> 8), (i32r)(halves >> 8)};
}

// a.even * b.even + a.odd * b.odd over the 16-bit halves of each lane
INLINE i32r multiply_halves(i32r a, i32r b) {
#if defined(__AVX512BW__)
    return (i32r)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (i32r)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
    return (i32r)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

INLINE i32r add_quads(i32r total, i32r weights, const Quads& x) {
    total += multiply_halves(weights & 0x00ff00ff, x.even);
    return total + multiply_halves(weights >> 8 & 0x00ff00ff, x.odd);
}
#endif

INLINE int32_t quad_at(const int8_t* x) {
    int32_t quad;
    memcpy(&quad, x, kQuad);
    return quad;
}

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(PENSTOCK_ADDS_QUADS)
#define PENSTOCK_ADDS_IN_16_BITS
#endif

// Rows that go over a panel at once, and registers of its 32 outputs that are summed at once: as many sums and results
// as there are registers for. `planes` are those that a weight is put together from.
constexpr int kParts = kPanel / kRegister;
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 5;
constexpr int registers_at_once(int, int) { return kParts; }
#elif defined(__AVX2__)
constexpr int kRowsAtOnce = 4;
constexpr int registers_at_once(int rows, int planes) { return rows <= 3 && planes == 1 ? kParts : 1; }
#else
constexpr int kRowsAtOnce = 1;
constexpr int registers_at_once(int, int) { return 1; }
#endif

// Sums of products of bytes for some rows and `parts` registers of outputs. `largest` is the largest q.
template <int rows, int largest, int parts>
struct QuadSums {
#if defined(PENSTOCK_ADDS_IN_16_BITS)
    // How many quads' products with activations (at most 127 in magnitude) fit 16 bits when added up. A 16-bit lane
    // takes two of a quad's four products.
    static constexpr int kFitting = 32767 / (2 * 127 * largest);

    // Whether not even one quad fits: then the magnitude of q - 128 is multiplied with activations that take its sign,
    // and 128 is no part of the zero that is subtracted.
    static constexpr bool kTakesSigned = kFitting == 0;
#else
    static constexpr bool kTakesSigned = false;
#endif

    i32r of[rows][parts];

    // Starts the sums of row `r`.
    [[gnu::always_inline]] void begin(int r, i32r start) {
        for (int i = 0; i < parts; i++) of[r][i] = start;
    }

    // `weights(quad, i)` is register i of a quad.
    template <int quads, class Weights>
    [[gnu::always_inline]] void add(const Weights& weights, const int8_t* const* x) {
#if defined(PENSTOCK_ADDS_IN_16_BITS)
        if constexpr (kTakesSigned)
            add_signed<quads>(weights, x);
        else
            add_narrow<quads>(weights, x);
#else
#pragma GCC unroll 8
        for (int quad = 0; quad < quads; quad++)
#pragma GCC unroll 8
            for (int i = 0; i < parts; i++) {
                const i32r own = weights(quad, i);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    of[r][i] = add_quads(of[r][i], own, spread(quad_at(x[r] + quad * kQuad)));
            }
#endif
    }

#if defined(PENSTOCK_ADDS_IN_16_BITS)
private:
    // Else GCC adds pairwise, and runs out of registers.
    template <class Sum>
    [[gnu::always_inline]] static void keep_order(Sum& sum) {
        asm("" : "+x"(sum));
    }

    [[gnu::always_inline]] static __m256i row_quad(const int8_t* x, int quad) {
        return _mm256_set1_epi32(quad_at(x + quad * kQuad));
    }

    template <int quads, class Weights>
    [[gnu::always_inline]] void add_narrow(const Weights& weights, const int8_t* const* x) {
        constexpr int kAtOnce = kFitting < quads ? kFitting : quads;
        const __m256i ones = _mm256_set1_epi16(1);
        for (int first = 0; first < quads; first += kAtOnce) {
            __m256i halves[rows][parts];
#pragma GCC unroll 8
            for (int quad = first; quad < first + kAtOnce; quad++)
#pragma GCC unroll 4
                for (int i = 0; i < parts; i++) {
                    const __m256i own = (__m256i)weights(quad, i);
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) {
                        const __m256i products = _mm256_maddubs_epi16(own, row_quad(x[r], quad));
                        halves[r][i] = quad == first ? products : _mm256_add_epi16(halves[r][i], products);
                        keep_order(halves[r][i]);
                    }
                }
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < parts; i++) of[r][i] += (i32r)_mm256_madd_epi16(halves[r][i], ones);
        }
    }

    template <int quads, class Weights>
    [[gnu::always_inline]] void add_signed(const Weights& weights, const int8_t* const* x) {
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
        for (int quad = 0; quad < quads; quad++)
#pragma GCC unroll 4
            for (int i = 0; i < parts; i++) {
                const __m256i own = (__m256i)(weights(quad, i) ^ (int32_t)0x80808080), magnitude = _mm256_abs_epi8(own);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    const __m256i with = _mm256_sign_epi8(row_quad(x[r], quad), own);
                    of[r][i] += (i32r)_mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, with), ones);
                    keep_order(of[r][i]);
                }
            }
    }
#endif
};
