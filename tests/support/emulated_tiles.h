// The matrix unit (AMX) in plain C++, so that its way through the kernels is tested on processors without one.
//
// A forced first include (`g++ -include`) beside -D__AMX_TILE__ -D__AMX_BF16__ -D__AMX_INT8__ (`kernel_builds.py`). Instructions do what Intel's manual (Instruction Set Reference, TDPBF16PS,
// TDPBSUD, TILELOADD) says of them, number by number: even and odd inputs of an instruction are summed apart, both sums
// together, then these to the tile; numbers too small for the normal format count as 0. Where the unit would raise a
// fault, as for shapes that do not fit each other, this ends the process.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emulated_tiles {

constexpr int kMostRows = 16, kRowBytes = 64, kLanes = 16;

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct alignas(64) Register {
    uint8_t rows[kMostRows][kRowBytes];
};

struct Unit {
    Config shapes = {};
    Register registers[8] = {};
};

inline thread_local Unit unit;

inline void require(bool is_right, const char* what) {
    if (is_right) return;
    fprintf(stderr, "emulated matrix unit: %s\n", what);
    abort();
}

inline void load_config(const void* from) {
    memcpy(&unit.shapes, from, sizeof(Config));
    require(unit.shapes.palette == 1, "palette 1 is the one there is");
    for (int i = 0; i < 8; i++)
        require(unit.shapes.rows[i] <= kMostRows && unit.shapes.row_bytes[i] <= kRowBytes, "a shape is too large");
    memset(unit.registers, 0, sizeof(unit.registers));
}

inline void release() { unit = {}; }

inline int rows_of(int number) {
    require(unit.shapes.palette == 1 && unit.shapes.rows[number] > 0, "a register without a shape is used");
    return unit.shapes.rows[number];
}

inline void zero(int number) {
    rows_of(number);
    unit.registers[number] = {};
}

inline void load(int number, const void* from, int64_t stride) {
    zero(number);
    for (int r = 0; r < rows_of(number); r++)
        memcpy(unit.registers[number].rows[r], (const char*)from + r * stride, unit.shapes.row_bytes[number]);
}

inline void store(int number, void* to, int64_t stride) {
    for (int r = 0; r < rows_of(number); r++)
        memcpy((char*)to + r * stride, unit.registers[number].rows[r], unit.shapes.row_bytes[number]);
}

// Four bytes are summed over at once. Returns how many such steps there are.
inline int require_product(int sums, int left, int right) {
    const Config& shapes = unit.shapes;
    require(rows_of(sums) == rows_of(left), "sums and left side differ in rows");
    require(shapes.row_bytes[sums] == shapes.row_bytes[right], "sums and right side differ in columns");
    require(shapes.row_bytes[left] == 4 * rows_of(right), "left and right side differ in inputs");
    return rows_of(right);
}

inline float normal(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value; }

inline float widened(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return normal(wide);
}

inline void multiply_bf16(int sums, int left, int right) {
    int steps = require_product(sums, left, right), lanes = unit.shapes.row_bytes[sums] / 4;
    for (int r = 0; r < rows_of(sums); r++) {
        float even[kLanes] = {}, odd[kLanes] = {}, total[kLanes];
        for (int k = 0; k < steps; k++) {
            uint16_t x[2], w[2 * kLanes];
            memcpy(x, unit.registers[left].rows[r] + 4 * k, 4);
            memcpy(w, unit.registers[right].rows[k], kRowBytes);
            for (int n = 0; n < lanes; n++) {
                even[n] = normal(fmaf(widened(x[0]), widened(w[2 * n]), even[n]));
                odd[n] = normal(fmaf(widened(x[1]), widened(w[2 * n + 1]), odd[n]));
            }
        }
        memcpy(total, unit.registers[sums].rows[r], kRowBytes);
        for (int n = 0; n < lanes; n++) total[n] = normal(normal(total[n]) + normal(even[n] + odd[n]));
        memcpy(unit.registers[sums].rows[r], total, kRowBytes);
    }
}

// Signed bytes on the left, unsigned ones on the right.
inline void multiply_bytes(int sums, int left, int right) {
    int steps = require_product(sums, left, right), lanes = unit.shapes.row_bytes[sums] / 4;
    for (int r = 0; r < rows_of(sums); r++) {
        int32_t total[kLanes];
        memcpy(total, unit.registers[sums].rows[r], kRowBytes);
        for (int k = 0; k < steps; k++)
            for (int n = 0; n < lanes; n++)
                for (int i = 0; i < 4; i++)
                    total[n] += (int8_t)unit.registers[left].rows[r][4 * k + i] * unit.registers[right].rows[k][4 * n + i];
        memcpy(unit.registers[sums].rows[r], total, kRowBytes);
    }
}

// The system lets the process use the unit; other calls go to it.
template <class... Arguments>
long system_call(long number, Arguments... arguments) {
    return number == SYS_arch_prctl ? 0 : syscall(number, arguments...);
}

}  // namespace emulated_tiles

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_release emulated_tiles::release
#define _tile_loadd emulated_tiles::load
#define _tile_stream_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_zero emulated_tiles::zero
#define _tile_dpbf16ps emulated_tiles::multiply_bf16
#define _tile_dpbsud emulated_tiles::multiply_bytes
#define syscall emulated_tiles::system_call
