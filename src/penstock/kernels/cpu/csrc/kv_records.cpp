// A block of the KV cache in canonical order, and back: for each KV head one record, its keys
// [block_size, head_dim], then its values [block_size, head_dim]. So bytes that leave a rank do not depend on how it
// packs them (attention.h). What no token has written yet is copied as it is.
//
// Numbers are moved as words, so every bit stays. Nothing is shared and no team of threads is used: a thread of its
// own may copy one block while others compute with the rest.
#include "attention.h"

// Calls move(number in the block, number in the records) for all of a block of `layout`.
template <class Packed, class Record, class Layout, class Move>
static void each_number(Packed* kv, Record* records, const Layout& layout, int64_t block, const Move& move) {
    int64_t size = layout.head_dim;
    for (int64_t h = 0; h < layout.num_kv_heads; h++, records += 2 * layout.block_size * size)
        for (int64_t t = 0; t < layout.block_size; t++) {
            Packed* keys = kv + layout.tile_at(block, t, h);
            Packed* values = keys + layout.key_size();
            Record* key = records + t * size;
            Record* value = key + layout.block_size * size;
            for (int64_t d = 0; d < size; d++) move(keys[layout.key_at(t % kLanes, d)], key[d]);
            for (int64_t d = 0; d < size; d++) move(values[layout.value_at(t % kLanes, d)], value[d]);
        }
}

template <class Word>
static void export_block(const Word* kv, Word* records, const KVLayout<Word>& layout, int64_t block) {
    each_number(kv, records, layout, block, [](Word stored, Word& record) { record = stored; });
}

template <class Word>
static void import_block(Word* kv, const Word* records, const KVLayout<Word>& layout, int64_t block) {
    each_number(kv, records, layout, block, [](Word& stored, Word record) { stored = record; });
}

// kv: of the layer, [num_blocks, block_bytes]. records: [num_kv_heads, 2, block_size, head_dim].
PENSTOCK_EXPORT void penstock_kv_export(const void* kv, void* records, int64_t block, int64_t num_kv_heads,
                                        int64_t head_dim, int64_t block_size, int32_t dtype) {
    if (dtype == kBFloat16)
        export_block((const bf16*)kv, (bf16*)records, {num_kv_heads, head_dim, block_size}, block);
    else
        export_block((const uint32_t*)kv, (uint32_t*)records, {num_kv_heads, head_dim, block_size}, block);
}

PENSTOCK_EXPORT void penstock_kv_import(void* kv, const void* records, int64_t block, int64_t num_kv_heads,
                                        int64_t head_dim, int64_t block_size, int32_t dtype) {
    if (dtype == kBFloat16)
        import_block((bf16*)kv, (const bf16*)records, {num_kv_heads, head_dim, block_size}, block);
    else
        import_block((uint32_t*)kv, (const uint32_t*)records, {num_kv_heads, head_dim, block_size}, block);
}
