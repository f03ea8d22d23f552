/* xattn_stats, xattn_block_sums and xattn_scores: a block of queries of a head is one item, and walks through the blocks
 * of keys in their order. Of a block of keys each key is widened once for all rows. */
#include "kernels/host/xattn/xattn_scores.h"

#include <string.h>

#include "base/convert.h"
#include "kernels/host/nn/nn.h"

enum {
    MOST_GROUPS = CPA_XATTN_MOST_GROUPS,
    MOST_WIDTH = CPA_XATTN_MOST_STRIDE * CPA_XATTN_MOST_DIM,
    MOST_ELEMENTS = CPA_XATTN_MOST_BLOCK * CPA_XATTN_MOST_DIM
};

/* Scores of a block of queries and one of keys: of row i those of the first seen[i] keys. */
typedef struct score_tile {
    int64_t seen[MOST_GROUPS];
    float z[MOST_GROUPS][MOST_GROUPS];
} score_tile;

typedef struct block_row {
    int32_t head;
    int64_t first, place, rows; /* its first group, its block's place in the sequence, and how many groups it has */
    int64_t at, blocks;         /* its first row of statistics; and blocks of keys that it sees */
    float q[MOST_ELEMENTS];
} block_row;

static void begin_row(const cpa_xattn_walk *walk, int64_t item, block_row *row) {
    const cpa_xattn_chunks *c = walk->chunks;
    const int64_t blocks = cpa_xattn_blocks(walk->shape, c->q_tokens), block = item % blocks;
    row->head = (int32_t)(item / blocks);
    row->first = block * walk->of_block;
    row->place = cpa_xattn_place(walk->shape, c->map, c->q_set, c->q_first, block);
    row->rows = cpa_xattn_in_block(walk, walk->q_groups, block);
    row->at = row->head * walk->q_groups + row->first;
    row->blocks = cpa_xattn_blocks_seen(walk->shape, c, row->place);
    cpa_widen(row->q, cpa_xattn_query(walk, row->head, row->first), walk->shape->dtype, row->rows * walk->width);
}

static int64_t block_rows(const cpa_xattn_walk *walk) {
    return walk->shape->q_heads * cpa_xattn_blocks(walk->shape, walk->chunks->q_tokens);
}

static void score_block(const cpa_xattn_walk *walk, const block_row *row, int64_t k_block, score_tile *tile) {
    float k[MOST_WIDTH];
    int64_t most = 0;
    for (int64_t i = 0; i < row->rows; i++) {
        tile->seen[i] = cpa_xattn_seen(walk, row->place, k_block, i);
        most = cpa_max64(most, tile->seen[i]);
    }
    for (int64_t j = 0; j < most; j++) {
        cpa_widen(k, cpa_xattn_key(walk, row->head, k_block * walk->of_block + j), walk->shape->dtype, walk->width);
        for (int64_t i = 0; i < row->rows; i++)
            if (j < tile->seen[i]) tile->z[i][j] = cpa_xattn_score(walk, row->q + i * walk->width, k);
    }
}

/* ---- statistics ---- */

typedef struct stats_job {
    const cpa_xattn_stats_args *args;
    cpa_xattn_walk walk;
} stats_job;

/* Goes on from (max, sum) with (of, by). */
static void fold(float *max, float *sum, float of, float by) {
    const float most = fmaxf(*max, of);
    *sum = most == -INFINITY ? *sum + by : *sum * expf(*max - most) + by * expf(of - most);
    *max = most;
}

static void fold_row(const float *z, int64_t seen, float *max, float *sum) {
    float most = -INFINITY, total = 0;
    for (int64_t j = 0; j < seen; j++) most = fmaxf(most, z[j]);
    for (int64_t j = 0; j < seen; j++) total += most == -INFINITY && z[j] == most ? 0 : expf(z[j] - most);
    if (seen > 0) fold(max, sum, most, total);
}

static void stats_of_row(void *ctx, int64_t item, int32_t thread) {
    const stats_job *job = ctx;
    const cpa_xattn_walk *walk = &job->walk;
    block_row row;
    begin_row(walk, item, &row);
    float *max = job->args->max + row.at, *sum = job->args->sum + row.at;
    score_tile tile;
    (void)thread;
    for (int64_t i = 0; i < row.rows && !job->args->resume; i++) max[i] = -INFINITY, sum[i] = 0;
    for (int64_t block = 0; block < row.blocks; block++) {
        score_block(walk, &row, block, &tile);
        for (int64_t i = 0; i < row.rows; i++) fold_row(tile.z[i], tile.seen[i], &max[i], &sum[i]);
    }
}

cpa_status cpa_host_xattn_stats(const cpa_xattn_stats_args *args, cpa_stream *stream) {
    stats_job job = {args, cpa_xattn_walk_of(&args->shape, &args->chunks)};
    cpa_host_run(stream, block_rows(&job.walk), stats_of_row, &job);
    return CPA_OK;
}

static void merge_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_xattn_merge_stats_args *a = ctx;
    float max = a->part_max[row], sum = a->part_sum[row];
    (void)thread;
    for (int32_t part = 1; part < a->n; part++) {
        const int64_t at = part * a->part_stride + row;
        fold(&max, &sum, a->part_max[at], a->part_sum[at]);
    }
    a->max[row] = max;
    a->sum[row] = sum;
}

cpa_status cpa_host_xattn_merge_stats(const cpa_xattn_merge_stats_args *args, cpa_stream *stream) {
    cpa_xattn_merge_stats_args copy = *args;
    cpa_host_run(stream, args->rows, merge_row, &copy);
    return CPA_OK;
}

/* ---- sums ---- */

typedef struct sums_job {
    const cpa_xattn_block_sums_args *args;
    cpa_xattn_walk walk;
} sums_job;

static void sums_of_row(void *ctx, int64_t item, int32_t thread) {
    const sums_job *job = ctx;
    const cpa_xattn_walk *walk = &job->walk;
    block_row row;
    begin_row(walk, item, &row);
    const float *max = job->args->max + row.at, *sum = job->args->sum + row.at;
    float *out = job->args->sums + item * job->args->row_stride;
    score_tile tile;
    (void)thread;
    for (int64_t block = 0; block < cpa_xattn_blocks(walk->shape, walk->chunks->k_tokens); block++) {
        out[block] = 0;
        if (block >= row.blocks) continue;
        score_block(walk, &row, block, &tile);
        for (int64_t i = 0; i < row.rows; i++) {
            float total = 0;
            if (sum[i] == 0) continue; /* it sees nothing */
            for (int64_t j = 0; j < tile.seen[i]; j++) total += expf(tile.z[i][j] - max[i]);
            out[block] += total / sum[i];
        }
    }
}

cpa_status cpa_host_xattn_block_sums(const cpa_xattn_block_sums_args *args, cpa_stream *stream) {
    sums_job job = {args, cpa_xattn_walk_of(&args->shape, &args->chunks)};
    cpa_host_run(stream, block_rows(&job.walk), sums_of_row, &job);
    return CPA_OK;
}

/* ---- scores ---- */

typedef struct scores_job {
    const cpa_xattn_scores_args *args;
    cpa_xattn_walk walk;
} scores_job;

static void scores_of_row(void *ctx, int64_t item, int32_t thread) {
    const scores_job *job = ctx;
    const cpa_xattn_walk *walk = &job->walk;
    block_row row;
    begin_row(walk, item, &row);
    float *out = job->args->scores + row.at * walk->k_groups;
    score_tile tile;
    (void)thread;
    for (int64_t i = 0; i < row.rows * walk->k_groups; i++) out[i] = -INFINITY;
    for (int64_t block = 0; block < row.blocks; block++) {
        score_block(walk, &row, block, &tile);
        for (int64_t i = 0; i < row.rows; i++)
            if (tile.seen[i] > 0)
                memcpy(out + i * walk->k_groups + block * walk->of_block, tile.z[i],
                       (size_t)tile.seen[i] * sizeof **tile.z);
    }
}

cpa_status cpa_host_xattn_scores(const cpa_xattn_scores_args *args, cpa_stream *stream) {
    scores_job job = {args, cpa_xattn_walk_of(&args->shape, &args->chunks)};
    cpa_host_run(stream, block_rows(&job.walk), scores_of_row, &job);
    return CPA_OK;
}
