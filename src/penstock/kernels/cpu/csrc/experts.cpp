// Experts in place of an MLP: all tokens of an expert together, so that its weights are read once a step.
//
//     route      each token's experts and their weights: a softmax, then the largest numbers
//     sort       the tokens of each expert side by side, in their order. A slot is one token of one expert
//     gate, up   over (expert, panel): silu(gate) * up of the expert's slots
//     down       over panels of the output: the experts one after the other, each added to its tokens
//
// A thread has all experts' products for a panel of the output, and adds them in float32 in the order of the
// experts, the shared one last. So a token's sum has one order, whatever tokens are beside it, and is rounded once.
#include <algorithm>

#include "abi.h"
#include "blocks.h"
#include "panels.h"
#include "quantized.h"

static constexpr int64_t kTokensAtOnce = 512;  // their sums for a panel stay in the cache of a core

// Rows of a tile that are an even number of cache lines apart would share the same few sets of the cache.
static int64_t odd_lines(int64_t bytes) { return (divide_up(bytes, kCacheLine) | 1) * kCacheLine; }

// How products are made: over plain panels ...
template <class T>
struct DenseForm {
    using Value = T;
    using Product = LinearArgs;
    using Panels = DensePanels<T>;
    static constexpr bool kRounds = false;

    static int64_t row_bytes(const Product& product) { return odd_lines(product.in_size * sizeof(T)); }

    static Panels panels(const Product& product, uint8_t* rows, int64_t row_bytes) {
        return {(const T*)rows, row_bytes / (int64_t)sizeof(T), (const T*)product.weight, product.in_size};
    }

    static void round(const T*, int64_t, int64_t, const Product&, uint8_t*) {}
};

// ... or over quantised ones, for which rows of activations are rounded first.
template <class T, int bits>
struct QuantizedForm {
    using Value = T;
    using Product = QuantizedLinearArgs;
    using Panels = QuantizedPanels<bits>;
    static constexpr bool kRounds = true;

    static RoundedRows rounded(const Product& product, uint8_t* rows) {
        return RoundedRows(rows, product.in_size, QuantizedWeight(product).group_size, bits);
    }

    static int64_t row_bytes(const Product& product) { return rounded(product, nullptr).stride; }

    static Panels panels(const Product& product, uint8_t* rows, int64_t) {
        return {rounded(product, rows), QuantizedWeight(product)};
    }

    static void round(const T* x, int64_t x_stride, int64_t num_rows, const Product& product, uint8_t* rows) {
        round_rows(x, x_stride, num_rows, rounded(product, rows));
    }
};

// ... or over block formats.
template <class T>
struct BlockFormats {
    using Value = T;
    using Product = QuantizedLinearArgs;
    using Panels = BlockPanels;
    static constexpr bool kRounds = true;

    static RoundedRows rounded(const Product& product, uint8_t* rows) {
        return rounded_for_blocks(rows, product.in_size, product.group_size);
    }

    static int64_t row_bytes(const Product& product) { return rounded(product, nullptr).stride; }

    static Panels panels(const Product& product, uint8_t* rows, int64_t) {
        return {rounded(product, rows), (const BlockPanel*)product.weight, product.in_size};
    }

    static void round(const T* x, int64_t x_stride, int64_t num_rows, const Product& product, uint8_t* rows) {
        round_rows(x, x_stride, num_rows, rounded(product, rows));
    }
};

static void tables(const ExpertsArgs& args, const LinearArgs*& gate_up, const LinearArgs*& down) {
    gate_up = args.gate_up, down = args.down;
}

static void tables(const ExpertsArgs& args, const QuantizedLinearArgs*& gate_up, const QuantizedLinearArgs*& down) {
    gate_up = args.quantized_gate_up, down = args.quantized_down;
}

// Rows of one width that lie in scratch.
struct Rows {
    uint8_t* at;
    int64_t bytes;  // from row to row

    uint8_t* row(int64_t index) const { return at + index * bytes; }
};

// The slots of one expert, and its inputs and inner values as its products take them.
struct Group {
    int64_t entry;  // in the tables
    int64_t first_slot;
    int64_t count;
    Rows x, inner, inner_taken;
    int64_t first_panel = 0;  // number of the first panel of its inner values, counted through all groups
};

// Some tokens of a step on their way through the experts.
template <class Form>
struct Block {
    using T = typename Form::Value;
    using Product = typename Form::Product;

    const ExpertsArgs& args;
    const Product *gate_up, *down;
    int64_t num_tokens, num_routed;  // slots: those of the experts, then one for each token if there is a shared one
    int32_t* chosen;                 // [num_tokens, num_chosen]
    float* chosen_weights;
    int32_t* tokens;  // [num_slots]
    float* weights;
    Rows source, sorted, inner, inner_taken, shared_inner, shared_taken;
    int64_t scratch_bytes;
    Group groups[kMaxExperts + 1];
    int64_t num_groups = 0, num_filled = 0;

    Block(const ExpertsArgs& args, int64_t num_tokens)
        : args(args), num_tokens(num_tokens), num_routed(num_tokens * args.num_chosen) {
        tables(args, gate_up, down);
        uint8_t* next = args.scratch;
        int64_t num_slots = num_routed + args.has_shared * num_tokens;
        chosen = (int32_t*)take(next, num_routed, sizeof(int32_t)).at;
        chosen_weights = (float*)take(next, num_routed, sizeof(float)).at;
        tokens = (int32_t*)take(next, num_slots, sizeof(int32_t)).at;
        weights = (float*)take(next, num_slots, sizeof(float)).at;
        source = take(next, Form::kRounds ? num_tokens : 0, Form::row_bytes(gate_up[0]));
        sorted = take(next, num_routed, Form::row_bytes(gate_up[0]));
        take_inner(next, num_routed, down[0], inner, inner_taken);
        if (args.has_shared) take_inner(next, num_tokens, down[args.num_own], shared_inner, shared_taken);
        scratch_bytes = next - args.scratch;
    }

    static Rows take(uint8_t*& next, int64_t count, int64_t bytes) {
        Rows rows{next, bytes};
        next += divide_up(count * bytes, kCacheLine) * kCacheLine;
        return rows;
    }

    static void take_inner(uint8_t*& next, int64_t count, const Product& down, Rows& written, Rows& taken) {
        written = taken = take(next, count, odd_lines(down.in_size * sizeof(T)));
        if (Form::kRounds) taken = take(next, count, Form::row_bytes(down));
    }

    void run(int64_t first_token) {
        const T* x = (const T*)args.x + first_token * args.hidden_size;
        route(first_token);
        sort();
        if (Form::kRounds)
            Form::round(x, args.hidden_size, num_tokens, gate_up[0], source.at);
        else
            source = {(uint8_t*)x, args.hidden_size * (int64_t)sizeof(T)};
        gather();
        if (args.has_shared) add_shared();
        for_inner();
        if (Form::kRounds)
            for (int64_t g = 0; g < num_groups; g++) {
                const Group& group = groups[g];
                Form::round((const T*)group.inner.at, group.inner.bytes / (int64_t)sizeof(T), group.count,
                            down[group.entry], group.inner_taken.at);
            }
        for_output((T*)args.y + first_token * args.hidden_size);
    }

    void route(int64_t first_token) {
        int64_t num_gates = args.has_shared && args.is_shared_gated, stride = args.num_experts + num_gates;
        if (args.chosen) {
            memcpy(chosen, args.chosen + first_token * args.num_chosen, num_routed * sizeof(int32_t));
            memcpy(chosen_weights, args.chosen_weights + first_token * args.num_chosen, num_routed * sizeof(float));
        }
#pragma omp parallel for schedule(static) if (num_tokens > 16)
        for (int64_t t = 0; t < num_tokens; t++) {
            const T* own = (const T*)args.logits + (first_token + t) * stride;
            if (!args.chosen) choose(own, chosen + t * args.num_chosen, chosen_weights + t * args.num_chosen);
            if (!args.has_shared) continue;
            tokens[num_routed + t] = (int32_t)t;
            weights[num_routed + t] = num_gates ? 1.0f / (exp(-splat<f32r>(widen(own[args.num_experts]))) + 1.0f)[0] : 1.0f;
        }
    }

    // Chooses the experts with the largest logits, of equal ones the first, so that all ranks choose the same. Even if
    // logits are NaN, it chooses different experts, each with the weight NaN.
    void choose(const T* logits, int32_t* experts, float* expert_weights) const {
        float values[kMaxExperts];
        bool is_taken[kMaxExperts] = {};
        float most = widen(logits[0]), total = 0.0f, chosen_total = 0.0f;
        for (int64_t e = 1; e < args.num_experts; e++)
            if (!(widen(logits[e]) <= most)) most = widen(logits[e]);
        for (int64_t e = 0; e < args.num_experts; e += kLanes) {
            int64_t left = args.num_experts - e;
            store_some(values + e, exp(load_some(logits + e, left) - splat(most)), left);
        }
        for (int64_t e = 0; e < args.num_experts; e++) total += values[e];
        for (int64_t i = 0; i < args.num_chosen; i++) {
            int64_t best = -1;
            for (int64_t e = 0; e < args.num_experts; e++)
                if (!is_taken[e] && (best < 0 || widen(logits[e]) > widen(logits[best]))) best = e;
            experts[i] = (int32_t)best;
            expert_weights[i] = values[best] / total;
            chosen_total += expert_weights[i];
            is_taken[best] = true;
        }
        if (args.normalized)
            for (int64_t i = 0; i < args.num_chosen; i++) expert_weights[i] /= chosen_total;
    }

    // Makes the slots of this rank's experts; there are at most `num_routed`.
    void sort() {
        int64_t next[kMaxExperts] = {}, first = 0;
        for (int64_t i = 0; i < num_routed; i++)
            if (is_own(chosen[i])) next[chosen[i] - args.first_own]++;
        for (int64_t e = 0; e < args.num_own; e++) {
            int64_t count = next[e];
            next[e] = first;
            if (count) groups[num_groups++] = group(e, first, count);
            first += count;
        }
        for (int64_t i = 0; i < num_routed; i++) {
            if (!is_own(chosen[i])) continue;
            int64_t slot = next[chosen[i] - args.first_own]++;
            tokens[slot] = (int32_t)(i / args.num_chosen);
            weights[slot] = chosen_weights[i];
        }
        num_filled = first;
    }

    bool is_own(int64_t expert) const {
        return expert >= args.first_own && expert < args.first_own + args.num_own;
    }

    Group group(int64_t entry, int64_t first, int64_t count) const {
        return {entry, first, count, from(sorted, first), from(inner, first), from(inner_taken, first)};
    }

    static Rows from(const Rows& rows, int64_t first) { return {rows.row(first), rows.bytes}; }

    void gather() {
        int64_t bytes = source.bytes < sorted.bytes ? source.bytes : sorted.bytes;
#pragma omp parallel for schedule(static) if (num_filled > 32)
        for (int64_t slot = 0; slot < num_filled; slot++)
            memcpy(sorted.row(slot), source.row(tokens[slot]), bytes);
    }

    void add_shared() {
        groups[num_groups++] = {args.num_own, num_routed, num_tokens, source, shared_inner, shared_taken};
    }

    void for_inner() {
        int64_t count = 0;
        for (int64_t g = 0; g < num_groups; g++) {
            groups[g].first_panel = count;
            count += divide_up(gate_up[groups[g].entry].out_size / 2, kLanes);
        }
        Shares shares(count);
#pragma omp parallel
        {
            typename Form::Panels::Shapes shapes;
            shares.each([&](int64_t panel) {
                const auto is_before = [](int64_t at, const Group& group) { return at < group.first_panel; };
                const Group& group = std::upper_bound(groups, groups + num_groups, panel, is_before)[-1];
                add_inner(group, panel - group.first_panel, shapes);
            });
        }
    }

    void add_inner(const Group& group, int64_t panel, typename Form::Panels::Shapes& shapes) const {
        const Product& product = gate_up[group.entry];
        auto panels = Form::panels(product, group.x.at, group.x.bytes);
        const int64_t column = panel * kLanes, width = product.out_size / 2;
        for_tiles(panels, shapes, group.count, panel, [&](int64_t first, int rows, const float* tile) {
            for (int r = 0; r < rows; r++) {
                T* to = (T*)group.inner.row(first + r) + column;
                f32x16 gated = silu(load(tile + r * kPanel)) * load(tile + r * kPanel + kLanes);
                store_some(to, gated, width - column);
            }
        });
    }

    void for_output(T* y) {
        Shares shares(num_panels(args.hidden_size));
#pragma omp parallel
        {
            typename Form::Panels::Shapes shapes;
            shares.each([&](int64_t panel) {
                alignas(64) float sums[kTokensAtOnce * kPanel];
                memset(sums, 0, num_tokens * kPanel * sizeof(float));
                for (int64_t g = 0; g < num_groups; g++) add_outputs(groups[g], panel, shapes, sums);
                write(sums, panel, y);
            });
        }
    }

    void add_outputs(const Group& group, int64_t panel, typename Form::Panels::Shapes& shapes, float* sums) const {
        auto panels = Form::panels(down[group.entry], group.inner_taken.at, group.inner_taken.bytes);
        for_tiles(panels, shapes, group.count, panel, [&](int64_t first, int rows, const float* tile) {
            for (int r = 0; r < rows; r++) {
                int64_t slot = group.first_slot + first + r;
                f32x16 weight = splat(weights[slot]);
                float* low = sums + tokens[slot] * kPanel;
                store(low, fma(load(tile + r * kPanel), weight, load(low)));
                store(low + kLanes, fma(load(tile + r * kPanel + kLanes), weight, load(low + kLanes)));
            }
        });
    }

    void write(const float* sums, int64_t panel, T* y) const {
        int64_t column = panel * kPanel, left = args.hidden_size - column;
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t half = 0; half < kPanel && half < left; half += kLanes) {
                T* to = y + t * args.hidden_size + column + half;
                store_some(to, load(sums + t * kPanel + half), left - half);
            }
    }

    // Multiplies the rows of a group with one panel, in tiles of about as many rows.
    template <class Panels, class Use>
    static void for_tiles(const Panels& panels, typename Panels::Shapes& shapes, int64_t num_rows, int64_t panel,
                          const Use& use) {
        alignas(64) float tile[Panels::kMostRows * kPanel];
        int64_t num = divide_up(num_rows, Panels::rows_at_once());
        for (int64_t t = 0; t < num; t++) {
            int64_t first = num_rows * t / num, end = num_rows * (t + 1) / num;
            panels(shapes, first, (int)(end - first), panel, tile);
            use(first, (int)(end - first), tile);
        }
    }
};

template <class Form>
static int64_t run(const ExpertsArgs& args, int64_t num_tokens, bool only_size) {
    if (only_size) return Block<Form>(args, 1).scratch_bytes;
    for (int64_t first = 0; first < num_tokens; first += kTokensAtOnce) {
        int64_t left = num_tokens - first;
        Block<Form>(args, left < kTokensAtOnce ? left : kTokensAtOnce).run(first);
    }
    return 0;
}

template <class T>
static int64_t run_form(const ExpertsArgs& args, int64_t num_tokens, bool only_size) {
    if (args.gate_up) return run<DenseForm<T>>(args, num_tokens, only_size);
    if (args.quantized_gate_up->bits == kBlocks) return run<BlockFormats<T>>(args, num_tokens, only_size);
    if (args.quantized_gate_up->bits == 8) return run<QuantizedForm<T, 8>>(args, num_tokens, only_size);
    return run<QuantizedForm<T, 4>>(args, num_tokens, only_size);
}

static int64_t run_dtype(const ExpertsArgs& args, int64_t num_tokens, bool only_size) {
    if (args.dtype == kBFloat16) return run_form<bf16>(args, num_tokens, only_size);
    return run_form<float>(args, num_tokens, only_size);
}

PENSTOCK_EXPORT void penstock_experts(const void* args, const Step* step) {
    run_dtype(*(const ExpertsArgs*)args, step->num_tokens, false);
}

// Bytes of scratch that a token takes.
PENSTOCK_EXPORT int64_t penstock_expert_token_bytes(const void* args) {
    return run_dtype(*(const ExpertsArgs*)args, 1, true);
}
