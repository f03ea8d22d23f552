/* The inner loops of linear for few rows in GCC vector code; included behind what linear_vector.h includes. There a row
 * is a lane, and with few rows most lanes would multiply for nothing. Here an output is a lane: squares of weights are
 * transposed in registers, which takes less time than memory does to deliver them. Each output of a row is the same sum
 * in the same order as in a tile, and so has the same bits. */
enum {
    FEW_GROUPS = 2, /* vectors of outputs at a time */
    FEW_AHEAD = 512 /* bytes of a row of weights that are fetched ahead; at its end, of a row of the next outputs */
};

typedef uint32_t uvec __attribute__((vector_size(ISA_LANES * 4)));

/* Elements of a row of a square: a word of 32 bits has two of bf16, which are floats after a shift or a mask. */
INLINE int64_t square_width(cpa_dtype dtype) {
    return dtype == CPA_BF16 ? 2 * ISA_CELL : ISA_CELL;
}

/* acc[r] += x[r][d] * weights, for rows [0, rows). */
INLINE void add_products(int rows, vec *acc, const float *const *x, int64_t d, vec weights) {
    for (int r = 0; r < rows; r++) acc[r] = isa_fma(broadcast(x[r][d]), weights, acc[r]);
}

/* The products with a square: square_width elements of the weights of each lane's output, from `at` on, and of x from d
 * on. `ahead` bytes from the start of the rows lies what is wanted soon. */
INLINE void multiply_square(int rows, vec *acc, const float *const *x, int64_t d, const char *const *weights,
                            cpa_dtype dtype, int64_t at, int64_t ahead) {
    float square[ISA_CELL * ISA_LANES];
    for (int j = 0; j < ISA_LANES; j++) __builtin_prefetch(weights[j] + ahead);
    if (dtype == CPA_BF16) {
        isa_transpose(square, ISA_LANES, weights, CPA_F32, (int32_t)(at / 2));
    } else {
        isa_transpose(square, ISA_LANES, weights, dtype, (int32_t)at);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ISA_CELL; i++) {
        const vec word = load(square + i * ISA_LANES);
        if (dtype == CPA_BF16) {
            add_products(rows, acc, x, d + 2 * i, (vec)((uvec)word << 16));
            add_products(rows, acc, x, d + 2 * i + 1, (vec)((uvec)word & 0xffff0000));
        } else {
            add_products(rows, acc, x, d + i, word);
        }
    }
}

/* The products with element d of x and element `at` of the weights. */
INLINE void multiply_column(int rows, vec *acc, const float *const *x, int64_t d, const char *const *weights,
                            cpa_dtype dtype, int64_t at) {
    float column[ISA_LANES];
    for (int j = 0; j < ISA_LANES; j++) cpa_widen(&column[j], weights[j] + at * cpa_dtype_bytes(dtype), dtype, 1);
    add_products(rows, acc, x, d, load(column));
}

/* sums += the products with the n elements of a block that begins at element `first` of the tile's weights. The groups
 * take turns, as the additions of one wait for each other. */
INLINE void multiply_few_block(int rows, vec (*sums)[CPA_LINEAR_FEW_ROWS], const float *const *x,
                               const char *const (*weights)[ISA_LANES], const cpa_linear_tile *tile, cpa_dtype dtype,
                               int64_t first, int64_t n) {
    const int64_t bytes = cpa_dtype_bytes(dtype), row_bytes = tile->inputs * bytes;
    const int64_t next_outputs = FEW_GROUPS * ISA_LANES * tile->weight_stride;
    const int64_t step = square_width(dtype), whole = n - n % step;
    vec acc[FEW_GROUPS][CPA_LINEAR_FEW_ROWS];
#pragma GCC unroll 2
    for (int g = 0; g < FEW_GROUPS; g++) {
        for (int r = 0; r < rows; r++) acc[g][r] = (vec){0};
    }
    for (int64_t d = 0; d < whole; d += step) {
        int64_t ahead = (first + d) * bytes + FEW_AHEAD;
        if (ahead >= row_bytes) ahead += next_outputs - row_bytes;
#pragma GCC unroll 2
        for (int g = 0; g < FEW_GROUPS; g++) multiply_square(rows, acc[g], x, d, weights[g], dtype, first + d, ahead);
    }
    for (int64_t d = whole; d < n; d++) {
#pragma GCC unroll 2
        for (int g = 0; g < FEW_GROUPS; g++) multiply_column(rows, acc[g], x, d, weights[g], dtype, first + d);
    }
#pragma GCC unroll 2
    for (int g = 0; g < FEW_GROUPS; g++) {
        for (int r = 0; r < rows; r++) sums[g][r] += acc[g][r];
    }
}

/* A block of x of rows [0, rows) as floats: x[r], in wide[r] where it is of another dtype. */
INLINE void widen_few(int rows, const float **x, float (*wide)[BLOCK], const cpa_linear_tile *tile, cpa_dtype dtype,
                      int64_t first, int64_t n) {
    for (int r = 0; r < rows; r++) {
        const char *row = tile->x[r] + first * cpa_dtype_bytes(dtype);
        x[r] = (const float *)(const void *)row;
        if (dtype == CPA_F32) continue;
        widen_row(wide[r], row, dtype, n);
        x[r] = wide[r];
    }
}

/* sums[o][row] of outputs [o, o + FEW_GROUPS * ISA_LANES), as far as there are, and of rows [0, rows). Weights that are
 * codes become floats a block at a time. */
INLINE void multiply_outputs(int rows, const cpa_linear_tile *tile, int64_t o, cpa_dtype dtype, int codes) {
    const char *weights[FEW_GROUPS][ISA_LANES];
    float wide[CPA_LINEAR_FEW_ROWS][BLOCK], decoded[FEW_GROUPS * ISA_LANES][BLOCK];
    const float *x[CPA_LINEAR_FEW_ROWS];
    vec sums[FEW_GROUPS][CPA_LINEAR_FEW_ROWS] = {{{0}}};
    for (int j = 0; j < FEW_GROUPS * ISA_LANES; j++) { /* where there are no more outputs, the last one again */
        const int64_t output = o + j < tile->outputs ? o + j : tile->outputs - 1;
        const char *row = tile->weight + output * tile->weight_stride;
        weights[j / ISA_LANES][j % ISA_LANES] = codes ? (const char *)decoded[output - o] : row;
    }
    for (int64_t first = 0; first < tile->inputs; first += BLOCK) {
        const int64_t n = tile->inputs - first < BLOCK ? tile->inputs - first : BLOCK;
        widen_few(rows, x, wide, tile, dtype, first, n);
        for (int j = 0; codes && j < FEW_GROUPS * ISA_LANES && o + j < tile->outputs; j++)
            widen_codes(decoded[j], tile, o + j, first, n);
        multiply_few_block(rows, sums, x, (const char *const(*)[ISA_LANES])weights, tile, codes ? CPA_F32 : dtype,
                           codes ? 0 : first, n);
    }
    for (int j = 0; j < FEW_GROUPS * ISA_LANES && o + j < tile->outputs; j++) {
        for (int r = 0; r < rows; r++) tile->sums[(o + j) * ROWS + r] = sums[j / ISA_LANES][r][j % ISA_LANES];
    }
}

INLINE void multiply_rows(int rows, const cpa_linear_tile *tile) {
    for (int64_t o = 0; o < tile->outputs; o += FEW_GROUPS * ISA_LANES) {
        if (tile->scales) {
            multiply_outputs(rows, tile, o, tile->dtype, 1);
            continue;
        }
        switch (tile->dtype) { /* constants within the loops */
            case CPA_BF16: multiply_outputs(rows, tile, o, CPA_BF16, 0); break;
            case CPA_F16: multiply_outputs(rows, tile, o, CPA_F16, 0); break;
            default: multiply_outputs(rows, tile, o, CPA_F32, 0); break;
        }
    }
}

/* A tile of up to CPA_LINEAR_FEW_ROWS rows: some numbers of rows have loops of their own. */
static void multiply_few(const cpa_linear_tile *tile) {
    if (tile->rows == 1) {
        multiply_rows(1, tile);
    } else if (tile->rows == 2) {
        multiply_rows(2, tile);
    } else if (tile->rows <= 4) {
        multiply_rows(4, tile);
    } else {
        multiply_rows(CPA_LINEAR_FEW_ROWS, tile);
    }
}
