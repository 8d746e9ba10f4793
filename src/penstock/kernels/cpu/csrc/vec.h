// Sixteen lanes at a time, in portable vector types; intrinsics only where they were measured to pay.
//
// Sixteen numbers are one AVX-512, two AVX2 or four SSE or NEON registers. A function here gives the same lanes
// whatever surrounds it, and adds them up in the same order: no result depends on the width of a register or on how a
// loop was unrolled.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

using bf16 = uint16_t;
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

constexpr int kLanes = 16;

// How many lanes a register holds.
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
using u16r = uint16_t __attribute__((vector_size(2 * kRegister)));
using i8r = int8_t __attribute__((vector_size(kRegister)));
using u8r = uint8_t __attribute__((vector_size(kRegister)));

// Lanes of several registers. GCC's own vectors of such a width are not used, since it keeps them in memory.
template <class Half>
struct Pair {
    Half low, high;
};

#if defined(__AVX512F__)
template <class Register>
using Sixteen = Register;
#elif defined(__AVX__)
template <class Register>
using Sixteen = Pair<Register>;
#else
template <class Register>
using Sixteen = Pair<Pair<Register>>;
#endif
using f32x16 = Sixteen<f32r>;
using i32x16 = Sixteen<i32r>;

#define PENSTOCK_LANE_BY_LANE(op)                                                             \
    template <class Half>                                                                     \
    INLINE Pair<Half> operator op(const Pair<Half>& a, const Pair<Half>& b) {                 \
        return {a.low op b.low, a.high op b.high};                                            \
    }                                                                                         \
    template <class Half, class Number>                                                       \
    INLINE Pair<Half> operator op(const Pair<Half>& a, Number b) {                            \
        return {a.low op b, a.high op b};                                                     \
    }                                                                                         \
    template <class Number, class Half>                                                       \
    INLINE Pair<Half> operator op(Number a, const Pair<Half>& b) {                            \
        return {a op b.low, a op b.high};                                                     \
    }
PENSTOCK_LANE_BY_LANE(+)
PENSTOCK_LANE_BY_LANE(-)
PENSTOCK_LANE_BY_LANE(*)
PENSTOCK_LANE_BY_LANE(/)
PENSTOCK_LANE_BY_LANE(&)
#undef PENSTOCK_LANE_BY_LANE

template <class Half>
INLINE Pair<Half> operator-(const Pair<Half>& a) {
    return {-a.low, -a.high};
}

template <class Half, class Other>
INLINE Pair<Half>& operator+=(Pair<Half>& a, const Other& b) {
    return a = a + b;
}

template <class Half, class Other>
INLINE Pair<Half>& operator*=(Pair<Half>& a, const Other& b) {
    return a = a * b;
}

INLINE int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

template <class Lanes = f32x16>
INLINE Lanes splat(float value) {
    return value - Lanes{};
}

INLINE float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE float widen(float value) { return value; }

INLINE f32r load_register(const float* from) {
    f32r lanes;
    memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}

INLINE i32r load_register(const int32_t* from) {
    i32r lanes;
    memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}

INLINE f32r load_register(const bf16* from) {
    u16r narrow;
    memcpy(&narrow, from, sizeof(narrow));
    return (f32r)(__builtin_convertvector(narrow, u32r) << 16);
}

// Sixteen lanes, register by register: `at(i)` gives those from lane i on.
template <class At>
INLINE auto by_registers(const At& at) -> Sixteen<decltype(at(0))> {
#if defined(__AVX512F__)
    return at(0);
#elif defined(__AVX__)
    return {at(0), at(8)};
#else
    return {{at(0), at(4)}, {at(8), at(12)}};
#endif
}

template <class T>
INLINE f32x16 load(const T* from) {
    return by_registers([=](int i) { return load_register(from + i); });
}

INLINE void store(float* to, f32r lanes) { memcpy(to, &lanes, sizeof(lanes)); }

// The nearest numbers that bfloat16 has, ties to even; NaN stays NaN.
INLINE f32r round_to_bf16(f32r lanes) {
    u32r bits = (u32r)lanes;
    u32r rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (f32r)((lanes != lanes ? bits | 0x400000u : rounded) & 0xffff0000u);
}

template <class Half>
INLINE Pair<Half> round_to_bf16(const Pair<Half>& lanes) {
    return {round_to_bf16(lanes.low), round_to_bf16(lanes.high)};
}

INLINE void store(bf16* to, f32r lanes) {
#if defined(__AVX512BF16__)
    u16r narrow = (u16r)_mm512_cvtneps_pbh((__m512)lanes);
#else
    u16r narrow = __builtin_convertvector((u32r)round_to_bf16(lanes) >> 16, u16r);
#endif
    memcpy(to, &narrow, sizeof(narrow));
}

// Numbers that bytes can hold. (GCC 12 converts vectors between bytes and 32 bits lane by lane, by 70 instructions.)
INLINE void store(int8_t* to, i32r lanes) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)lanes));
#elif defined(__AVX2__)
    const __m128i low = _mm256_castsi256_si128((__m256i)lanes), high = _mm256_extracti128_si256((__m256i)lanes, 1);
    const __m128i halves = _mm_packs_epi32(low, high);
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(halves, halves));
#else
    i8r narrow = __builtin_convertvector(lanes, i8r);
    memcpy(to, &narrow, sizeof(narrow));
#endif
}

// Loads as many bytes as a register has lanes.
INLINE i32r load_register(const uint8_t* from) {
#if defined(__AVX512F__)
    return (i32r)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (i32r)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    u8r narrow;
    memcpy(&narrow, from, sizeof(narrow));
    return __builtin_convertvector(narrow, i32r);
#endif
}

template <class T, class Half>
INLINE void store(T* to, const Pair<Half>& lanes) {
    store(to, lanes.low);
    store(to + sizeof(Half) / sizeof(float), lanes.high);
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

INLINE i32r bits_of(f32r lanes) { return (i32r)lanes; }

template <class Half>
INLINE auto bits_of(const Pair<Half>& lanes) -> Pair<decltype(bits_of(lanes.low))> {
    return {bits_of(lanes.low), bits_of(lanes.high)};
}

INLINE float first_lane(f32r lanes) { return lanes[0]; }

template <class Half>
INLINE float first_lane(const Pair<Half>& lanes) {
    return first_lane(lanes.low);
}

// a * b + c, rounded once where the machine can. Where two products are added, the compiler would choose which one to
// round first; this function decides it.
INLINE f32r fma(f32r a, f32r b, f32r c) {
#if defined(__AVX512F__)
    return (f32r)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (f32r)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

template <class Half>
INLINE Pair<Half> fma(const Pair<Half>& a, const Pair<Half>& b, const Pair<Half>& c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}

// Two vectors as registers.
template <class Register, class Lanes>
INLINE void split(const Lanes& low, const Lanes& high, Register* registers) {
    memcpy(registers, &low, sizeof(low));
    memcpy((char*)registers + sizeof(low), &high, sizeof(high));
}

// The greater of each; `b` where one is NaN.
INLINE f32r max(f32r a, f32r b) {
#if defined(__AVX512F__)
    return (f32r)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (f32r)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

INLINE i32r max(i32r a, i32r b) { return a > b ? a : b; }

template <class Half>
INLINE Pair<Half> max(const Pair<Half>& a, const Pair<Half>& b) {
    return {max(a.low, b.low), max(a.high, b.high)};
}

// The lanes from lane `by` on, and then the first ones.
template <int by, class Lanes>
INLINE Lanes rotated(Lanes lanes) {
    if constexpr (sizeof(Lanes) == 64)
        return __builtin_shufflevector(lanes, lanes, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, by + 8,
                                       by + 9, by + 10, by + 11, by + 12, by + 13, by + 14, by + 15);
    else if constexpr (sizeof(Lanes) == 32)
        return __builtin_shufflevector(lanes, lanes, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7);
    else
        return __builtin_shufflevector(lanes, lanes, by, by + 1, by + 2, by + 3);
}

// combine() of all lanes, pairwise in a fixed order: of lanes 8 apart, then 4, 2 and 1.
template <class Lanes, class Combine>
INLINE auto across(Lanes lanes, const Combine& combine) {
    constexpr int kCount = sizeof(Lanes) / sizeof(lanes[0]);
    if constexpr (kCount > 8) lanes = combine(lanes, rotated<8>(lanes));
    if constexpr (kCount > 4) lanes = combine(lanes, rotated<4>(lanes));
    lanes = combine(lanes, rotated<2>(lanes));
    return combine(lanes, rotated<1>(lanes))[0];
}

template <class Half, class Combine>
INLINE auto across(const Pair<Half>& lanes, const Combine& combine) {
    return across(combine(lanes.low, lanes.high), combine);
}

template <class Lanes>
INLINE auto sum(const Lanes& lanes) {
    return across(lanes, [](const auto& a, const auto& b) { return a + b; });
}

template <class Lanes>
INLINE auto max(const Lanes& lanes) {
    return across(lanes, [](const auto& a, const auto& b) { return max(a, b); });
}

// e^x to 2 units in the last place; below -87 it is e^-87, which is as good as zero beside a 1, above 88.3
// infinite. NaN stays NaN.
INLINE f32r exp(f32r x) {
    constexpr auto all = splat<f32r>;
    x = -max(all(-88.8f), -max(all(-87.0f), x));
    const f32r magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    f32r n = fma(x, all(1.44269504f), magic) - magic;
    f32r r = fma(n, all(-0.693359375f), x);  // ln 2 in two parts (Cody and Waite)
    r = fma(n, all(2.12194440e-4f), r);
    f32r p = all(1.9875691500e-4f);  // minimax polynomial of Cephes, expf
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    i32r power = (__builtin_convertvector(n, i32r) + 127) << 23;
    return p * (f32r)power;
}

template <class Half>
INLINE Pair<Half> exp(const Pair<Half>& x) {
    return {exp(x.low), exp(x.high)};
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
