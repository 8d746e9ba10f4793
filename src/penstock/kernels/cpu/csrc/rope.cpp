// Rotary position embedding (arXiv 2104.09864, halves rotated as in transformers), on the way into the KV blocks.
#include "attention.h"

constexpr int64_t kManyTokens = 32;   // from here on the tokens are cut among the threads
constexpr int64_t kMaxHeadDim = 4096;  // the most that `families` allows

template <class T>
static void angles_of(float position, const RopeAnglesArgs& args, float* angles) {
    int64_t half = args.rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float turn = position * args.frequencies[i];
        angles[i] = cosf(turn) * args.factor;
        angles[half + i] = sinf(turn) * args.factor;
    }
    for (int64_t i = 0; i < 2 * half; i += kLanes) {
        int64_t count = 2 * half - i;
        T rounded[kLanes];
        store(rounded, load_some(angles + i, count));
        store_some(angles + i, load(rounded), count);
    }
    if (args.growth) angles[2 * half] = 1 + args.growth * logf(1 + floorf(position / (float)args.growth_start));
}

template <class T>
static void all_angles(const RopeAnglesArgs& args, const Step& step) {
    int64_t width = args.rotary_dim + (args.growth != 0);
#pragma omp parallel for schedule(static) if (step.num_tokens >= kManyTokens)
    for (int64_t t = 0; t < step.num_tokens; t++)
        angles_of<T>((float)step.positions[t], args, args.angles + t * width);
}

PENSTOCK_EXPORT void penstock_rope_angles(const void* args, const Step* step) {
    const RopeAnglesArgs& angles_args = *(const RopeAnglesArgs*)args;
    if (angles_args.dtype == kBFloat16)
        all_angles<bf16>(angles_args, *step);
    else
        all_angles<float>(angles_args, *step);
}

// Turns each pair (i, i + half) of a head by its angle; calls use(i, count, first, second) for 16 pairs at a time.
template <class T, class Use>
INLINE void rotate(const T* head, const float* angles, int64_t half, const Use& use) {
    for (int64_t i = 0; i < half; i += kLanes) {
        int64_t count = half - i < kLanes ? half - i : kLanes;
        f32x16 first = load_some(head + i, count), second = load_some(head + half + i, count);
        f32x16 cosine = load_some(angles + i, count), sine = load_some(angles + half + i, count);
        use(i, count, fma(first, cosine, -(second * sine)), fma(second, cosine, first * sine));
    }
}

template <class T>
struct RopeStore {
    const RopeStoreArgs& args;
    KVLayout<T> layout;
    int64_t half;  // of the dims that are rotated

    explicit RopeStore(const RopeStoreArgs& args)
        : args(args),
          layout{args.num_kv_heads, args.head_dim, args.block_size},
          half((args.rotary_dim ? args.rotary_dim : args.head_dim) / 2) {}

    void token(int64_t index, int64_t slot) const {
        int64_t size = args.head_dim, block = slot / args.block_size, offset = slot % args.block_size;
        T* head = (T*)args.qkv + index * (args.num_heads + 2 * args.num_kv_heads) * size;
        const float* angles = args.angles + index * (2 * half + (args.grows != 0));
        for (int64_t h = 0; h < args.num_heads; h++, head += size) rotate_query(head, angles);
        for (int64_t h = 0; h < args.num_kv_heads; h++, head += size) {
            T* tile = (T*)args.kv + layout.tile_at(block, offset, h);
            put_key(head, angles, tile, offset % kLanes);
            put_value(head + args.num_kv_heads * size, tile + layout.key_size(), offset % kLanes);
        }
    }

    void rotate_query(T* head, const float* angles) const {
        T apart[kMaxHeadDim];
        float growth = args.grows ? angles[2 * half] : 1.0f;
        rotate(halves_of(head, apart), angles, half, [&](int64_t i, int64_t count, f32x16 first, f32x16 second) {
            store_some(head + i, first * growth, count);
            store_some(head + half + i, second * growth, count);
        });
    }

    // The dims of a head that are rotated, the first of all pairs and then the second of all pairs.
    const T* halves_of(const T* head, T* apart) const {
        if (!args.interleaved) return head;
        for (int64_t i = 0; i < half; i++) {
            apart[i] = head[2 * i];
            apart[half + i] = head[2 * i + 1];
        }
        return apart;
    }

    void put_key(const T* key, const float* angles, T* keys, int64_t lane) const {
        T apart[kMaxHeadDim];
        rotate(halves_of(key, apart), angles, half, [&](int64_t i, int64_t count, f32x16 first, f32x16 second) {
            T low[kLanes], high[kLanes];
            store(low, first);
            store(high, second);
            for (int64_t k = 0; k < count; k++) {
                keys[layout.key_at(lane, i + k)] = low[k];
                keys[layout.key_at(lane, half + i + k)] = high[k];
            }
        });
        for (int64_t d = 2 * half; d < args.head_dim; d++) keys[layout.key_at(lane, d)] = key[d];
    }

    void put_value(const T* value, T* values, int64_t lane) const {
        for (int64_t d = 0; d < args.head_dim; d++) values[layout.value_at(lane, d)] = value[d];
    }
};

template <class T>
static void rope_store(const RopeStoreArgs& args, const Step& step) {
    RopeStore<T> store_of(args);
#pragma omp parallel for schedule(static) if (step.num_tokens >= kManyTokens)
    for (int64_t t = 0; t < step.num_tokens; t++) store_of.token(t, step.slot_mapping[t]);
}

PENSTOCK_EXPORT void penstock_rope_store(const void* args, const Step* step) {
    const RopeStoreArgs& store_args = *(const RopeStoreArgs*)args;
    if (store_args.dtype == kBFloat16)
        rope_store<bf16>(store_args, *step);
    else
        rope_store<float>(store_args, *step);
}
