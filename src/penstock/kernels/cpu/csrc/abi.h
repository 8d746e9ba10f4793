// What Python and the kernels agree on. `kernels/cpu/abi.py` mirrors every struct of this file.
//
// A kernel is `void kernel(const Args*, const Step*)`. Args say where things lie and never change once written;
// all that changes from step to step is in Step. A list of calls recorded once can therefore be run again for
// any step: `penstock_run`.
//
// Sizes and strides are in elements. Rows of activations are contiguous; `*_stride` is from row to row.
#pragma once
#include <stdint.h>

#define PENSTOCK_EXPORT extern "C" __attribute__((visibility("default")))

constexpr int32_t kFloat32 = 0;
constexpr int32_t kBFloat16 = 1;
constexpr int32_t kFloat16 = 2;  // only scales can have it

struct Step {
    int64_t num_tokens;
    const int64_t* input_ids;     // [num_tokens] for the embedding
    const int64_t* positions;     // [num_tokens]
    const int64_t* slot_mapping;  // [num_tokens] where the step's keys and values go
    const int64_t* block_tables;  // [num_rows, block_table_stride]
    int64_t block_table_stride;
    const int64_t* query_starts;  // [num_rows + 1] row r owns tokens [query_starts[r], query_starts[r + 1])
    const int64_t* seq_lens;      // [num_rows] context length after this step
    int64_t num_rows;
    const int64_t* selected;  // [num_tokens] for a norm: the rows of x and residual to take; null: all, in order
};

using Kernel = void (*)(const void* args, const Step* step);

struct Call {
    Kernel kernel;
    const void* args;
};

// The function of a gate; its result is multiplied with the up projection. 0 = there is no gate.
constexpr int32_t kSilu = 1;
constexpr int32_t kGeluTanh = 2;

// y = x W^T + bias over all tokens of the step. W is packed (panels.h). With `gated`, the columns of W are those of
// gate and up, interleaved by halves of a panel (epilogue.h), and y is silu(gate) * up or gelu(gate) * up, which has
// out_size / 2 columns.
struct LinearArgs {
    const void* x;
    int64_t x_stride;
    const void* weight;
    const void* bias;  // [out_size] in the order of the checkpoint, gate before up; or null
    void* y;
    int64_t y_stride;
    int64_t in_size;
    int64_t out_size;
    int32_t dtype;  // of x, weight, bias and y
    int32_t gated;  // 0, kSilu or kGeluTanh
};

// A product of its own for each head: y[t, h] = x[t, h] W[h]^T, where x and y lie head after head within a token.
struct HeadLinearArgs {
    const void* x;
    int64_t x_stride;  // from a token to the next
    int64_t x_head_stride;
    const void* weight;  // packed, one matrix after the other
    void* y;
    int64_t y_stride;
    int64_t y_head_stride;
    int64_t num_heads;
    int64_t in_size;   // of each head
    int64_t out_size;
    int32_t dtype;  // of x, weight and y
    int32_t reserved;
};

constexpr int32_t kBlocks = 0;  // in place of a number of bits, for block formats

// Panels of unsigned 8- or 4-bit weights: w = scale * (q - zero), per output and group of `group_size` inputs.
// Activations are rounded to int8 per row and group, so a row depends on nothing but itself.
struct QuantizedLinearArgs {
    const void* x;
    int64_t x_stride;
    const uint8_t* weight;  // packed as quantized.h says, and so are scales and zeros
    const void* scales;
    const void* zeros;  // null: the middle of the range, 128 or 8
    const void* bias;
    void* y;
    int64_t y_stride;
    int64_t in_size;
    int64_t out_size;
    int64_t group_size;  // a multiple of 8, or >= in_size: one group
    void* scratch;       // rounded activations of the step: token_bytes of QuantizedSizes for each token
    int32_t bits;   // 8 or 4; kBlocks: block formats (blocks.h), `weight` is the table of panels, scales are not used
    int32_t dtype;  // of x, bias and y
    int32_t gated;  // as in LinearArgs
    int32_t scale_dtype;  // kFloat32, kBFloat16 or kFloat16
};

// The bytes that a packed matrix takes, and a token of a step. Memory for weight, scales and zeros starts out as zero.
struct QuantizedSizes {
    int64_t weight_bytes;
    int64_t scale_bytes;
    int64_t zero_bytes;   // if there are zeros
    int64_t token_bytes;  // of scratch
};

// Rows [first_row, first_row + num_rows) of a quantised matrix on their way into its panels.
struct QuantizedPackArgs {
    const uint8_t* q;      // [num_rows, in_size], a value a byte
    const void* scales;    // [num_rows, groups], of scale_dtype
    const uint8_t* zeros;  // [num_rows, groups], or null: 128 or 8
    uint8_t* weight;
    void* packed_scales;
    uint8_t* packed_zeros;  // or null
    int64_t first_row;
    int64_t num_rows;
    int64_t in_size;
    int64_t group_size;
    int32_t bits;
    int32_t role;  // of packed_column: 0 = plain, 1 = gate, 2 = up
    int32_t scale_dtype;
    int32_t reserved;
};

// Rows [first_row, first_row + num_rows) of a matrix in block formats on their way into its panels (blocks.h).
struct BlockPackArgs {
    const uint8_t* q;        // [num_rows, in_size], a value a byte
    const uint16_t* d;       // [num_rows, records] float16
    const uint16_t* m;       // the same, or null
    const uint8_t* scales;   // [num_rows, groups], or null
    const uint8_t* offsets;  // the same, or null
    const void* panels;      // BlockPanel[panels]; their memory starts out as zero
    int64_t first_row;
    int64_t num_rows;
    int64_t in_size;
    int32_t role;  // of packed_column
    int32_t reserved;
};

// Rows of a packed quantised matrix as vectors: y[t] = scale * (q[input_ids[t]] - zero).
struct QuantizedGatherArgs {
    const uint8_t* weight;
    const void* scales;
    const void* zeros;
    void* y;
    int64_t in_size;
    int64_t group_size;
    int32_t bits;
    int32_t dtype;  // of y
    int32_t scale_dtype;
    int32_t out_size;  // ids beyond it give zeros
};

// What a norm does with the normalised numbers. Plain: it rounds them to `dtype` and multiplies them by the weight.
// Wide: it multiplies them and then rounds. One-plus: as wide, with 1 + weight.
constexpr int32_t kPlainNorm = 0, kWideNorm = 1, kOnePlusNorm = 2;

// residual += x; y = residual / rms(residual) * weight, of all rows or the selected ones. x, residual:
// [rows, size], y: [num_tokens, size], contiguous.
struct NormArgs {
    const void* x;
    void* residual;
    const void* weight;
    void* y;
    int64_t size;
    float eps;
    int32_t dtype;
    int32_t kind;
    int32_t reserved;
};

// x = x / rms(x) * weight in place, of `num_groups` groups of `size` columns, each on its own and all with one weight.
struct GroupNormArgs {
    void* x;
    int64_t x_stride;
    const void* weight;    // [size]
    const float* squares;  // the first token's sum of squares over all ranks, for all groups; null: each group's own
    int64_t squares_stride;
    int64_t squared_size;  // how many numbers this sum has
    int64_t num_groups;
    int64_t size;
    float eps;
    int32_t dtype;
    int32_t kind;
    int32_t reserved;
};

// squares[t] = sum of the squares of `size` columns, with `squares_stride` from token to token.
struct SquaresArgs {
    const void* x;
    int64_t x_stride;
    float* squares;
    int64_t squares_stride;
    int64_t size;
    int32_t dtype;
    int32_t reserved;
};

// residual += x: [num_tokens, size], contiguous.
struct AddArgs {
    const void* x;
    void* residual;
    int64_t size;
    int32_t dtype;
    int32_t reserved;
};

// x *= factor: [num_tokens, size], contiguous.
struct ScaleArgs {
    void* x;
    int64_t size;
    float factor;
    int32_t dtype;
};

// cosines and sines of the step's positions: [num_tokens, 2, rotary_dim / 2] float32, rounded to `dtype`. With growth
// there is one number more behind those of each token: the factor of its queries, which is not rounded.
struct RopeAnglesArgs {
    const float* frequencies;  // [rotary_dim / 2] radians per position
    float* angles;
    int64_t rotary_dim;
    float factor;  // cosines and sines are multiplied by it
    int32_t dtype;
    float growth;  // queries are 1 + growth ln(1 + floor(position / growth_start)) times as large; 0 = all are the same
    int32_t reserved;
    int64_t growth_start;
};

// Rotates queries in place and keys on their way into the KV blocks. The blocks' layout: attention.h.
struct RopeStoreArgs {
    void* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    const float* angles;
    void* kv;  // of the layer: [num_blocks, block_bytes]
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int32_t dtype;
    int32_t rotary_dim;   // how many dims of a head are rotated: the first ones. 0 = all
    int32_t interleaved;  // pairs are neighbours in qkv. Rotated, they are half a rotary_dim apart, as without this
    int32_t grows;        // the factor of a token's queries follows its angles
};

constexpr int64_t kSegmentTokens = 1024;

// Unfinished results of attention, one for each query and segment of its context. Segment s is the positions
// [s kSegmentTokens, (s + 1) kSegmentTokens), in blocks whose size is a multiple of 16; in other blocks it is as many
// tiles of 16 (attention.h). Scores are in powers of 2: a score as the softmax takes it, times log2(e). Where a query
// sees nothing of a segment, `largest` is -1e29 and the rest 0.
struct AttentionParts {
    float* values;   // [segments, num_tokens, num_heads, value_dim] sums of 2^(score - largest) value
    float* largest;  // [segments, num_tokens, num_heads]
    float* total;    // [segments, num_tokens, num_heads] sums of 2^(score - largest)
    int64_t first_segment;
    int64_t end_segment;
};

// Causal attention of the step's queries over the blocks of their rows.
struct AttentionArgs {
    const void* qkv;  // as in RopeStoreArgs; queries are rotated, keys and values already stored
    const void* kv;   // as in RopeStoreArgs
    void* y;  // [num_tokens, num_heads * head_dim]
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t value_dim;  // 0 = keys and values are apart. Else kv has latent vectors, [slot][head_dim], of which the
                        // first value_dim numbers are the value, qkv has one key behind the queries, and y is
                        // [num_tokens, num_heads * value_dim]
    int64_t window;     // a token sees itself and window - 1 before it; 0 = all
    float scale;        // of the scores, before the cap
    float soft_cap;    // cap * tanh(score / cap); 0 = none
    int32_t dtype;     // of qkv, kv and y
    int32_t reserved;
    const float* sinks;  // [num_heads] of each head one more score, not scaled or capped, of a token without a value;
                         // null: none
    const AttentionParts* parts;  // null: all segments are merged to y. Else the results of these segments go here,
                                  // without sinks, y is not written, and blocks of other segments are not read
};

// y = what attention makes of all its segments: parts [first_segment, end_segment) merged in ascending order. Bit for
// bit what one call of attention gives, whichever calls computed the parts.
struct MergePartsArgs {
    const AttentionParts* parts;
    const float* sinks;  // [num_heads], or null
    void* y;             // [num_tokens, num_heads * value_dim]
    int64_t num_heads;
    int64_t value_dim;
    int32_t dtype;  // of y
    int32_t reserved;
};

// Rows of a packed matrix as vectors (a tied embedding): y[t] = W[input_ids[t]], zeros for an id that W does not have.
struct GatherArgs {
    const void* weight;
    void* y;
    int64_t in_size;
    int64_t out_size;
    int32_t dtype;
    int32_t reserved;
};

// y: [num_tokens, row_bytes] of zeros, contiguous.
struct ZeroArgs {
    void* y;
    int64_t row_bytes;
};

// Logits of rows of hidden states, and the best candidates of each row in the same pass: head.cpp. One of `dense` and
// `quantized` is given; its y, bias and gate are not used. If a row has fewer candidates (fewer logits are above minus
// infinity, or the row is not finite), those that are missing have minus infinity as their value and the id -1.
struct HeadArgs {
    const LinearArgs* dense;
    const QuantizedLinearArgs* quantized;
    int64_t num_rows;
    const int64_t* num_candidates;  // [num_rows] 0 = none; at most `width`
    float* const* logits;           // [num_rows] where the row's whole logits go, or null
    const int64_t* bias_starts;     // [num_rows + 1] row r owns entries [bias_starts[r], bias_starts[r + 1])
    const int64_t* bias_ids;        // rising within a row; without scales, entries of the same id add up
    const float* bias_values;
    const float* bias_scales;  // null: all 1. A logit above 0 is divided by it, another multiplied; then the value is added
    const int32_t* allowed;  // [num_rows, allowed_stride] bit i of word w allows id 32 w + i; null: all are
    int64_t allowed_stride;
    float* values;  // [num_rows, width]
    int64_t* ids;   // [num_rows, width]
    int64_t width;
    uint8_t* is_finite;  // [num_rows] 1 = all logits are finite, before bias and mask
    float multiplier;    // of every logit
    float soft_cap;      // then cap * tanh(logit / cap); 0 = none
};

constexpr int64_t kPage = 4096;
constexpr int64_t kMaxGroup = 64;
constexpr int64_t kRankAbsent = 1, kGroupOver = 2;

// One rank's place in its group: collective.cpp. `memory` is shared by all ranks, zero at first: a cache line
// for the group and one for each rank, from the next page on two buffers for each rank.
struct GroupState {
    uint8_t* memory;
    int64_t rank;
    int64_t size;          // ranks, at most kMaxGroup
    int64_t buffer_bytes;  // a multiple of 64
    int64_t timeout_ns;    // of every wait
    int64_t spin_ns;       // of a wait, before it sleeps
    int64_t num_meetings;  // so far
    int64_t outcome;       // 0 = all has gone well; kRankAbsent, kGroupOver
    int64_t absent;        // which rank was waited for in vain
    int64_t num_calls;     // of all-reduce
    int64_t spent_ns;      // in all calls
    int64_t waited_ns;     // for others, in all calls
};

// x becomes the sum of all ranks' x: [num_tokens, width], contiguous. Summed in float32, in the order of ranks.
struct AllReduceArgs {
    GroupState* group;
    void* x;
    int64_t width;
    int32_t dtype;
    int32_t reserved;
};

// y: [size, num_bytes], every rank's x.
struct AllGatherArgs {
    GroupState* group;
    const uint8_t* x;
    uint8_t* y;
    int64_t num_bytes;
};

constexpr int64_t kMaxExperts = 1024;

// y = the sum over each token's chosen experts of weight * down(silu(gate) * up): experts.cpp. One of the two pairs of
// tables is given. A table has a product for each of the experts [first_own, first_own + num_own), and then one for the
// shared expert, which all tokens go through, if there is one. Of a product only the weight, its sizes and the form of
// its quantisation are used.
struct ExpertsArgs {
    const void* x;       // [num_tokens, hidden_size]
    const void* logits;  // [num_tokens, num_experts (+ 1)]: the router's, then that of the shared expert's gate
    const int32_t* chosen;        // [num_tokens, num_chosen]; null: experts are chosen by a softmax of the logits. Else
    const float* chosen_weights;  // these are their weights, and of the logits only that of the gate is read
    void* y;                      // [num_tokens, hidden_size]
    const LinearArgs* gate_up;
    const LinearArgs* down;
    const QuantizedLinearArgs* quantized_gate_up;
    const QuantizedLinearArgs* quantized_down;
    uint8_t* scratch;  // penstock_expert_token_bytes for each token
    int64_t hidden_size;
    int64_t num_experts;  // at most kMaxExperts
    int64_t num_chosen;   // for each token, at most num_experts
    int64_t first_own;
    int64_t num_own;  // at least 1
    int32_t has_shared;
    int32_t normalized;  // the weights of the chosen experts are scaled so that their sum is 1
    int32_t dtype;       // of x, logits and y
    int32_t is_shared_gated;
};
