/* q_norm_rope_kv_write and inverse_rope_quant: heads of queries and results of entries. */
#include "kernels/host/compress/entry_row.h"
#include "kernels/host/nn/nn.h"

/* ---- q_norm_rope_kv_write ---- */

typedef struct q_job {
    const cpa_q_norm_rope_kv_write_args *args;
    cpa_row_writer writer;
} q_job;

static void norm_head(const cpa_q_norm_rope_kv_write_args *a, int64_t token, const char *src, char *dst) {
    float x[CPA_ENTRY_DIM];
    cpa_widen(x, src, a->dtype, CPA_ENTRY_DIM);
    const float norm = cpa_entry_norm(cpa_entry_squares(x, CPA_ENTRY_DIM), CPA_ENTRY_DIM, a->eps);
    for (int32_t i = 0; i < CPA_ENTRY_DIM; i++) x[i] *= norm;
    cpa_entry_turn(x, CPA_ENTRY_DIM, &a->rope, a->positions[token], 1);
    cpa_narrow(dst, x, a->dtype, CPA_ENTRY_DIM);
}

static void write_token(void *ctx, int64_t token, int32_t thread) {
    const q_job *job = ctx;
    const cpa_q_norm_rope_kv_write_args *a = job->args;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), head_bytes = CPA_ENTRY_DIM * bytes;
    const char *q = (const char *)a->q + token * a->q_stride * bytes;
    char *out = (char *)a->q_out + token * a->q_out_stride * bytes;
    float x[CPA_ENTRY_DIM], row[CPA_ENTRY_DIM]; /* the second in dtype */
    (void)thread;
    for (int32_t h = 0; h < a->heads; h++) norm_head(a, token, q + h * head_bytes, out + h * head_bytes);
    memset(out + a->heads * head_bytes, 0, (size_t)((a->out_heads - a->heads) * head_bytes));
    if (a->slots[token] < 0) return;
    cpa_widen(x, (const char *)a->kv_rows + token * a->kv_stride * bytes, a->dtype, CPA_ENTRY_DIM);
    cpa_entry_turn(x, CPA_ENTRY_DIM, &a->rope, a->positions[token], 1);
    cpa_narrow(row, x, a->dtype, CPA_ENTRY_DIM);
    cpa_widen(x, row, a->dtype, CPA_ENTRY_DIM);
    cpa_entry_put(&job->writer, a->slots[token], x);
}

cpa_status cpa_host_q_norm_rope_kv_write(const cpa_q_norm_rope_kv_write_args *args, cpa_stream *stream) {
    q_job job = {.args = args, .writer = cpa_row_writer_of(&args->kv, CPA_BF16)};
    CPA_TRY(cpa_entry_check_slots("q_norm_rope_kv_write", args->slots, args->tokens,
                                  args->kv.num_blocks * args->kv.block_size, &stream->error));
    cpa_host_run(stream, args->tokens, write_token, &job);
    return CPA_OK;
}

/* ---- inverse_rope_quant ---- */

enum { TILES = CPA_ENTRY_DIM / CPA_RESULT_TILE };

/* The scales of a head, in its group, of a row; NULL for a row that fills up. */
static void store_scales(const cpa_inverse_rope_quant_args *a, int64_t row, int32_t head, const uint32_t *exponents) {
    const int64_t padded = (a->rows + 3) / 4 * 4;
    if (a->packed) {
        uint32_t word = 0;
        for (int32_t t = 0; exponents && t < TILES; t++) word |= exponents[t] << (8 * t);
        ((uint32_t *)a->scales)[head * padded + row] = word;
        return;
    }
    for (int32_t t = 0; t < TILES; t++)
        ((float *)a->scales)[((int64_t)head * TILES + t) * padded + row] = exponents ? cpa_power_of(exponents[t]) : 0;
}

static void quantise_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_inverse_rope_quant_args *a = ctx;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), of_group = a->heads / a->groups;
    (void)thread;
    for (int32_t head = 0; head < a->heads; head++) {
        float x[CPA_ENTRY_DIM];
        uint32_t exponents[TILES];
        if (row >= a->rows) {
            store_scales(a, row, head, NULL);
            continue;
        }
        const char *o = (const char *)a->o + (row * a->o_stride + head * CPA_ENTRY_DIM) * bytes;
        const int64_t group = head / of_group, at = (group * a->rows + row) * of_group + head % of_group;
        uint8_t *codes = (uint8_t *)a->codes + at * CPA_ENTRY_DIM;
        cpa_widen(x, o, a->dtype, CPA_ENTRY_DIM);
        cpa_entry_turn(x, CPA_ENTRY_DIM, &a->rope, a->positions[row], -1);
        for (int32_t t = 0; t < TILES; t++) {
            const float *tile = x + t * CPA_RESULT_TILE;
            exponents[t] = cpa_power_exponent(cpa_largest_of(tile, CPA_RESULT_TILE), CPA_RESULT_FLOOR);
            const float scale = cpa_power_of(exponents[t]);
            for (int32_t i = 0; i < CPA_RESULT_TILE; i++) codes[t * CPA_RESULT_TILE + i] = cpa_to_e4m3(tile[i] / scale);
        }
        store_scales(a, row, head, exponents);
    }
}

cpa_status cpa_host_inverse_rope_quant(const cpa_inverse_rope_quant_args *args, cpa_stream *stream) {
    cpa_inverse_rope_quant_args copy = *args;
    cpa_host_run(stream, (args->rows + 3) / 4 * 4, quantise_row, &copy);
    return CPA_OK;
}
