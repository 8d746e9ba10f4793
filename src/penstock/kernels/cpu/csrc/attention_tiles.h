// The inner loops of attention.cpp by the processor's matrix unit (AMX), where there is one; tiles.h says how it sums.
//
// Up to 32 queries are the rows of two products. Keys already lie as the unit takes them, 16 tokens for each pair of
// dims. Of values the unit takes pairs of tokens, 32 tokens at once, but tiles have 16: the values of two tiles are
// copied together, once for all queries of an item, with zeros in place of a tile that no query sees.
//
//                    32 dims (or less)                        16 tokens | 16 tokens          32 tokens
//     queries  rows [ ............... ]      keys    16 pairs [ ..... ] | [ ..... ]    weights rows [ ... ]
//                                                                                        16 dims | 16 dims
//                                                                      values  16 pairs [ .... ] | [ .... ]
//
// Even a single query takes this way, so that each number is always summed in the same order.
//
// The matrix unit and the processor's vectors work at the same time. While the unit computes scores of one micro tile
// of queries and weighted values of another, the vectors make weights of the scores of a third (attention.cpp:
// `Passing`).
#pragma once
#include "attention_products.h"
#include "tiles.h"

// The matrix unit of a thread of attention. This one stands for none, with float32 and on processors without the unit;
// its products are never called.
template <class T>
struct MatrixUnit {
    static constexpr int kMostRows = kMaxRows;
    static constexpr int kPassing = 1;  // micro tiles on their way at once
    static constexpr bool is_used() { return false; }
    static constexpr int rows_at_once() { return kMaxRows; }
    static int64_t packed_size(const KVLayout<T>&) { return 0; }
    void pack_values(const Streams<T>&, int, int, const KVLayout<T>&, T*) {}
    template <class Beside>
    void score(const T*, int, int64_t, const Streams<T>&, int, int, int, Fetch&, float*, Beside&) {}
    template <class Beside>
    void weigh(const T*, int, const T*, int, int, int64_t, int, Fetch&, float*, Beside&) {}
    static int score_calls(int64_t, int, int) { return 1; }
    static int weigh_calls(int64_t, int, int) { return 1; }
};

#if defined(PENSTOCK_TILES)
template <>
struct MatrixUnit<bf16> {
    static constexpr int kMostRows = kPassRows;
    static constexpr int kPassing = 4;
    static bool is_used() { return kHasTiles; }
    static int rows_at_once() { return kHasTiles ? kMostRows : kMaxRows; }

    // How many numbers the packed values of a chunk are.
    static int64_t packed_size(const KVLayout<bf16>& layout) { return kTilesPerChunk * layout.value_size(); }

    // The values of tiles [begin, end) become [pair of tiles][slice of 16 dims][16 pairs of tokens][16 dims][2].
    static void pack_values(const Streams<bf16>& tiles, int begin, int end, const KVLayout<bf16>& layout, bf16* packed) {
        int64_t slice = layout.slice_size(), num_slices = layout.num_slices();
        for (int i = begin / 2 * 2; i < (end + 1) / 2 * 2; i++)
            for (int64_t s = 0; s < num_slices; s++) {
                bf16* to = packed + (i / 2 * num_slices + s) * 2 * slice + i % 2 * slice;
                if (i >= begin && i < end)
                    memcpy(to, tiles.values[i] + s * slice, slice * sizeof(bf16));
                else
                    memset(to, 0, slice * sizeof(bf16));
            }
    }

    // scores[r, tile] = <query r, keys of the tile>, tiles in pairs from an even one to an even one. With each
    // instruction `lines` of memory are fetched, and `beside` is called, `score_calls` times in all.
    template <class Beside>
    void score(const bf16* queries, int rows, int64_t head_dim, const Streams<bf16>& tiles, int begin, int end,
               int lines, Fetch& fetch, float* scores, Beside& beside) {
        if (rows > kTileRows)
            score_rows<true>(queries, rows, head_dim, tiles, begin, end, lines, fetch, scores, beside);
        else
            score_rows<false>(queries, rows, head_dim, tiles, begin, end, lines, fetch, scores, beside);
    }

    static int score_calls(int64_t head_dim, int begin, int end) {
        return (end - begin) / 2 * (int)(head_dim / (2 * words_at_once(head_dim / 2)));
    }

    // values[r] = sum of weight * value over the tokens of tiles [begin, end), pairs of packed ones; `beside` is called
    // `weigh_calls` times.
    template <class Beside>
    void weigh(const bf16* weights, int rows, const bf16* packed, int begin, int end, int64_t num_slices, int lines,
               Fetch& fetch, float* values, Beside& beside) {
        if (rows > kTileRows)
            weigh_rows<true>(weights, rows, packed, begin, end, num_slices, lines, fetch, values, beside);
        else
            weigh_rows<false>(weights, rows, packed, begin, end, num_slices, lines, fetch, values, beside);
    }

    static int weigh_calls(int64_t num_slices, int begin, int end) {
        return (end - begin) / 2 * (int)divide_up(num_slices, 2);
    }

private:
    template <bool beyond_16, class Beside>
    NOINLINE void score_rows(const bf16* queries, int rows, int64_t head_dim, const Streams<bf16>& tiles, int begin,
                             int end, int lines, Fetch& fetch, float* scores, Beside& beside) {
        int words = words_at_once(head_dim / 2), dims = 2 * words;
        shapes_.set(rows, words);
        settle_memory();
        for (int i = begin; i < end; i += 2) {
            const char *low = (const char*)tiles.keys[i], *high = (const char*)tiles.keys[i + 1];
            TileSums<beyond_16>::clear();
            for (int64_t d = 0; d < head_dim; d += dims) {
                for (int line = 0; line < lines; line++) fetch.line();
                TileSums<beyond_16>::add(queries + d, head_dim, low + d * kKeyBytes, high + d * kKeyBytes, 2 * kKeyBytes);
                beside();
            }
            TileSums<beyond_16>::store(scores + i * kLanes, kRowStride);
        }
    }

    template <bool beyond_16, class Beside>
    NOINLINE void weigh_rows(const bf16* weights, int rows, const bf16* packed, int begin, int end, int64_t num_slices,
                             int lines, Fetch& fetch, float* values, Beside& beside) {
        constexpr int64_t kSliceBytes = 2 * kLanes * kLanes * (int64_t)sizeof(bf16), kTokenPair = 2 * kKeyBytes;
        int64_t width = num_slices * kLanes;
        shapes_.set(rows);
        settle_memory();
        for (int64_t slice = 0; slice < num_slices; slice += 2) {
            bool is_last = slice + 1 == num_slices;
            TileSums<beyond_16>::clear();
            for (int i = begin; i < end; i += 2) {
                for (int line = 0; line < lines; line++) fetch.line();
                const char* low = (const char*)packed + (i / 2 * num_slices + slice) * kSliceBytes;
                TileSums<beyond_16>::add(weights + i * kLanes, kRowStride, low, is_last ? low : low + kSliceBytes, kTokenPair);
                beside();
            }
            if (is_last)
                TileSums<beyond_16>::store_low(values + slice * kLanes, width);
            else
                TileSums<beyond_16>::store(values + slice * kLanes, width);
        }
    }

    static constexpr int64_t kKeyBytes = kLanes * (int64_t)sizeof(bf16);  // of a tile, for each dim

    TileShapes shapes_;
};
#endif
