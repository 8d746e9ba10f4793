// A block of the KV cache in canonical order, and back: of each layer and KV head one record, its keys
// [block_size, head_dim], then its values [block_size, head_dim]. So bytes that leave a rank do not depend on how it
// packs them (attention.h). What no token has written yet is copied as it is.
//
// Numbers are moved as words, so every bit stays. The functions share no state and use no team of threads: one thread
// may copy some blocks while others compute with the rest. A call copies many blocks, of one layer or of several.
#include <algorithm>

#include "attention.h"

// Calls move(number in the block, number in the record) for all numbers of one head in a block, in the order in which
// the block has them.
template <class Packed, class Record, class Layout, class Move>
static void each_number(Packed* piece, Record* record, const Layout& layout, const Move& move) {
    constexpr int64_t group = Layout::kGroup;
    const int64_t size = layout.head_dim;
    for (int64_t first = 0; first < layout.block_size; first += kLanes, piece += layout.tile_size()) {
        const int64_t lanes = std::min<int64_t>(kLanes, layout.block_size - first);
        Record* key = record + first * size;
        for (int64_t d = 0; d < size; d += group)
            for (int64_t lane = 0; lane < lanes; lane++)
                for (int64_t g = 0; g < group; g++)
                    move(piece[layout.key_at(lane, d) + g], key[lane * size + d + g]);
        Packed* values = piece + layout.key_size();
        Record* value = record + (layout.block_size + first) * size;
        for (int64_t lane = 0; lane < lanes; lane += group) {
            const int64_t together = std::min(group, lanes - lane);
            for (int64_t d = 0; d < size; d++)
                for (int64_t g = 0; g < together; g++)
                    move(values[layout.value_at(lane, d) + g], value[(lane + g) * size + d]);
        }
    }
}

// blocks: where each block begins. records: where each record begins, block by block, and head by head in a block.
template <class Word>
static void export_blocks(Word* const* blocks, Word* const* records, int64_t num_blocks,
                          const KVLayout<Word>& layout) {
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t h = 0; h < layout.num_kv_heads; h++)
            each_number((const Word*)blocks[b] + layout.tile_at(0, 0, h), *records++, layout,
                        [](Word stored, Word& number) { number = stored; });
}

template <class Word>
static void import_blocks(Word* const* blocks, const Word* const* records, int64_t num_blocks,
                          const KVLayout<Word>& layout) {
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t h = 0; h < layout.num_kv_heads; h++)
            each_number(blocks[b] + layout.tile_at(0, 0, h), *records++, layout,
                        [](Word& stored, Word number) { stored = number; });
}

// blocks: where each block begins, which may be of any layer. records: where each record begins, block by block, and KV
// head by KV head in a block; a record is [2, block_size, head_dim].
PENSTOCK_EXPORT void penstock_kv_export(void* const* blocks, void* const* records, int64_t num_blocks,
                                        int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int32_t dtype) {
    if (dtype == kBFloat16)
        export_blocks((bf16* const*)blocks, (bf16* const*)records, num_blocks, {num_kv_heads, head_dim, block_size});
    else
        export_blocks((uint32_t* const*)blocks, (uint32_t* const*)records, num_blocks,
                      {num_kv_heads, head_dim, block_size});
}

PENSTOCK_EXPORT void penstock_kv_import(void* const* blocks, const void* const* records, int64_t num_blocks,
                                        int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int32_t dtype) {
    if (dtype == kBFloat16)
        import_blocks((bf16* const*)blocks, (const bf16* const*)records, num_blocks,
                      {num_kv_heads, head_dim, block_size});
    else
        import_blocks((uint32_t* const*)blocks, (const uint32_t* const*)records, num_blocks,
                      {num_kv_heads, head_dim, block_size});
}
