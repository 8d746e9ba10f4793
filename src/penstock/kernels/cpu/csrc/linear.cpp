// y = x W^T + bias over packed weights, with the gate of the MLP in the same pass where asked.
#include "abi.h"
#include "epilogue.h"
#include "panels.h"

#if defined(PENSTOCK_TILES)
const bool kHasTiles = request_tiles();
#endif

template struct DensePanels<bf16>;
template struct DensePanels<float>;

template <class T>
static void linear(const LinearArgs& args, int64_t num_tokens) {
    DensePanels<T> panels{(const T*)args.x, args.x_stride, (const T*)args.weight, args.in_size};
    write_product<T>(panels, num_tokens, args.out_size, (const T*)args.bias, (T*)args.y, args.y_stride, args.gated);
}

PENSTOCK_EXPORT void penstock_linear(const void* args, const Step* step) {
    const LinearArgs& linear_args = *(const LinearArgs*)args;
    if (linear_args.dtype == kBFloat16)
        linear<bf16>(linear_args, step->num_tokens);
    else
        linear<float>(linear_args, step->num_tokens);
}

// The panels of all heads are shared out to the threads.
template <class T>
static void head_linear(const HeadLinearArgs& args, int64_t num_tokens) {
    using Panels = DensePanels<T>;
    if (num_tokens == 0) return;
    int64_t panels = num_panels(args.out_size), most = Panels::rows_at_once(), row_tiles = divide_up(num_tokens, most);
    int64_t head_size = panels * panel_elements((const T*)nullptr, args.in_size);
#pragma omp parallel
    {
        typename Panels::Shapes shapes;
        alignas(64) float tile[Panels::kMostRows * kPanel];
#pragma omp for schedule(static)
        for (int64_t index = 0; index < args.num_heads * panels; index++) {
            int64_t head = index / panels, panel = index % panels, column = panel * kPanel;
            Panels product{(const T*)args.x + head * args.x_head_stride, args.x_stride,
                           (const T*)args.weight + head * head_size, args.in_size};
            for (int64_t t = 0; t < row_tiles; t++) {
                int64_t first = num_tokens * t / row_tiles, end = num_tokens * (t + 1) / row_tiles;
                product(shapes, first, (int)(end - first), panel, tile);
                for (int64_t r = first; r < end; r++) {
                    T* to = (T*)args.y + r * args.y_stride + head * args.y_head_stride + column;
                    const float* sums = tile + (r - first) * kPanel;
                    store_some(to, load(sums), args.out_size - column);
                    if (args.out_size - column > kLanes)
                        store_some(to + kLanes, load(sums + kLanes), args.out_size - column - kLanes);
                }
            }
        }
    }
}

PENSTOCK_EXPORT void penstock_head_linear(const void* args, const Step* step) {
    const HeadLinearArgs& linear_args = *(const HeadLinearArgs*)args;
    if (linear_args.dtype == kBFloat16)
        head_linear<bf16>(linear_args, step->num_tokens);
    else
        head_linear<float>(linear_args, step->num_tokens);
}

// `rows` has the rows [first_row, first_row + num_rows) of W: [num_rows, in_size]. They become the packed columns
// packed_column(first_row, role), packed_column(first_row + 1, role), ...; `role` says how a gated matrix is
// interleaved: 0 = plain, 1 = gate, 2 = up.
template <class T>
static void pack(const T* rows, T* weight, int64_t first_row, int64_t num_rows, int64_t in_size, int32_t role) {
    constexpr int64_t group = sizeof(T) == 2 ? 2 : 1;
    int64_t panel_size = panel_elements(weight, in_size);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t column = packed_column(first_row + r, role);
        T* to = weight + column / kPanel * panel_size + column % kPanel * group;
        for (int64_t k = 0; k < in_size; k++) to[k / group * group * kPanel + k % group] = rows[r * in_size + k];
    }
}

PENSTOCK_EXPORT void penstock_pack(const void* rows, void* weight, int64_t first_row, int64_t num_rows,
                                   int64_t in_size, int32_t role, int32_t dtype) {
    if (dtype == kBFloat16)
        pack((const bf16*)rows, (bf16*)weight, first_row, num_rows, in_size, role);
    else
        pack((const float*)rows, (float*)weight, first_row, num_rows, in_size, role);
}

template <class T>
static void gather(const GatherArgs& args, const Step& step) {
    constexpr int64_t group = sizeof(T) == 2 ? 2 : 1;
    const T* weight = (const T*)args.weight;
    int64_t panel_size = panel_elements(weight, args.in_size);
#pragma omp parallel for schedule(static) if (step.num_tokens > 16)
    for (int64_t t = 0; t < step.num_tokens; t++) {
        int64_t id = step.input_ids[t];
        if (id < 0 || id >= args.out_size) {
            memset((T*)args.y + t * args.in_size, 0, args.in_size * sizeof(T));
            continue;
        }
        const T* from = weight + id / kPanel * panel_size + id % kPanel * group;
        T* to = (T*)args.y + t * args.in_size;
        for (int64_t k = 0; k < args.in_size; k++) to[k] = from[k / group * group * kPanel + k % group];
    }
}

PENSTOCK_EXPORT void penstock_gather(const void* args, const Step* step) {
    const GatherArgs& gather_args = *(const GatherArgs*)args;
    if (gather_args.dtype == kBFloat16)
        gather<bf16>(gather_args, *step);
    else
        gather<float>(gather_args, *step);
}
