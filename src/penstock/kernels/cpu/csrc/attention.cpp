// Causal attention over the KV blocks of a ragged batch: rows that prefill and rows that decode, in any order.
//
// In these files a chunk is 16 tiles (attention.h) of a row's context, counted from position 0: 256 tokens, or fewer if
// the size of blocks is not a multiple of 16. A chunk gives each query a partial result: the largest score, the sum of
// the weights relative to it, and the weighted values (online softmax, arXiv 1805.02867). Four chunks are a segment.
// Results are merged from the first chunk of a segment to its last, and then from the first segment to the last; a sink
// comes after all of them. So a query's result depends on nothing but the query and its context: not on the queries
// computed beside it, on how a prompt was cut into steps, on which thread took which chunk, or on which device took
// which segment (`AttentionParts`). Masked tokens weigh exactly 0, and a chunk that is skipped gives what a chunk
// wholly masked would.
//
// Work is cut into items: some consecutive tokens of a row, with the query heads of one or, for few tokens, of several
// KV heads. The queries of a KV head are the rows of one small matrix product with its keys, and their weights the rows
// of another with its values. Where items are few and long, they are cut once more into ranges of chunks, whose partial
// results go to shared memory. While a thread computes a chunk, the chunk that it takes next is fetched from memory.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "attention_latent.h"
#include "attention_plan.h"
#include "attention_products.h"
#include "attention_tiles.h"

// The tiles of one chunk of one row's context. A query of the item sees those in [begin, end).
template <class T>
struct Tiles {
    const T* starts[kTilesPerChunk];    // where each lies, for the item's first head
    int64_t positions[kTilesPerChunk];  // of the tile's first lane
    int64_t counts[kTilesPerChunk];     // lanes that hold a token of the context; 0 outside of [begin, end)
    int begin;
    int end;
    bool is_full;  // all lanes of tiles [begin, end) hold a token
};

// Memory of a thread that grows to what its largest step needs.
class Arena {
public:
    char* at_least(int64_t num_bytes) {
        if (num_bytes + 64 > size_) {
            size_ = num_bytes * 5 / 4 + 64;
            memory_.reset(new char[size_]);
        }
        return (char*)(((uintptr_t)memory_.get() + 63) / 64 * 64);
    }

private:
    std::unique_ptr<char[]> memory_;
    int64_t size_ = 0;
};

template <class T>
class Attention {
public:
    Attention(const AttentionArgs& args, const Step& step)
        : args_(args),
          step_(step),
          plan_(args, step, MatrixUnit<T>::rows_at_once()),
          layout_{args.num_kv_heads, args.head_dim, args.block_size, args.value_dim ? args.value_dim : args.head_dim},
          width_(layout_.num_slices() * kLanes),
          factor_((args.soft_cap > 0 ? 1.0f : args.scale) * kLog2E) {}

    void run() {
        static thread_local std::vector<Item> items;  // of the thread that calls, seen by its team as well
        static thread_local std::vector<Item> cut_items;
        static thread_local Arena shared_memory;
        std::vector<Item>&work = items, &cut = cut_items;
        work.clear(), cut.clear();
        if (args_.parts) clear_parts(*args_.parts);
        int64_t cost = plan_.whole_items(work);
        bool is_parallel = cost >= kParallelCost && omp_get_max_threads() > 1;
        int64_t shared_size = is_parallel ? plan_.divide(work, cut, width_, cost / (2 * omp_get_max_threads())) : 0;
        float* shared = (float*)shared_memory.at_least(shared_size * sizeof(float));
        std::atomic<int64_t> taken{0}, merged{0};
#pragma omp parallel if (is_parallel)
        {
            Scratch scratch(*this);
            compute(work, taken, shared, scratch);
#pragma omp barrier
            for (int64_t at = merged++; at < (int64_t)cut.size(); at = merged++) merge_shared(cut[at], shared, scratch);
        }
    }

private:
    using FactorType = typename Factor<T>::type;

    // The memory that a thread works with.
    struct Scratch {
        MatrixUnit<T> unit;
        FactorType* queries;  // micro tile by micro tile: [product step][row], or for the matrix unit [row][head_dim]
        float* scores;        // [kBuffers, kMostRows, kRowStride]
        T* weights;           // [kBuffers, kMostRows, kRowStride]
        T* values;            // [kTilesPerChunk] copies of values: of tiles with lanes that must not be read
        T* latent;            // [kTilesPerChunk] tiles made of latent vectors
        T* packed;            // values of a chunk for the matrix unit
        const T** ahead;      // [kItemHeads * kTilesPerChunk] tiles to fetch
        Sums parts[MatrixUnit<T>::kPassing];  // of micro tiles
        Sums segment;         // of the chunks of an item's present segment
        Sums merged;          // of the item's segments so far

        static constexpr int kMostRows = MatrixUnit<T>::kMostRows;
        static constexpr int kBuffers = MatrixUnit<T>::kPassing > 1 ? 2 : 1;  // one is written, one read

        explicit Scratch(const Attention& of) {
            static thread_local Arena arena;
            int64_t rows = of.plan_.max_rows(), part_size = Sums::size(kMostRows, of.width_);
            int64_t sizes[] = {
                rows * of.num_key_steps() * (int64_t)sizeof(FactorType),
                kBuffers * kMostRows * kRowStride * (int64_t)sizeof(float),
                kBuffers * kMostRows * kRowStride * (int64_t)sizeof(T),
                kTilesPerChunk * of.layout_.value_size() * (int64_t)sizeof(T),
                of.is_latent() ? kTilesPerChunk * of.layout_.tile_size() * (int64_t)sizeof(T) : 0,
                MatrixUnit<T>::packed_size(of.layout_) * (int64_t)sizeof(T),
                kItemHeads * kTilesPerChunk * (int64_t)sizeof(T*),
                MatrixUnit<T>::kPassing * part_size * (int64_t)sizeof(float),
                Sums::size(rows, of.width_) * (int64_t)sizeof(float),
                Sums::size(rows, of.width_) * (int64_t)sizeof(float),
            };
            constexpr int count = sizeof(sizes) / sizeof(sizes[0]);
            int64_t starts[count + 1] = {};
            for (int i = 0; i < count; i++) starts[i + 1] = (starts[i] + sizes[i] + 63) / 64 * 64;
            char* memory = arena.at_least(starts[count]);
            queries = (FactorType*)memory;
            scores = (float*)(memory + starts[1]);
            weights = (T*)(memory + starts[2]);
            values = (T*)(memory + starts[3]);
            latent = (T*)(memory + starts[4]);
            packed = (T*)(memory + starts[5]);
            ahead = (const T**)(memory + starts[6]);
            for (int i = 0; i < MatrixUnit<T>::kPassing; i++)
                parts[i] = Sums::in((float*)(memory + starts[7]) + i * part_size, kMostRows, of.width_);
            segment = Sums::in((float*)(memory + starts[8]), rows, of.width_);
            merged = Sums::in((float*)(memory + starts[9]), rows, of.width_);
        }
    };

    // Rows [first, end) of a head of an item, as many as are computed at once, and the tiles of the present chunk that
    // they see.
    struct MicroTile {
        int64_t first;
        int64_t end;
        int begin_tile;
        int end_tile;

        bool is_empty() const { return begin_tile >= end_tile; }
        int rows() const { return (int)(end - first); }
        int begin_pair() const { return begin_tile / 2 * 2; }
        int end_pair() const { return (end_tile + 1) / 2 * 2; }
    };

    bool is_latent() const { return args_.value_dim > 0; }

    // Numbers of a token in qkv: its queries, and its keys and values, or its one key.
    int64_t token_size() const {
        return (args_.num_heads + (is_latent() ? 1 : 2 * args_.num_kv_heads)) * args_.head_dim;
    }

    // Where a tile lies in the cache, and how much of it.
    const T* stored_tile(int64_t block, int64_t offset, int64_t head) const {
        const T* kv = (const T*)args_.kv;
        if (is_latent()) return kv + (block * args_.block_size + offset) * args_.head_dim;
        return kv + layout_.tile_at(block, offset, head);
    }
    int64_t stored_size() const { return is_latent() ? kLanes * args_.head_dim : layout_.tile_size(); }

    int64_t num_key_steps() const { return args_.head_dim / KVLayout<T>::kGroup; }
    int64_t num_micro_tiles(int64_t rows) const {
        return (rows + MatrixUnit<T>::rows_at_once() - 1) / MatrixUnit<T>::rows_at_once();
    }

    // Takes items until there are none, and always knows the chunk that comes next, so as to fetch it ahead.
    void compute(const std::vector<Item>& items, std::atomic<int64_t>& taken, float* shared, Scratch& scratch) const {
        int64_t count = items.size(), at = taken++;
        if (at >= count) return;
        Tiles<T> present, ahead;
        find_tiles(items[at], items[at].first_chunk, ahead);
        while (at < count) {
            const Item& item = items[at];
            int64_t following = at;  // item of the chunk that comes next
            start(item, scratch);
            for (int64_t chunk = item.first_chunk; chunk < item.end_chunk; chunk++) {
                present = ahead;
                if (chunk + 1 < item.end_chunk)
                    find_tiles(item, chunk + 1, ahead);
                else if ((following = taken++) < count)
                    find_tiles(items[following], items[following].first_chunk, ahead);
                int64_t num_ahead = list_ahead(items[std::min(following, count - 1)], ahead, scratch.ahead);
                compute_chunk(item, chunk, present, num_ahead, shared, scratch);
            }
            if (item.shared < 0 && !args_.parts) finish(item, scratch.merged);
            at = following;
        }
    }

    NOINLINE void find_tiles(const Item& item, int64_t chunk, Tiles<T>& tiles) const {
        int64_t per_block = layout_.tiles_per_block(), first = chunk * kTilesPerChunk;
        int64_t seq_len = step_.seq_lens[item.row];
        const int64_t* blocks = step_.block_tables + item.row * step_.block_table_stride;
        tiles.begin = (int)std::max<int64_t>(0, item.first_tile - first);
        tiles.end = (int)std::min<int64_t>(kTilesPerChunk, item.end_tile - first);
        tiles.is_full = true;
        int64_t block = (first + tiles.begin) / per_block, within = (first + tiles.begin) % per_block;
        for (int i = tiles.begin; i < tiles.end; i++) {
            int64_t offset = within * kLanes, position = block * args_.block_size + offset;
            tiles.starts[i] = stored_tile(blocks[block], offset, item.first_head);
            tiles.positions[i] = position;
            tiles.counts[i] = std::min({(int64_t)kLanes, args_.block_size - offset, seq_len - position});
            tiles.is_full &= tiles.counts[i] == kLanes;
            if (++within == per_block) within = 0, block++;
        }
        for (int i = 0; i < kTilesPerChunk; i++) {
            if (i >= tiles.begin && i < tiles.end) continue;
            tiles.starts[i] = tiles.starts[tiles.begin];
            tiles.positions[i] = tiles.positions[tiles.begin], tiles.counts[i] = 0;
        }
    }

    // The tiles of all heads of a chunk in the order of memory, so that they are fetched in long runs.
    int64_t list_ahead(const Item& item, const Tiles<T>& tiles, const T** ahead) const {
        int64_t count = 0, size = stored_size();
        for (int i = tiles.begin, end; i < tiles.end; i = end) {
            for (end = i + 1; end < tiles.end && tiles.starts[end] == tiles.starts[end - 1] + size;) end++;
            for (int64_t h = 0; h < item.num_heads; h++)
                for (int j = i; j < end; j++) ahead[count++] = tiles.starts[j] + h * layout_.piece_size();
        }
        return count;
    }

    // Packs the queries, micro tile by micro tile.
    void start(const Item& item, Scratch& scratch) const {
        int64_t rows = plan_.rows_of_head(item), num_tiles = num_micro_tiles(rows), steps = num_key_steps();
        const T* heads = (const T*)args_.qkv + item.first_token * token_size();
        FactorType* packed = scratch.queries;
        for (int64_t h = item.first_head; h < item.first_head + item.num_heads; h++)
            for (int64_t m = 0; m < num_tiles; m++) {
                int64_t first = rows * m / num_tiles, end = rows * (m + 1) / num_tiles;
                for (int64_t r = first; r < end; r++) {
                    int64_t head = h * plan_.group_size() + r % plan_.group_size();
                    const T* from = heads + r / plan_.group_size() * token_size() + head * args_.head_dim;
                    if (MatrixUnit<T>::is_used()) {
                        memcpy(packed + (r - first) * steps, from, args_.head_dim * sizeof(T));
                        continue;
                    }
                    for (int64_t k = 0; k < steps; k++)
                        packed[k * (end - first) + r - first] = Factor<T>::at(from + k * KVLayout<T>::kGroup);
                }
                packed += (end - first) * steps;
            }
        if (item.shared < 0) clear(scratch.merged, plan_.rows_of(item), width_);
    }

    // Whether a chunk's results are the first of their segment, so that they need not be merged with others.
    bool opens(const Item& item, int64_t chunk) const {
        return item.shared >= 0 || chunk == item.first_chunk || chunk % kChunksPerSegment == 0;
    }

    // Whether a segment of an item is complete after this chunk. (If the item was cut, `merge_shared` merges its
    // segments when all chunks are computed.)
    bool closes(const Item& item, int64_t chunk) const {
        return item.shared < 0 && (chunk + 1 == item.end_chunk || (chunk + 1) % kChunksPerSegment == 0);
    }

    // Merges the segment's result of an item's row with those before it, or writes it to `AttentionParts`.
    void close_row(const Item& item, int64_t chunk, int64_t row, const Sums& segment, const Sums& merged) const {
        if (!args_.parts) return merge_row(segment, row, width_, merged);
        const AttentionParts& parts = *args_.parts;
        int64_t size = layout_.value_dim, at = chunk / kChunksPerSegment - parts.first_segment;
        at = (at * step_.num_tokens + token_of(item, row)) * args_.num_heads + head_of(item, row);
        parts.largest[at] = segment.largest[row], parts.total[at] = segment.total[row];
        memcpy(parts.values + at * size, segment.values + row * width_, size * sizeof(float));
    }

    void clear_parts(const AttentionParts& parts) const {
        int64_t rows = (parts.end_segment - parts.first_segment) * step_.num_tokens * args_.num_heads;
        clear({parts.largest, parts.total, parts.values}, rows, layout_.value_dim);
    }

    int64_t token_of(const Item& item, int64_t row) const {
        return item.first_token + row % plan_.rows_of_head(item) / plan_.group_size();
    }
    int64_t head_of(const Item& item, int64_t row) const {
        return (item.first_head + row / plan_.rows_of_head(item)) * plan_.group_size() + row % plan_.group_size();
    }

    void compute_chunk(const Item& item, int64_t chunk, const Tiles<T>& tiles, int64_t num_ahead, float* shared,
                       Scratch& scratch) const {
        int64_t rows = plan_.rows_of_head(item), num_tiles = num_micro_tiles(rows);
        bool is_first = opens(item, chunk), is_last = closes(item, chunk);
        Sums into = scratch.segment;
        if (item.shared >= 0)
            into = Sums::in(shared + item.shared + (chunk - item.first_chunk) * Sums::size(rows, width_), rows, width_);
        const FactorType* queries = scratch.queries;
        for (int64_t h = 0; h < item.num_heads; h++) {
            Streams<T> streams =
                is_latent() ? latent_streams(tiles, scratch.latent) : streams_of(tiles, h, scratch.values);
            auto ahead = (const char* const*)scratch.ahead;
            int64_t fetch_from = num_ahead * h / item.num_heads, fetch_to = num_ahead * (h + 1) / item.num_heads;
            Fetch fetch(ahead + fetch_from, ahead + fetch_to, stored_size() * sizeof(T));
            Sums head = into.from(h * rows, width_);
            if (MatrixUnit<T>::is_used()) {
                scratch.unit.pack_values(streams, tiles.begin, tiles.end, layout_, scratch.packed);
                compute_head_by_unit(item, chunk, h * rows, tiles, streams, queries, fetch, scratch, head);
                queries += rows * num_key_steps();
                continue;
            }
            for (int64_t m = 0; m < num_tiles; m++) {
                MicroTile micro = see(item, chunk, tiles, rows * m / num_tiles, rows * (m + 1) / num_tiles);
                Sums sums = head.from(micro.first, width_);
                attend(item, tiles, streams, micro, queries, fetch, scratch, is_first ? sums : scratch.parts[0]);
                if (!is_first) merge(scratch.parts[0], micro.rows(), width_, sums);
                for (int64_t r = h * rows + micro.first; is_last && r < h * rows + micro.end; r++)
                    close_row(item, chunk, r, scratch.segment, scratch.merged);
                queries += micro.rows() * num_key_steps();
            }
        }
    }

    // A micro tile on its way through the matrix unit: scores, their weights, weighted values, all merged.
    struct Passing {
        MicroTile micro;
        const T* queries;
        float* scores;
        T* weights;
        Sums part;       // results of this chunk
        Sums into;       // results of its segment
        bool is_merged;  // `part` is to be merged into `into`; else both are the same
        bool is_last;    // the chunk is the last of its segment
        int64_t row;     // its first row, counted in the item
    };

    // What the vectors do while the unit is busy: weights of one micro tile, then the merging of another.
    class VectorWork {
    public:
        VectorWork(const Attention& of, const Item& item, int64_t chunk, const Passing* weighed, const Passing* merged,
                   Fetch& fetch, const Scratch& scratch)
            : of_(of),
              item_(item),
              chunk_(chunk),
              weighed_(weighed),
              merged_(merged),
              fetch_(fetch),
              scratch_(scratch),
              num_weights_(weighed && !weighed->micro.is_empty() ? weighed->micro.rows() : 0),
              num_(num_weights_ + (merged && (merged->is_merged || merged->is_last) ? merged->micro.rows() : 0)) {}

        int num_weights() const { return num_weights_; }
        int num() const { return num_; }

        // Shares the rows up to `until` out to the next `num_calls` calls.
        void divide(int until, int num_calls) { at_once_ = (int)divide_up(std::max(until - done_, 0), num_calls); }

        NOINLINE void operator()() {
            for (int end = std::min(done_ + at_once_, num_); done_ < end; done_++)
                if (done_ < num_weights_)
                    make_weights(done_);
                else
                    merge(done_ - num_weights_);
        }

        void finish() {
            at_once_ = num_;
            (*this)();
        }

    private:
        void make_weights(int r) const {
            const Passing& of = *weighed_;
            weights_of(of.scores + r * kRowStride, of.micro.begin_pair(), of.micro.end_pair(), of_.factor_, 0, fetch_,
                       of.weights + r * kRowStride, of.part.largest + r, of.part.total + r);
        }

        void merge(int r) const {
            const Passing& of = *merged_;
            if (of.is_merged) merge_row(of.part, r, of_.width_, of.into);
            if (of.is_last) of_.close_row(item_, chunk_, of.row + r, scratch_.segment, scratch_.merged);
        }

        const Attention& of_;
        const Item& item_;
        int64_t chunk_;
        const Passing *weighed_, *merged_;
        Fetch& fetch_;
        const Scratch& scratch_;
        int num_weights_, num_, done_ = 0, at_once_ = 0;
    };

    // Computes all micro tiles of a head. Four of them are on their way at once: the unit computes scores of the first
    // and values of the third, while the vectors make weights of the second and merge the fourth.
    NOINLINE void compute_head_by_unit(const Item& item, int64_t chunk, int64_t first_row, const Tiles<T>& tiles,
                                       const Streams<T>& streams, const FactorType* queries, Fetch& fetch,
                                       Scratch& scratch, const Sums& head) const {
        constexpr float kFirstShare = 0.6f;  // of the weights, beside the scores; the rest beside the values
        constexpr int64_t kStages = MatrixUnit<T>::kPassing, kBuffer = Scratch::kMostRows * kRowStride;
        int64_t rows = plan_.rows_of_head(item), count = num_micro_tiles(rows), slices = layout_.num_slices();
        int lines = (int)(divide_up(2 * kLanes, count));  // all micro tiles together fetch a chunk
        bool is_first = opens(item, chunk), is_last = closes(item, chunk);
        Passing ring[kStages];
        auto stage = [&](int64_t m) -> Passing* { return m >= 0 && m < count ? &ring[m % kStages] : nullptr; };
        for (int64_t m = 0; m < count + kStages - 1; m++) {
            Passing *scored = stage(m), *valued = stage(m - 2);
            if (scored) {
                MicroTile micro = see(item, chunk, tiles, rows * m / count, rows * (m + 1) / count);
                Sums into = head.from(micro.first, width_);
                bool is_merged = !is_first && !micro.is_empty();
                int64_t buffer = m % Scratch::kBuffers * kBuffer;
                Sums part = is_merged ? scratch.parts[m % kStages] : into;
                float* scores = scratch.scores + buffer;
                *scored = {micro, (const T*)queries, scores, scratch.weights + buffer, part, into, is_merged, is_last,
                           first_row + micro.first};
                queries += micro.rows() * num_key_steps();
                if (micro.is_empty() && is_first) clear(into, micro.rows(), width_);
            }
            VectorWork work(*this, item, chunk, stage(m - 1), stage(m - 3), fetch, scratch);
            if (scored && !scored->micro.is_empty()) {
                const MicroTile& micro = scored->micro;
                int begin = micro.begin_pair(), end = micro.end_pair();
                int num_calls = MatrixUnit<T>::score_calls(args_.head_dim, begin, end);
                work.divide((int)(kFirstShare * work.num_weights()), num_calls);
                scratch.unit.score(scored->queries, micro.rows(), args_.head_dim, streams, begin, end, lines, fetch,
                                   scored->scores, work);
                if (args_.soft_cap > 0) cap(scored->scores, micro.rows(), begin, end);
                if (!is_plain(item, tiles, micro)) mask(item, tiles, micro, scored->scores);
            }
            if (valued && !valued->micro.is_empty()) {
                const MicroTile& micro = valued->micro;
                int begin = micro.begin_pair(), end = micro.end_pair();
                work.divide(work.num(), MatrixUnit<T>::weigh_calls(slices, begin, end));
                scratch.unit.weigh(valued->weights, micro.rows(), scratch.packed, begin, end, slices, lines, fetch,
                                   valued->part.values, work);
            }
            work.finish();
        }
    }

    Streams<T> streams_of(const Tiles<T>& tiles, int64_t head, T* copies) const {
        Streams<T> streams;
        for (int i = 0; i < kTilesPerChunk; i++) {
            streams.keys[i] = tiles.starts[i] + head * layout_.piece_size();
            streams.values[i] = streams.keys[i] + layout_.key_size();
        }
        if (!tiles.is_full) hide_stale(tiles, streams, copies);
        return streams;
    }

    Streams<T> latent_streams(const Tiles<T>& tiles, T* memory) const {
        Streams<T> streams;
        for (int i = 0; i < kTilesPerChunk; i++) {
            int within = std::clamp(i, tiles.begin, tiles.end - 1);  // nothing is seen of tiles outside of [begin, end)
            T* keys = memory + within * layout_.tile_size();
            streams.keys[i] = keys, streams.values[i] = keys + layout_.key_size();
            if (i != within) continue;
            make_keys(tiles.starts[i], tiles.counts[i], args_.head_dim, keys);
            make_values(tiles.starts[i], tiles.counts[i], layout_, keys + layout_.key_size());
        }
        return streams;
    }

    // Values of tiles with lanes outside the context are copied, zeros in those lanes: 0 * NaN would be NaN.
    void hide_stale(const Tiles<T>& tiles, Streams<T>& streams, T* copies) const {
        constexpr int64_t group = KVLayout<T>::kGroup;
        for (int i = tiles.begin; i < tiles.end; i++, copies += layout_.value_size()) {
            int64_t count = tiles.counts[i], whole = count / group * group * kLanes;
            if (count == kLanes) continue;
            memset(copies, 0, layout_.value_size() * sizeof(T));
            for (int64_t at = 0; at < layout_.value_size(); at += layout_.slice_size()) {
                memcpy(copies + at, streams.values[i] + at, whole * sizeof(T));
                if (count % group)
                    for (int64_t d = 0; d < kLanes; d++)
                        copies[at + whole + d * group] = streams.values[i][at + whole + d * group];
            }
            streams.values[i] = copies;
        }
    }

    MicroTile see(const Item& item, int64_t chunk, const Tiles<T>& tiles, int64_t first, int64_t end) const {
        int64_t origin = chunk * kTilesPerChunk;
        int64_t begin_tile = plan_.tile_of(plan_.first_seen(plan_.position_of(item, first))) - origin;
        int64_t end_tile = plan_.tile_of(plan_.position_of(item, end - 1)) + 1 - origin;
        begin_tile = std::max<int64_t>(tiles.begin, begin_tile);
        end_tile = std::min<int64_t>(tiles.end, end_tile);
        return {first, end, (int)begin_tile, (int)end_tile};
    }

    // One micro tile of queries against one chunk, without a matrix unit.
    NOINLINE void attend(const Item& item, const Tiles<T>& tiles, const Streams<T>& streams, const MicroTile& micro,
                         const FactorType* queries, Fetch& fetch, Scratch& scratch, const Sums& into) const {
        constexpr int kLinesBeside = 3;
        int rows = micro.rows(), begin = micro.begin_pair(), end = micro.end_pair();
        if (micro.is_empty()) return clear(into, rows, width_);
        score_of<T>(rows, AllRows())(queries, streams, begin, end, num_key_steps(), fetch, scratch.scores);
        if (args_.soft_cap > 0) cap(scratch.scores, rows, begin, end);
        if (!is_plain(item, tiles, micro)) mask(item, tiles, micro, scratch.scores);
        for (int r = 0; r < rows; r++)
            weights_of(scratch.scores + r * kRowStride, begin, end, factor_, kLinesBeside, fetch,
                       scratch.weights + r * kRowStride, into.largest + r, into.total + r);
        weigh_of<T>(rows, AllRows())(scratch.weights, streams, micro.begin_tile, micro.end_tile, layout_.num_slices(),
                                     fetch, into.values);
    }

    void cap(float* scores, int rows, int begin, int end) const {
        for (int r = 0; r < rows; r++, scores += kRowStride)
            for (int64_t at = begin * kLanes; at < end * kLanes; at += kLanes)
                store(scores + at, tanh(load(scores + at) * (args_.scale / args_.soft_cap)) * args_.soft_cap);
    }

    // Whether every query sees every lane, so that nothing has to be masked.
    bool is_plain(const Item& item, const Tiles<T>& tiles, const MicroTile& micro) const {
        return tiles.is_full && micro.begin_tile % 2 == 0 && micro.end_tile % 2 == 0 &&
               tiles.positions[micro.begin_tile] >= plan_.first_seen(plan_.position_of(item, micro.end - 1)) &&
               tiles.positions[micro.end_tile - 1] + kLanes <= plan_.position_of(item, micro.first) + 1;
    }

    void mask(const Item& item, const Tiles<T>& tiles, const MicroTile& micro, float* scores) const {
        for (int64_t r = micro.first; r < micro.end; r++, scores += kRowStride) {
            int64_t last = plan_.position_of(item, r), first = plan_.first_seen(last);
            for (int i = micro.begin_pair(); i < micro.end_pair(); i++) {
                int64_t from = std::max<int64_t>(0, first - tiles.positions[i]);
                int64_t to = std::min(tiles.counts[i], last + 1 - tiles.positions[i]);
                if (from == 0 && to == kLanes) continue;
                from = std::min<int64_t>(from, kLanes), to = std::max<int64_t>(to, 0);
                hide_lanes(scores + i * kLanes, (int32_t)from, (int32_t)to);
            }
        }
    }

    // Merges the chunks of an item that was cut, in order: those of a segment into its first, and then the segments.
    void merge_shared(const Item& item, float* shared, const Scratch& scratch) const {
        int64_t rows = plan_.rows_of(item), size = Sums::size(rows, width_);
        Sums segment = {};
        clear(scratch.merged, rows, width_);
        for (int64_t chunk = item.first_chunk; chunk < item.end_chunk; chunk++) {
            Sums part = Sums::in(shared + item.shared + (chunk - item.first_chunk) * size, rows, width_);
            if (chunk == item.first_chunk || chunk % kChunksPerSegment == 0)
                segment = part;
            else
                merge(part, rows, width_, segment);
            if (chunk + 1 < item.end_chunk && (chunk + 1) % kChunksPerSegment) continue;
            for (int64_t row = 0; row < rows; row++) close_row(item, chunk, row, segment, scratch.merged);
        }
        if (!args_.parts) finish(item, scratch.merged);
    }

    NOINLINE void finish(const Item& item, const Sums& sums) const {
        int64_t size = layout_.value_dim;
        for (int64_t row = 0; row < plan_.rows_of(item); row++) {
            int64_t token = token_of(item, row), head = head_of(item, row);
            const float* sink = args_.sinks ? args_.sinks + head : nullptr;
            finish_row(sums, row, width_, size, sink, (T*)args_.y + (token * args_.num_heads + head) * size);
        }
    }

    const AttentionArgs& args_;
    const Step& step_;
    AttentionPlan plan_;
    KVLayout<T> layout_;
    int64_t width_;       // value_dim, in whole vectors
    float factor_;        // turns scores into powers of 2
};

PENSTOCK_EXPORT void penstock_attention(const void* args, const Step* step) {
    const AttentionArgs& attention_args = *(const AttentionArgs*)args;
    if (attention_args.dtype == kBFloat16)
        Attention<bf16>(attention_args, *step).run();
    else
        Attention<float>(attention_args, *step).run();
}

template <class T>
static void merge_parts(const MergePartsArgs& args, int64_t num_tokens) {
    const AttentionParts& parts = *args.parts;
    int64_t num_segments = parts.end_segment - parts.first_segment, num_rows = num_tokens * args.num_heads;
    int64_t size = args.value_dim, width = divide_up(size, kLanes) * kLanes;
#pragma omp parallel if (num_segments * num_rows * size >= 1 << 15)
    {
        std::vector<float> memory(2 * Sums::size(1, width));  // lanes beyond `size` stay zero
        Sums part = Sums::in(memory.data(), 1, width);
        Sums merged = Sums::in(memory.data() + Sums::size(1, width), 1, width);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++) {
            clear(merged, 1, width);
            for (int64_t segment = 0; segment < num_segments; segment++) {
                int64_t at = segment * num_rows + row;
                *part.largest = parts.largest[at], *part.total = parts.total[at];
                memcpy(part.values, parts.values + at * size, size * sizeof(float));
                merge_row(part, 0, width, merged);
            }
            const float* sink = args.sinks ? args.sinks + row % args.num_heads : nullptr;
            finish_row(merged, 0, width, size, sink, (T*)args.y + row * size);
        }
    }
}

PENSTOCK_EXPORT void penstock_merge_parts(const void* args, const Step* step) {
    const MergePartsArgs& merge_args = *(const MergePartsArgs*)args;
    merge_args.dtype == kBFloat16 ? merge_parts<bf16>(merge_args, step->num_tokens)
                                  : merge_parts<float>(merge_args, step->num_tokens);
}

// Bytes of one block of one layer, keys and values.
PENSTOCK_EXPORT int64_t penstock_kv_block_bytes(int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                                                int32_t dtype) {
    if (dtype == kBFloat16) return KVLayout<bf16>{num_kv_heads, head_dim, block_size}.block_elements() * 2;
    return KVLayout<float>{num_kv_heads, head_dim, block_size}.block_elements() * 4;
}
