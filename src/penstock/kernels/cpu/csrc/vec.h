// Sixteen lanes at a time, in portable vector types; intrinsics only where they were measured to pay.
//
// GCC and Clang turn these types into one AVX-512, two AVX2 or four NEON registers. A function here gives the
// same lanes whatever surrounds it: no result depends on how a loop was unrolled.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

using bf16 = uint16_t;
using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

constexpr int kLanes = 16;

// As many lanes as a register holds, for the sums of inner loops: GCC keeps a vector of several registers in memory.
#if defined(__AVX512F__)
constexpr int kRegister = 16;
#elif defined(__AVX__)
constexpr int kRegister = 8;
#else
constexpr int kRegister = 4;
#endif
using f32r = float __attribute__((vector_size(4 * kRegister)));
using i32r = int32_t __attribute__((vector_size(4 * kRegister)));
using u32r = uint32_t __attribute__((vector_size(4 * kRegister)));

INLINE int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

INLINE f32x16 splat(float value) { return value - f32x16{}; }

INLINE float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE float widen(float value) { return value; }

INLINE f32x16 load(const float* from) {
    f32x16 lanes;
    memcpy(&lanes, from, 64);
    return lanes;
}

INLINE f32x16 load(const bf16* from) {
    u16x16 narrow;
    memcpy(&narrow, from, 32);
    return (f32x16)(__builtin_convertvector(narrow, u32x16) << 16);
}

INLINE void store(float* to, f32x16 lanes) { memcpy(to, &lanes, 64); }

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE u16x16 to_bf16(f32x16 lanes) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)lanes);
#else
    u32x16 bits = (u32x16)lanes;
    u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    u32x16 is_nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
    rounded = (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
    return __builtin_convertvector(rounded >> 16, u16x16);
#endif
}

INLINE void store(bf16* to, f32x16 lanes) {
    u16x16 narrow = to_bf16(lanes);
    memcpy(to, &narrow, 32);
}

INLINE void store(float* to, f32x16 low, f32x16 high) {
    store(to, low);
    store(to + kLanes, high);
}

INLINE void store(bf16* to, f32x16 low, f32x16 high) {
#if defined(__AVX512BF16__)
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    memcpy(to, &both, 64);
#else
    store(to, low);
    store(to + kLanes, high);
#endif
}

// The first `count` lanes, the others zero. All of them at once where there are 16 or more: copying a number of bytes
// that the compiler does not know costs many times a vector.
template <class T>
INLINE f32x16 load_some(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <class T>
INLINE void store_some(T* to, f32x16 lanes, int64_t count) {
    if (count >= kLanes) return store(to, lanes);
    T padded[kLanes];
    store(padded, lanes);
    memcpy(to, padded, count * sizeof(T));
}

// a * b + c, rounded once where the machine can.
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

#if !defined(__AVX512F__)
INLINE f32r fma(f32r a, f32r b, f32r c) { return a * b + c; }
#endif

// Two vectors as registers.
template <class Register, class Lanes>
INLINE void split(const Lanes& low, const Lanes& high, Register* registers) {
    memcpy(registers, &low, sizeof(low));
    memcpy((char*)registers + sizeof(low), &high, sizeof(high));
}

// The greater of each; `b` where one is NaN.
INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// The lanes from lane `by` on, and then the first ones.
template <int by, class Lanes>
INLINE Lanes rotated(Lanes lanes) {
#if defined(__clang__)
    return __builtin_shufflevector(lanes, lanes, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, by + 8,
                                   by + 9, by + 10, by + 11, by + 12, by + 13, by + 14, by + 15);
#else
    return __builtin_shuffle(lanes, i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + by);  // modulo 16
#endif
}

// Pairwise, in a fixed order: lanes 8 apart, then 4, 2 and 1.
template <class Lanes>
INLINE auto sum(Lanes lanes) {
    lanes += rotated<8>(lanes);
    lanes += rotated<4>(lanes);
    lanes += rotated<2>(lanes);
    return (lanes + rotated<1>(lanes))[0];
}

INLINE i32x16 max(i32x16 a, i32x16 b) { return a > b ? a : b; }

template <class Lanes>
INLINE auto max(Lanes lanes) {
    lanes = max(lanes, rotated<8>(lanes));
    lanes = max(lanes, rotated<4>(lanes));
    lanes = max(lanes, rotated<2>(lanes));
    return max(lanes, rotated<1>(lanes))[0];
}

// e^x to 2 units in the last place; below -87 it is e^-87, which is as good as zero beside a 1, above 88.3
// infinite. NaN stays NaN.
INLINE f32x16 exp(f32x16 x) {
    x = -max(splat(-88.8f), -max(splat(-87.0f), x));
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    f32x16 n = fma(x, splat(1.44269504f), magic) - magic;
    f32x16 r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts (Cody and Waite)
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);  // minimax polynomial of Cephes, expf
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return p * (f32x16)power;
}

INLINE f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3) (arXiv 1606.08415), which is x / (1 + e^-2u).
INLINE f32x16 gelu_tanh(f32x16 x) {
    f32x16 u = fma(x * x * x, splat(0.044715f), x) * 0.79788456f;
    return x / (exp(-(u + u)) + 1.0f);
}

INLINE f32x16 tanh(f32x16 x) {
    f32x16 bounded = max(splat(-20.0f), -max(splat(-20.0f), -x));
    return 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
}
