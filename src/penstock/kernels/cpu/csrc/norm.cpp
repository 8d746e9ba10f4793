// Residual addition and RMSNorm in one pass (arXiv 1910.07467), the casts in the order of transformers.
#include "abi.h"
#include "vec.h"

template <class T>
static void add_norm(const T* x, T* residual, const T* weight, T* y, int64_t size, float eps) {
    f32x16 squares = {};
    for (int64_t k = 0; k < size; k += kLanes) {
        int64_t count = size - k < kLanes ? size - k : kLanes;
        f32x16 total = load_some(x + k, count) + load_some(residual + k, count);
        store_some(residual + k, total, count);
        total = load_some(residual + k, count);  // as rounded
        squares = fma(total, total, squares);
    }
    f32x16 scale = splat(1.0f / sqrtf(sum(squares) / size + eps));
    for (int64_t k = 0; k < size; k += kLanes) {
        int64_t count = size - k < kLanes ? size - k : kLanes;
        T normed[kLanes];
        store(normed, load_some(residual + k, count) * scale);
        store_some(y + k, load(normed) * load_some(weight + k, count), count);
    }
}

template <class T>
static void norm(const NormArgs& args, const Step& step) {
#pragma omp parallel for schedule(static) if (step.num_tokens >= 32)
    for (int64_t t = 0; t < step.num_tokens; t++) {
        int64_t from = (step.selected ? step.selected[t] : t) * args.size;
        add_norm((const T*)args.x + from, (T*)args.residual + from, (const T*)args.weight,
                 (T*)args.y + t * args.size, args.size, args.eps);
    }
}

PENSTOCK_EXPORT void penstock_add_rms_norm(const void* args, const Step* step) {
    const NormArgs& norm_args = *(const NormArgs*)args;
    if (norm_args.dtype == kBFloat16)
        norm<bf16>(norm_args, *step);
    else
        norm<float>(norm_args, *step);
}
