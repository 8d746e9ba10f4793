// Products of hundreds of rows by the matrix unit: which rows, weights and sums wait in which cache.
//
//                 some inputs               up to 8 panels                      up to 8 panels
//                [ ......... ]             [ .... | .... ]                     [ .... | .... ]
//      512 rows  [ rows: L2  ] some inputs [ of one: L1  ]           512 rows  [ sums: L2    ]
//                [ ......... ]             [ .... | .... ]                     [ .... | .... ]
//
// The inputs are cut into blocks. A thread takes some panels, and multiplies one block of the inputs of all rows with
// one panel after the other, then the next block. So rows are read once for all its panels, and weights once for all
// rows, however many inputs there are. For each block and panel the rows pass by, 32 at a time, while the weights that
// come next are fetched. After the last block the results are used at once, while they are in a cache.
//
// The order of a sum does not depend on this: each sum is over the inputs from the first to the last, and storing it in
// between loses nothing.
#pragma once
#include <omp.h>

#include <memory>

#include "tiles.h"

constexpr int64_t kBlockInputs = 512;  // of a block at most, unless the whole product is one block
constexpr int kRowsOfMany = 512;
constexpr int64_t kPanelsOfMany = 8;

#if defined(PENSTOCK_TILES)
// Adds the products of inputs [first, end) to the sums of some rows for a panel, [rows][32]; if `first` is 0, the sums
// begin here. `rows_at(row, input)` says where rows lie, from this row and input on. `passed(row, rows)` is called for
// rows whose products have been added.
template <class RowsAt, class Passed>
INLINE void multiply_tile_block(TileShapes& shapes, const RowsAt& rows_at, int rows, const char* panel,
                                int64_t panel_bytes, int64_t first, int64_t end, float* sums, const Passed& passed) {
    constexpr int64_t kStepLines = kStepBytes / 64;
    const int64_t passes = divide_up(rows, kPassRows), lines = divide_up(kStepLines, passes);
    const char *w = panel + first / 2 * kPairBytes, *next = panel + divide_up(end, 2) * kPairBytes;
    if (passes == 1) next = w + 4 * kStepBytes;
    else if (next == panel + panel_bytes) next += first / 2 * kPairBytes;  // the same inputs of the next panel
    for (int row = 0; row < rows; row += kPassRows) {
        int own = rows - row < kPassRows ? rows - row : kPassRows;
        float* own_sums = sums + row * 2 * kTileRows;
        add_tile_block(shapes, rows_at(row, first), own, w, end - first, first == 0, {next, lines}, own_sums);
        passed(row, own);
        next += (end - first) / kTileInputs * lines * 64;
    }
}

// Dense panels for many rows. Where it pays, rows are first copied into the order in which the unit takes them: [block
// of inputs][32 rows][32 inputs][row][input]. It pays with many inputs (rows that are powers of 2 apart would share few
// sets of the cache) or many panels. The length of blocks and when to copy were measured (docs/perf-log.md).
class ManyRows {
public:
    using Shapes = TileShapes;

    ManyRows(const bf16* x, int64_t x_stride, const bf16* weight, int64_t in_size, int64_t num_rows, int64_t num_panels)
        : x_(x), x_stride_(x_stride), weight_((const char*)weight), in_size_(in_size), num_rows_(num_rows) {
        constexpr int64_t kOneBlock = 1024, kManyPanels = 64, kManyInputs = 2048, kMostUncopied = 128;
        block_ = in_size <= kOneBlock ? kOneBlock : num_rows > kMostUncopied ? kBlockInputs / 2 : kBlockInputs;
        if (num_rows > kMostUncopied && (in_size >= kManyInputs || num_panels >= kManyPanels))
            copied_ = memory(passes() * steps() * kStepNumbers);
    }

    int64_t num_blocks() const { return divide_up(in_size_, block_); }

    // All threads together copy the rows.
    void prepare() const {
        if (!copied_) return;
#pragma omp for schedule(static)
        for (int64_t pass = 0; pass < passes(); pass++)
            for (int64_t row = pass * kPassRows; row < (pass + 1) * kPassRows && row < num_rows_; row++)
                for (int64_t k = 0; k < in_size_; k += kTileInputs) {
                    int64_t count = in_size_ - k < kTileInputs ? in_size_ - k : kTileInputs;
                    memcpy(copied_at(pass, k) + row % kPassRows * kTileInputs, x_ + row * x_stride_ + k, count * 2);
                }
    }

    // Calls use(first_row, rows, panel, sums) for rows whose sums are whole.
    template <class Use>
    void add_block(TileShapes& shapes, int64_t first_row, int rows, int64_t panel, int64_t block, float* sums,
                   const Use& use) const {
        int64_t first = block * block_, bytes = divide_up(in_size_, 2) * kPairBytes;
        int64_t end = first + block_ < in_size_ ? first + block_ : in_size_;
        auto rows_at = [&](int64_t row, int64_t k) -> TileRows {
            if (copied_) return {copied_at((first_row + row) / kPassRows, k), kTileInputs, kStepNumbers};
            return {x_ + (first_row + row) * x_stride_ + k, x_stride_, kTileInputs};
        };
        auto passed = [&](int row, int own) {
            if (end < in_size_) return;
            settle_memory();
            use(first_row + row, own, panel, sums + row * 2 * kTileRows);
        };
        multiply_tile_block(shapes, rows_at, rows, weight_ + panel * bytes, bytes, first, end, sums, passed);
    }

private:
    static constexpr int64_t kStepNumbers = kPassRows * kTileInputs;

    int64_t passes() const { return divide_up(num_rows_, kPassRows); }
    int64_t steps() const { return divide_up(in_size_, kTileInputs); }

    bf16* copied_at(int64_t pass, int64_t k) const {
        int64_t step = k / kTileInputs, block_steps = block_ / kTileInputs, before = step / block_steps * block_steps;
        int64_t own_steps = steps() - before < block_steps ? steps() - before : block_steps;
        return copied_ + (before * passes() + pass * own_steps + step - before) * kStepNumbers;
    }

    // Memory for copied rows, which the thread that starts the product keeps for its next one.
    static bf16* memory(int64_t count) {
        struct alignas(64) Line {
            bf16 at[kTileInputs];
        };
        static thread_local std::unique_ptr<Line[]> kept;
        static thread_local int64_t size = 0;
        if (count > size) kept.reset(new Line[(size = count) / kTileInputs]);
        return (bf16*)kept.get();
    }

    const bf16* x_;
    int64_t x_stride_;
    const char* weight_;
    int64_t in_size_, num_rows_, block_;
    bf16* copied_ = nullptr;
};

// A thread's sums of many rows: [panel][row][32].
struct ManySums {
    alignas(64) float at[kPanelsOfMany * kRowsOfMany * 2 * kTileRows];

    static float* of_thread() {
        static thread_local std::unique_ptr<ManySums> kept;
        if (!kept) kept.reset(new ManySums);
        return kept->at;
    }
};

// Calls use(first_row, rows, panel, sums) for every tile of the product, over all threads.
template <class Product, class Use>
void for_many_rows(const Product& product, int64_t num_rows, int64_t num_panels, const Use& use) {
    const int64_t passes = divide_up(num_rows, kPassRows), tiles = divide_up(num_rows, kRowsOfMany);
    const int64_t threads = omp_get_max_threads(), least = divide_up(num_panels, kPanelsOfMany);
    int64_t groups = divide_up(least > 3 * threads ? least : 3 * threads, threads) * threads;
    if (groups > num_panels) groups = num_panels;
#pragma omp parallel
    {
        typename Product::Shapes shapes;
        float* sums = ManySums::of_thread();
        product.prepare();
#pragma omp for schedule(dynamic, 1)
        for (int64_t group = 0; group < groups; group++) {
            int64_t begin = num_panels * group / groups, end = num_panels * (group + 1) / groups;
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t first = passes * tile / tiles * kPassRows, last = passes * (tile + 1) / tiles * kPassRows;
                int rows = (int)((last < num_rows ? last : num_rows) - first);
                int64_t size = rows * 2 * kTileRows;
                for (int64_t block = 0; block < product.num_blocks(); block++)
                    for (int64_t panel = begin; panel < end; panel++)
                        product.add_block(shapes, first, rows, panel, block, sums + (panel - begin) * size, use);
            }
        }
    }
}
#endif
