// Latent vectors as attention.cpp takes keys and values: tiles of 16 tokens, made of those in the cache.
//
// All query heads share one latent vector of a token, so that a tile serves many rows once it is made: its keys have
// the dims turned into streams of 16 tokens, its values are the front of the same vectors in pairs of tokens.
//
//     cache   16 tokens [ head_dim ................... ]
//     keys    head_dim / group   vectors of [16 tokens][group]
//     values  ceil(value_dim / 16) slices of 16 / group   vectors of [16 dims][group]
#pragma once
#include "attention.h"

// Turns 16 vectors of 16 words: from[i][j] becomes to[j][i].
INLINE void transpose(const u32x16* from, u32x16* to) {
    u32x16 a[16], b[16];
    for (int step = 0; step < 4; step++) {
        const u32x16* source = step == 0 ? from : step % 2 ? a : b;
        u32x16* target = step == 3 ? to : step % 2 ? b : a;
        for (int i = 0; i < 8; i++) {  // interleaves rows i and i + 8; after four such steps columns are rows
            u32x16 first = source[i], second = source[i + 8];
            target[2 * i] = __builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            target[2 * i + 1] =
                __builtin_shufflevector(first, second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
}

// The keys of a tile of `count` tokens, which lie `head_dim` apart; lanes beyond are zero.
template <class T>
static void make_keys(const T* tokens, int64_t count, int64_t head_dim, T* keys) {
    constexpr int64_t kGroup = KVLayout<T>::kGroup, kDims = kLanes * kGroup;
    for (int64_t d = 0; d < head_dim; d += kDims) {
        int64_t dims = head_dim - d < kDims ? head_dim - d : kDims;
        u32x16 rows[kLanes] = {}, columns[kLanes];
        for (int64_t t = 0; t < count; t++) memcpy(&rows[t], tokens + t * head_dim + d, dims * sizeof(T));
        transpose(rows, columns);
        memcpy(keys + d * kLanes, columns, dims * kLanes * sizeof(T));
    }
}

INLINE void make_slice(const float* tokens, int64_t count, int64_t stride, int64_t dims, float* slice) {
    for (int64_t t = 0; t < kLanes; t++) store(slice + t * kLanes, t < count ? load_some(tokens + t * stride, dims) : f32x16{});
}

INLINE void make_slice(const bf16* tokens, int64_t count, int64_t stride, int64_t dims, bf16* slice) {
    for (int64_t t = 0; t < kLanes; t += 2) {
        u16x16 pair[2] = {};
        for (int64_t i = 0; i < 2 && t + i < count; i++) memcpy(&pair[i], tokens + (t + i) * stride, dims * sizeof(bf16));
        u32x16 both = __builtin_convertvector(pair[0], u32x16) | __builtin_convertvector(pair[1], u32x16) << 16;
        memcpy(slice + t * kLanes, &both, 64);
    }
}

// The values of the same tile.
template <class T>
static void make_values(const T* tokens, int64_t count, const KVLayout<T>& layout, T* values) {
    for (int64_t d = 0; d < layout.value_dim; d += kLanes) {
        int64_t dims = layout.value_dim - d < kLanes ? layout.value_dim - d : kLanes;
        make_slice(tokens + d, count, layout.head_dim, dims, values + d * kLanes);
    }
}
