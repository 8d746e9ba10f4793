// RMSNorm (arXiv 1910.07467), with the residual addition in the same pass or in place; numbers are rounded where
// transformers rounds them. Also additions and factors, which are applied number by number.
#include "abi.h"
#include "vec.h"

constexpr int64_t kManyTokens = 32;  // from here on the tokens are cut among the threads

template <class T, int32_t kind>
INLINE void put_normed(T* y, f32x16 normed, const T* weight, int64_t count) {
    if constexpr (kind == kPlainNorm) {
        T rounded[kLanes];
        store(rounded, normed);
        store_some(y, load(rounded) * load_some(weight, count), count);
    } else if constexpr (kind == kWideNorm) {
        store_some(y, normed * load_some(weight, count), count);
    } else {
        store_some(y, normed * (load_some(weight, count) + 1.0f), count);
    }
}

// Calls use(T{}, kind) for the dtype and the kind, both known to the compiler.
template <int32_t number>
struct Kind {
    static constexpr int32_t value = number;
};
template <class T, class Use>
static void with_kind(int32_t kind, const Use& use) {
    if (kind == kOnePlusNorm)
        use(T{}, Kind<kOnePlusNorm>{});
    else if (kind == kWideNorm)
        use(T{}, Kind<kWideNorm>{});
    else
        use(T{}, Kind<kPlainNorm>{});
}
template <class Use>
static void with_dtype_and_kind(int32_t dtype, int32_t kind, const Use& use) {
    dtype == kBFloat16 ? with_kind<bf16>(kind, use) : with_kind<float>(kind, use);
}

template <class T, int32_t kind>
static void add_norm(const T* x, T* residual, const T* weight, T* y, int64_t size, float eps) {
    f32x16 squares = {};
    for (int64_t k = 0; k < size; k += kLanes) {
        int64_t count = size - k;
        f32x16 total = load_some(x + k, count) + load_some(residual + k, count);
        store_some(residual + k, total, count);
        total = load_some(residual + k, count);  // as rounded
        squares = fma(total, total, squares);
    }
    f32x16 scale = splat(1.0f / sqrtf(sum(squares) / size + eps));
    for (int64_t k = 0; k < size; k += kLanes) {
        int64_t count = size - k;
        put_normed<T, kind>(y + k, load_some(residual + k, count) * scale, weight + k, count);
    }
}

PENSTOCK_EXPORT void penstock_add_rms_norm(const void* args, const Step* step) {
    const NormArgs& norm = *(const NormArgs*)args;
    with_dtype_and_kind(norm.dtype, norm.kind, [&](auto type, auto kind) {
        using T = decltype(type);
#pragma omp parallel for schedule(static) if (step->num_tokens >= kManyTokens)
        for (int64_t t = 0; t < step->num_tokens; t++) {
            int64_t from = (step->selected ? step->selected[t] : t) * norm.size;
            add_norm<T, decltype(kind)::value>((const T*)norm.x + from, (T*)norm.residual + from,
                                               (const T*)norm.weight, (T*)norm.y + t * norm.size, norm.size, norm.eps);
        }
    });
}

template <class T>
static float sum_of_squares(const T* x, int64_t size) {
    f32x16 squares = {};
    for (int64_t k = 0; k < size; k += kLanes) {
        f32x16 some = load_some(x + k, size - k);
        squares = fma(some, some, squares);
    }
    return sum(squares);
}

template <class T, int32_t kind>
static void norm_token(const GroupNormArgs& args, T* x, const float* squares) {
    for (int64_t g = 0; g < args.num_groups; g++, x += args.size) {
        float mean = squares ? *squares / args.squared_size : sum_of_squares(x, args.size) / args.size;
        f32x16 scale = splat(1.0f / sqrtf(mean + args.eps));
        for (int64_t k = 0; k < args.size; k += kLanes) {
            int64_t count = args.size - k;
            put_normed<T, kind>(x + k, load_some(x + k, count) * scale, (const T*)args.weight + k, count);
        }
    }
}

PENSTOCK_EXPORT void penstock_group_norm(const void* args, const Step* step) {
    const GroupNormArgs& norm = *(const GroupNormArgs*)args;
    with_dtype_and_kind(norm.dtype, norm.kind, [&](auto type, auto kind) {
        using T = decltype(type);
#pragma omp parallel for schedule(static) if (step->num_tokens >= kManyTokens)
        for (int64_t t = 0; t < step->num_tokens; t++)
            norm_token<T, decltype(kind)::value>(norm, (T*)norm.x + t * norm.x_stride,
                                                 norm.squares ? norm.squares + t * norm.squares_stride : nullptr);
    });
}

template <class T>
static void all_squares(const SquaresArgs& args, int64_t num_tokens) {
#pragma omp parallel for schedule(static) if (num_tokens >= kManyTokens)
    for (int64_t t = 0; t < num_tokens; t++)
        args.squares[t * args.squares_stride] = sum_of_squares((const T*)args.x + t * args.x_stride, args.size);
}

PENSTOCK_EXPORT void penstock_squares(const void* args, const Step* step) {
    const SquaresArgs& squares = *(const SquaresArgs*)args;
    squares.dtype == kBFloat16 ? all_squares<bf16>(squares, step->num_tokens)
                               : all_squares<float>(squares, step->num_tokens);
}

// x[k] = change(x[k], k) for all numbers of the step.
template <class T, class Change>
static void change_all(T* x, int64_t num_tokens, int64_t size, const Change& change) {
#pragma omp parallel for schedule(static) if (num_tokens >= kManyTokens)
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t k = t * size; k < (t + 1) * size; k += kLanes) {
            int64_t count = (t + 1) * size - k;
            store_some(x + k, change(load_some(x + k, count), k, count), count);
        }
}

template <class T>
static void add(const AddArgs& args, int64_t num_tokens) {
    const T* x = (const T*)args.x;
    change_all((T*)args.residual, num_tokens, args.size,
               [=](f32x16 sum, int64_t k, int64_t count) { return sum + load_some(x + k, count); });
}

PENSTOCK_EXPORT void penstock_add(const void* args, const Step* step) {
    const AddArgs& add_args = *(const AddArgs*)args;
    add_args.dtype == kBFloat16 ? add<bf16>(add_args, step->num_tokens) : add<float>(add_args, step->num_tokens);
}

template <class T>
static void scale(const ScaleArgs& args, int64_t num_tokens) {
    float factor = args.factor;
    change_all((T*)args.x, num_tokens, args.size, [=](f32x16 x, int64_t, int64_t) { return x * factor; });
}

PENSTOCK_EXPORT void penstock_scale(const void* args, const Step* step) {
    const ScaleArgs& scale_args = *(const ScaleArgs*)args;
    scale_args.dtype == kBFloat16 ? scale<bf16>(scale_args, step->num_tokens)
                                  : scale<float>(scale_args, step->num_tokens);
}
