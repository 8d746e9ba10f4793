// How attention.cpp cuts a ragged batch into items of work, and what each item sees of the context of its row. A row of
// the step is a request; the rows of an item are its queries.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "attention.h"
#include "attention_products.h"

constexpr int64_t kItemRows = 96;       // queries of an item, which share a chunk while it is in the cache;
constexpr int64_t kItemTiles = 8;       // or as many as so many micro tiles have, where that is more
constexpr int64_t kItemHeads = 8;       // KV heads of an item at most: in a block they are one long run of memory
constexpr int64_t kMemoryRows = 8;      // reading a tile costs as much as computing so many rows of it
constexpr int64_t kMaxShared = 16 << 20;  // floats of partial results of cut items; beyond, nothing more is cut
constexpr int64_t kParallelCost = 500;  // below, waking threads takes longer than the work

// Consecutive tokens of a row of the step, with the query heads of some KV heads. The rows of an item are its queries,
// in the order (KV head, token, query head).
struct Item {
    int64_t row;  // of the step
    int64_t first_head;  // of the KV heads
    int64_t num_heads;
    int64_t first_token;  // of the step
    int64_t num_tokens;
    int64_t first_position;
    int64_t first_tile;  // of the row's context: the tiles that a query of the item sees
    int64_t end_tile;
    int64_t first_chunk;  // the chunks of the context that this item computes
    int64_t end_chunk;
    int64_t shared;  // where the partial results of its first chunk go, in shared memory; -1: it merges them itself

    int64_t num_tiles() const {
        return std::min(end_tile, end_chunk * kTilesPerChunk) - std::max(first_tile, first_chunk * kTilesPerChunk);
    }
};

// Cuts a step into items. Positions and tiles are counted from the beginning of a row's context, and tiles block by
// block: a block whose size is not a multiple of 16 ends with a tile that is not full.
class AttentionPlan {
public:
    // `micro_rows`: so many queries at most are computed at once, as a micro tile.
    AttentionPlan(const AttentionArgs& args, const Step& step, int64_t micro_rows)
        : args_(args),
          step_(step),
          micro_rows_(micro_rows),
          group_size_(args.num_heads / args.num_kv_heads),
          tiles_per_block_((args.block_size + kLanes - 1) / kLanes),
          begin_tile_(args.parts ? args.parts->first_segment * kTilesPerSegment : 0),
          end_tile_(args.parts ? args.parts->end_segment * kTilesPerSegment : INT64_MAX) {}

    int64_t group_size() const { return group_size_; }

    // How many rows the largest item has.
    int64_t max_rows() const { return std::max(item_rows(), tokens_per_item() * group_size_); }

    int64_t rows_of_head(const Item& item) const { return item.num_tokens * group_size_; }
    int64_t rows_of(const Item& item) const { return item.num_heads * rows_of_head(item); }
    int64_t position_of(const Item& item, int64_t row) const { return item.first_position + row / group_size_; }
    int64_t first_seen(int64_t position) const {
        return args_.window > 0 ? std::max<int64_t>(0, position - args_.window + 1) : 0;
    }
    int64_t tile_of(int64_t position) const {
        int64_t offset = position % args_.block_size;
        return position / args_.block_size * tiles_per_block_ + offset / kLanes;
    }

    // Appends all items, none of them cut into ranges of chunks; returns their cost.
    int64_t whole_items(std::vector<Item>& items) const {
        int64_t cost = 0, most = tokens_per_item();
        for (int64_t row = 0; row < step_.num_rows; row++) {
            int64_t start = step_.query_starts[row], end = step_.query_starts[row + 1];
            for (int64_t first = start; first < end; first += most) {
                int64_t position = step_.seq_lens[row] - (end - first);
                Item item{row, 0, 0, first, std::min(most, end - first), position, 0, 0, 0, 0, -1};
                item.first_tile = std::max(begin_tile_, tile_of(first_seen(position)));
                item.end_tile = std::min(end_tile_, tile_of(position + item.num_tokens - 1) + 1);
                if (item.first_tile >= item.end_tile) continue;
                item.first_chunk = item.first_tile / kTilesPerChunk;
                item.end_chunk = (item.end_tile + kTilesPerChunk - 1) / kTilesPerChunk;
                int64_t heads = heads_per_item(item.num_tokens);
                for (; item.first_head < args_.num_kv_heads; item.first_head += heads) {
                    item.num_heads = std::min(heads, args_.num_kv_heads - item.first_head);
                    items.push_back(item);
                    cost += cost_of(item);
                }
            }
        }
        return cost;
    }

    // Cuts items that cost more than `most` into their heads, and these into ranges of chunks. A head that was cut is
    // appended to `cut` as well, with the place of its results in shared memory, where a row of values takes `width`
    // floats. Puts the dearest items first, so that all threads end at about the same time. Returns the floats of
    // shared memory that are needed.
    int64_t divide(std::vector<Item>& items, std::vector<Item>& cut, int64_t width, int64_t most) const {
        int64_t size = 0, num_whole = items.size();
        for (int64_t at = 0; at < num_whole; at++) {
            Item part = items[at];
            int64_t heads = part.num_heads, pieces = cost_of(part) / std::max<int64_t>(most, 1) + 1;
            if (pieces == 1 || size > kMaxShared) continue;
            part.num_heads = 1;
            for (int64_t h = 0; h < heads; h++, part.first_head++)
                size = divide_head(part, (pieces + heads - 1) / heads, width, size, items, cut);
            items[at].num_tokens = 0;
        }
        items.erase(std::remove_if(items.begin(), items.end(), [](const Item& item) { return item.num_tokens == 0; }),
                    items.end());
        std::stable_sort(items.begin(), items.end(),
                         [this](const Item& a, const Item& b) { return cost_of(a) > cost_of(b); });
        return size;
    }

private:
    // A number of tokens whose rows fill micro tiles.
    int64_t tokens_per_item() const {
        if (group_size_ >= kItemRows) return 1;
        int64_t unit = micro_rows_ / std::gcd(micro_rows_, group_size_);
        return std::max(unit, item_rows() / group_size_ / unit * unit);
    }

    int64_t item_rows() const { return std::max(kItemRows, kItemTiles * micro_rows_); }

    int64_t heads_per_item(int64_t num_tokens) const {
        int64_t most = std::min(args_.num_kv_heads, kItemHeads);
        return std::clamp<int64_t>(item_rows() / (num_tokens * group_size_), 1, most);
    }

    int64_t cost_of(const Item& item) const {
        return item.num_tiles() * item.num_heads * (rows_of_head(item) + kMemoryRows);
    }

    // Appends the pieces of an item of one head. `size` floats of shared memory are taken before; returns how many are
    // taken after.
    int64_t divide_head(Item item, int64_t pieces, int64_t width, int64_t size, std::vector<Item>& items,
                        std::vector<Item>& cut) const {
        int64_t first = item.first_chunk, chunks = item.end_chunk - first;
        pieces = std::min(pieces, chunks);
        if (pieces == 1) {
            items.push_back(item);
            return size;
        }
        int64_t size_of_chunk = Sums::size(rows_of(item), width);
        item.shared = size;
        cut.push_back(item);
        for (int64_t piece = 0; piece < pieces; piece++) {
            item.first_chunk = first + chunks * piece / pieces;
            item.end_chunk = first + chunks * (piece + 1) / pieces;
            item.shared = size + (item.first_chunk - first) * size_of_chunk;
            items.push_back(item);
        }
        return size + chunks * size_of_chunk;
    }

    const AttentionArgs& args_;
    const Step& step_;
    int64_t micro_rows_;
    int64_t group_size_;  // query heads of a KV head
    int64_t tiles_per_block_;
    int64_t begin_tile_;  // of every row's context: the tiles that this call computes
    int64_t end_tile_;
};
