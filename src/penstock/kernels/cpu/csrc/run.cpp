// Runs a recorded list of calls, and says what the library was built for.
#include <omp.h>
#include <sched.h>

#include "abi.h"
#include "tiles.h"
#include "vec.h"

PENSTOCK_EXPORT void penstock_run(const Call* calls, int64_t num_calls, const Step* step) {
    for (int64_t i = 0; i < num_calls; i++) calls[i].kernel(calls[i].args, step);
}

PENSTOCK_EXPORT void penstock_zero(const void* args, const Step* step) {
    const ZeroArgs& zero_args = *(const ZeroArgs*)args;
    memset(zero_args.y, 0, step->num_tokens * zero_args.row_bytes);
}

// Instruction sets that the kernels use, most wanted first.
PENSTOCK_EXPORT const char* penstock_isa() {
#if defined(PENSTOCK_TILES)
    if (kHasTiles) return "amx-bf16 avx512-bf16 avx512-vnni";
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    return "avx512-bf16 avx512-vnni";
#elif defined(__AVX512BF16__)
    return "avx512-bf16";
#elif defined(__AVX512VNNI__)
    return "avx512 avx512-vnni";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "portable";
#endif
}

PENSTOCK_EXPORT int64_t penstock_num_threads() { return omp_get_max_threads(); }

// Reads all of `memory` once with all threads, to measure bandwidth. It returns the sum of the numbers, so that the
// compiler does not leave the reading out.
PENSTOCK_EXPORT double penstock_read(const float* memory, int64_t num_bytes) {
    constexpr int64_t kStride = 4 * kLanes;
    double total = 0;
#pragma omp parallel reduction(+ : total)
    {
        int64_t blocks = num_bytes / 4 / kStride;
        int64_t first = blocks * omp_get_thread_num() / omp_get_num_threads();
        int64_t end = blocks * (omp_get_thread_num() + 1) / omp_get_num_threads();
        f32x16 part[4] = {};
        for (int64_t b = first; b < end; b++)
            for (int i = 0; i < 4; i++) part[i] += load(memory + b * kStride + i * kLanes);
        total += sum(part[0] + part[1] + part[2] + part[3]);
    }
    return total;
}

// Binds the calling thread and the others of its team to a core each: thread i to cpus[i].
PENSTOCK_EXPORT void penstock_pin_threads(const int64_t* cpus, int64_t count) {
#pragma omp parallel num_threads(count)
    {
        cpu_set_t core;
        CPU_ZERO(&core);
        CPU_SET(cpus[omp_get_thread_num()], &core);
        sched_setaffinity(0, sizeof core, &core);
    }
}
