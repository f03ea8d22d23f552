/* The tiles of attend_hopper.cu: their shapes, and what each is compiled to. */
#ifndef CPA_CUDA_HOPPER_TILES_CUH
#define CPA_CUDA_HOPPER_TILES_CUH

#include <cstdint>

namespace {

constexpr int STAGES = 2, WARPGROUP = 128;
constexpr int GROUP_ROWS = 64;       /* of a consuming warpgroup: those of wgmma */
constexpr int COLUMNS = 64;          /* of a swizzled tile: 128 bytes; those left over, 16 or 32, are one of their own */
constexpr int TILE_ALIGNMENT = 1024; /* of swizzled tiles */
constexpr int MOST_TILE_BYTES = 224 * 1024; /* of the 227 KiB of a CTA: the rest is for alignment, barriers, a piece */

/* Tiles for heads of at most so many columns of keys and values (the rest is zeros): keys, and warpgroups of 64 rows.
 * The narrowest heads take as long for exponentials as for products: of three, some do these while some do those.
 *
 * Q K^T takes its first steps of 16 columns with queries from registers. From shared memory a product of 64 rows by 64
 * keys reads as much of queries as of keys, 128 bytes a cycle: all that it gives, with none left for what is loaded.
 * There are not registers for all, and narrow heads gain nothing. `scaled_steps`, `ruled_steps`: where keys have
 * scales, or scores rules.
 *
 * Heads of 72 and of 80 columns, those of many encoders of images, have tiles of 80 where they come in whole boxes and
 * without scales and rules. For values of 72 columns there are registers for three warpgroups. Other kernels for such
 * heads have two, and take smaller pieces, so that one is for tensors without pages alone (`flat`). */
struct tile_shape {
    int k_dim, v_dim, keys, consumers, steps, scaled_steps, ruled_steps, flat;
};
constexpr tile_shape TILES[] = {{64, 64, 128, 3, 0, 0, 0, 0},
                                {80, 72, 128, 3, 0, 0, 0, 1},
                                {80, 80, 128, 2, 5, 0, 0, 0},
                                {96, 96, 128, 2, 6, 0, 0, 0},
                                {128, 128, 128, 2, 8, 4, 8, 0},
                                {192, 128, 128, 2, 8, 0, 0, 0},
                                {256, 256, 64, 2, 4, 0, 0, 0}};

/* The columns of the shape's tiles that do not fill one of COLUMNS. */
constexpr int tail_of(int shape) {
    return TILES[shape].k_dim % COLUMNS;
}

enum { NARROW, FLAT_72, TAILED_80, TAILED_96, SQUARE, WIDE_KEYS, WIDE }; /* of TILES */

/* The first that fits; `boxes`: it may have a tail; `ruled`: there is none of its own for wide keys. All that fit have
 * the same keys and rows, but for that of tensors without pages, and those of 64 and of 256 columns, which have no
 * tail. */
int shape_of(int32_t k_dim, int32_t v_dim, bool boxes, bool ruled, bool flat) {
    int shape = 0;
    while (k_dim > TILES[shape].k_dim || v_dim > TILES[shape].v_dim || (!boxes && tail_of(shape)) ||
           (!flat && TILES[shape].flat))
        shape++;
    return ruled && shape == WIDE_KEYS ? WIDE : shape;
}

/* How keys and values come: in boxes of tokens of a block; in such boxes, where keys are codes that have a scale each,
 * with which their scores are multiplied; or every row by itself. A warp each issues boxes, lane by lane, but does not
 * keep up with the products where they are of few rows: a pair each issues those, and rows. */
enum key_loads { BOXES, BOXES_AND_SCALES, EACH_ROW };
constexpr int LOADING_PAIR = 2, FEW_ROWS = 16;

/* Keys of its tiles: three warpgroups have not the registers for rules on all of them. */
constexpr int keys_of(int shape, bool ruled) {
    return ruled && TILES[shape].consumers == 3 ? TILES[shape].keys / 2 : TILES[shape].keys;
}

/* What a shape of tiles is compiled to. Ruled: scores have rules (score.cuh). */
template <typename Element, int Shape, key_loads Loads, bool Ruled>
struct config {
    using element = Element;
    static constexpr bool SCALED = Loads == BOXES_AND_SCALES, ROWS = Loads == EACH_ROW, RULED = Ruled;
    static constexpr int K_DIM = TILES[Shape].k_dim, V_DIM = TILES[Shape].v_dim, KEYS = keys_of(Shape, Ruled);
    static constexpr int CONSUMERS = TILES[Shape].consumers, THREADS = (1 + CONSUMERS) * WARPGROUP;
    /* Together no more than a CTA is launched with. Rows that are copied one by one take more, along a walk through what
     * bits show yet more. */
    static constexpr bool THREE = CONSUMERS == 3, MORE = ROWS && RULED;
    static constexpr int LOADER_REGISTERS = THREE ? (MORE ? 56 : 32) : Loads != BOXES ? 40 : 24,
                         CONSUMER_REGISTERS = THREE ? (MORE ? 152 : 160) : Loads != BOXES ? 232 : 240;
    static constexpr int LOADERS = ROWS ? LOADING_PAIR : 1; /* warps that say when a stage is full */
    static constexpr int REGISTER_STEPS = SCALED ? TILES[Shape].scaled_steps : TILES[Shape].steps;
    static constexpr int MOST_RULED_STEPS = SCALED ? TILES[Shape].scaled_steps : TILES[Shape].ruled_steps;
    static constexpr int RULED_STEPS[] = {0, MOST_RULED_STEPS, MOST_RULED_STEPS / 2, MOST_RULED_STEPS, ROWS ? 0 : MOST_RULED_STEPS / 2};
    static constexpr bool TURNS = CONSUMERS == 2 && K_DIM < 256; /* three, and long products, overlap without */
    /* Values whose columns no tail holds have a second tile for them, most of it zeros: one product makes them all. */
    static constexpr int TAIL = tail_of(Shape), K_WHOLE = K_DIM - TAIL;
    static constexpr int V_COLUMNS = V_DIM % 16 == 0 ? V_DIM : (V_DIM + COLUMNS - 1) / COLUMNS * COLUMNS;
    static constexpr int V_TAIL = V_COLUMNS % COLUMNS, V_WHOLE = V_COLUMNS - V_TAIL, V_FIRST = V_DIM - V_TAIL;
    static_assert(V_TAIL == TAIL || V_TAIL == 0, "one width of tails");
    static constexpr int PART = V_FIRST < 128 ? V_FIRST : 128, PARTS = V_FIRST / PART; /* columns of O a wgmma */
    /* Who of a warpgroup give a stage of keys back: the products are read by whole warps, the scales by each lane for
     * itself. */
    static constexpr int KEY_READERS = SCALED ? WARPGROUP : WARPGROUP / 32;
    static constexpr int Q_BYTES = GROUP_ROWS * K_DIM * 2; /* bytes of the queries of a warpgroup */
    static constexpr int K_BYTES = KEYS * K_DIM * 2, V_BYTES = KEYS * V_COLUMNS * 2;
    static constexpr int K_AT = CONSUMERS * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES;
    /* A stage of values is given back late, behind the softmax that runs under their product: what is left until they
     * are due again is enough for boxes, but not for rows. */
    static constexpr int V_STAGES =
        ROWS && !RULED && V_AT + 2 * STAGES * V_BYTES <= MOST_TILE_BYTES ? 2 * STAGES : STAGES;
    static constexpr int SCALES_AT = V_AT + V_STAGES * V_BYTES, SCALE_BYTES = SCALED ? KEYS * 4 : 0;
    static constexpr int SHARED_BYTES = SCALES_AT + STAGES * SCALE_BYTES + TILE_ALIGNMENT;
};

} // namespace

#endif
