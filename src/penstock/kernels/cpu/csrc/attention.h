// Where keys and values lie in the KV blocks of a layer, for the code that stores them (rope.cpp), reads them
// (attention.cpp), and copies blocks out and back (kv_records.cpp).
//
// A block holds `block_size` tokens. Within it each KV head has its own piece, so that a reader of one head reads
// one run of memory; a piece is a list of tiles of 16 tokens, the keys of a tile before its values:
//     block  [num_kv_heads][ceil(block_size / 16)] tiles
//     tile   keys [head_dim / group][16 tokens][group], then values [ceil(value_dim / 16)][16 / group][16 dims][group]
// group is 2 for bfloat16, whose product step (VDPBF16PS) takes pairs of the numbers that are summed over, and 1 for
// float32. So keys and values of a tile are streams of vectors of 16 results each, like the panels of weights
// (panels.h).
//
// Lanes of tokens and dims that fill up the last tile are never written, and their contents never matter.
//
// Latent vectors (arXiv 2405.04434), each the key of all heads and its front the value, lie as they are, token after
// token: [block_size][head_dim]. Tiles are made of them when they are read (attention_latent.h).
#pragma once
#include "abi.h"
#include "vec.h"

template <class T>
struct KVLayout {
    static constexpr int64_t kGroup = sizeof(T) == 2 ? 2 : 1;

    int64_t num_kv_heads;
    int64_t head_dim;  // even
    int64_t block_size;
    int64_t value_dim = head_dim;

    int64_t tiles_per_block() const { return (block_size + kLanes - 1) / kLanes; }
    int64_t num_slices() const { return (value_dim + kLanes - 1) / kLanes; }  // 16 dims each
    int64_t key_size() const { return head_dim * kLanes; }
    int64_t slice_size() const { return kLanes * kLanes; }
    int64_t value_size() const { return num_slices() * slice_size(); }
    int64_t tile_size() const { return key_size() + value_size(); }
    int64_t piece_size() const { return tiles_per_block() * tile_size(); }
    int64_t block_elements() const { return num_kv_heads * piece_size(); }

    // Where the tile with token `offset` of a block begins, for one KV head.
    int64_t tile_at(int64_t block, int64_t offset, int64_t kv_head) const {
        return block * block_elements() + kv_head * piece_size() + offset / kLanes * tile_size();
    }

    // Where one number of a token is, within the keys and within the values of a tile; `lane` is the token in the tile.
    int64_t key_at(int64_t lane, int64_t dim) const {
        return dim / kGroup * kGroup * kLanes + lane * kGroup + dim % kGroup;
    }
    int64_t value_at(int64_t lane, int64_t dim) const {
        return dim / kLanes * slice_size() + lane / kGroup * kGroup * kLanes + dim % kLanes * kGroup + lane % kGroup;
    }
};
