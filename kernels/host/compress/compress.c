/* compress_state_write, compress_halo_pack and compress_write: rows of a compressor's state, and entries from windows
 * of them. */
#include "kernels/host/compress/entry_row.h"
#include "kernels/host/indexer/index_row.h"
#include "kernels/host/nn/nn.h"

/* ---- compress_state_write ---- */

static void write_state(void *ctx, int64_t token, int32_t thread) {
    const cpa_compress_state_write_args *a = ctx;
    const int64_t width = cpa_compress_width(&a->state);
    (void)thread;
    if (a->slots[token] < 0) return;
    float *row = a->state.rows + a->slots[token] * 2 * width;
    const float *score = a->score + token * a->score_stride;
    const int64_t line = ((a->positions[token] % a->state.ratio) + a->state.ratio) % a->state.ratio;
    const float *ape = a->ape + line * width;
    memcpy(row, a->kv + token * a->kv_stride, (size_t)width * sizeof *row);
    for (int64_t i = 0; i < width; i++) row[width + i] = score[i] + ape[i];
}

cpa_status cpa_host_compress_state_write(const cpa_compress_state_write_args *args, cpa_stream *stream) {
    cpa_compress_state_write_args copy = *args;
    CPA_TRY(cpa_entry_check_slots("compress_state_write", args->slots, args->tokens,
                                  args->state.num_blocks * args->state.block_size, &stream->error));
    cpa_host_run(stream, args->tokens, write_state, &copy);
    return CPA_OK;
}

/* ---- compress_halo_pack ---- */

static void pack_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_compress_halo_pack_args *a = ctx;
    const cpa_compress_state *s = &a->state;
    const int64_t slot = a->slots[row], width = cpa_compress_width(s);
    float *out = a->out + row * 2 * s->head;
    (void)thread;
    if (slot < 0 || slot >= s->num_blocks * s->block_size) {
        for (int32_t i = 0; i < 2 * s->head; i++) out[i] = NAN;
        return;
    }
    for (int part = 0; part < 2; part++)
        memcpy(out + part * s->head, s->rows + (2 * slot + part) * width, (size_t)s->head * sizeof *out);
}

cpa_status cpa_host_compress_halo_pack(const cpa_compress_halo_pack_args *args, cpa_stream *stream) {
    cpa_compress_halo_pack_args copy = *args;
    cpa_host_run(stream, args->halos * args->state.ratio, pack_row, &copy);
    return CPA_OK;
}

/* ---- compress_write ---- */

typedef struct compress_job {
    const cpa_compress_write_args *args;
    cpa_row_writer writer;
} compress_job;

static int makes_entry(const cpa_compress_write_args *a, int64_t token) {
    return a->slots[token] >= 0 && cpa_compress_ends(&a->state, a->positions[token]);
}

static void sum_parts(float (*parts)[CPA_ENTRY_DIM], int32_t head, float *sum) {
    for (int32_t i = 0; i < head; i++) sum[i] = (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
}

/* out [head] = what a window's softmax leaves of each channel. */
static void pool_window(const cpa_compress_write_args *a, int64_t token, float *out) {
    const int32_t head = a->state.head, n = cpa_window_rows(&a->state);
    cpa_window_row rows[2 * CPA_COMPRESS_MOST_RATIO];
    float most[CPA_ENTRY_DIM], parts[CPA_WINDOW_PARTS][CPA_ENTRY_DIM] = {{0}}, total[CPA_ENTRY_DIM];
    for (int32_t w = 0; w < n; w++) rows[w] = cpa_window_row_of(a, token, w);
    for (int32_t i = 0; i < head; i++) most[i] = -INFINITY;
    for (int32_t w = 0; w < n; w++) {
        const float *score = rows[w].keys ? rows[w].keys + rows[w].scores : NULL;
        for (int32_t i = 0; score && i < head; i++) most[i] = score[i] > most[i] ? score[i] : most[i];
    }
    for (int32_t w = 0; w < n; w++) {
        const float *score = rows[w].keys ? rows[w].keys + rows[w].scores : NULL;
        float *sum = parts[w % CPA_WINDOW_PARTS];
        for (int32_t i = 0; score && i < head; i++) sum[i] += cpa_compress_exp(score[i] - most[i]);
    }
    sum_parts(parts, head, total);
    memset(parts, 0, sizeof parts);
    for (int32_t w = 0; w < n; w++) {
        const float *keys = rows[w].keys;
        float *sum = parts[w % CPA_WINDOW_PARTS];
        for (int32_t i = 0; keys && i < head; i++) {
            const float weight = cpa_compress_exp(keys[rows[w].scores + i] - most[i]) / total[i];
            sum[i] += weight * keys[i];
        }
    }
    sum_parts(parts, head, out);
}

/* The row, rounded to bf16, as MXFP4. */
static void put_mxfp4(const cpa_compress_write_args *a, int64_t slot, const float *x) {
    const int32_t head = a->state.head;
    uint16_t row[CPA_ENTRY_DIM];
    float rounded[CPA_ENTRY_DIM];
    cpa_narrow(row, x, CPA_BF16, head);
    cpa_widen(rounded, row, CPA_BF16, head);
    cpa_index_mxfp4(a->mxfp4 + slot * (head / 2), a->mxfp4_scales + slot * (head / CPA_INDEX_MXFP4_BLOCK), rounded,
                    head);
}

static void write_entry(void *ctx, int64_t token, int32_t thread) {
    const compress_job *job = ctx;
    const cpa_compress_write_args *a = job->args;
    const int32_t head = a->state.head;
    float x[CPA_ENTRY_DIM];
    (void)thread;
    if (!makes_entry(a, token)) return;
    pool_window(a, token, x);
    const float norm = cpa_entry_norm(cpa_entry_squares(x, head), head, a->eps);
    for (int32_t i = 0; i < head; i++) x[i] = x[i] * norm * a->weight[i];
    cpa_entry_turn(x, head, &a->rope, a->positions[token] + 1 - a->state.ratio, 1);
    if (a->mxfp4)
        put_mxfp4(a, a->slots[token], x);
    else
        cpa_entry_put(&job->writer, a->slots[token], x);
}

/* Of tokens that end an entry. */
static cpa_status check_entries(const cpa_compress_write_args *a, cpa_error *err) {
    const int64_t end = a->mxfp4 ? a->mxfp4_rows : a->kv.num_blocks * a->kv.block_size;
    for (int64_t token = 0; token < a->tokens; token++) {
        if (makes_entry(a, token) && a->slots[token] >= end)
            return cpa_fail(err, CPA_INVALID, "compress_write: slots[%lld] is %lld, expected at most %lld",
                            (long long)token, (long long)a->slots[token], (long long)end - 1);
        for (int32_t w = 0; makes_entry(a, token) && w < cpa_window_rows(&a->state); w++) {
            const char *what;
            if (cpa_window_fault(a, token, w, &what) >= 0)
                return cpa_fail(
                    err, CPA_INVALID,
                    "compress_write: the %s of row %d of the window of token %lld, at position %lld, is out "
                    "of range",
                    what, w, (long long)token, (long long)a->positions[token]);
        }
    }
    return CPA_OK;
}

cpa_status cpa_host_compress_write(const cpa_compress_write_args *args, cpa_stream *stream) {
    compress_job job = {.args = args};
    if (!args->mxfp4) job.writer = cpa_row_writer_of(&args->kv, CPA_BF16);
    CPA_TRY(check_entries(args, &stream->error));
    cpa_host_run(stream, args->tokens, write_entry, &job);
    return CPA_OK;
}
