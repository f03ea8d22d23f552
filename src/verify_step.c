/* Checks the samples of one step against float64. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/reference.h"
#include "src/verify_diagnose.h"
#include "src/verify_gather.h"

/* The state of one cpa_verify_step on the rank that checks. */
typedef struct check {
    cpa_verify *verify;
    const cpa_step_plan *plan;
    cpa_verify_group *groups;
    int64_t n_groups;
    cpa_reference_row *rows; /* of the group that is being checked */
    int64_t cap_rows;
    /* What the source gave for the tokens of a piece: CPA_PART_TOKENS of each. */
    uint32_t *tokens;
    int64_t *positions;
    char *k_recalled, *v_recalled;
    int64_t wrong_sample; /* the first row that is wrong, an index of verify->samples; -1: none */
    cpa_status verdict;   /* CPA_CHECK_FAILED once a violation was found here */
    cpa_error violation;  /* and what it was */
} check;

static const cpa_verify_sample *sample_of(const check *c, const cpa_verify_group *g, int64_t i) {
    return &c->verify->samples[g->first + i];
}

static const cpa_plan_chunk *chunk_of(const check *c, const cpa_verify_group *g) {
    return &c->plan->chunks[sample_of(c, g, 0)->chunk];
}

/* Orders samples by chunk, layer, head (heads that share keys are neighbours), position. */
static int compare_samples(const void *a, const void *b) {
    const cpa_verify_sample *x = a, *y = b;
    if (x->chunk != y->chunk) return x->chunk < y->chunk ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static cpa_status build_groups(check *c, cpa_error *err) {
    cpa_verify *verify = c->verify;
    const cpa_model_shape *model = &verify->worker->options.model;
    int32_t group_heads = model->q_heads / model->kv_heads;
    qsort(verify->samples, (size_t)verify->n_samples, sizeof *verify->samples, compare_samples);
    c->groups = malloc((size_t)verify->n_samples * sizeof *c->groups);
    if (!c->groups)
        return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld groups", (long long)verify->n_samples);
    for (int64_t i = 0; i < verify->n_samples; i++) {
        const cpa_verify_sample *s = &verify->samples[i], *before = i > 0 ? s - 1 : NULL;
        if (!before || before->chunk != s->chunk || before->layer != s->layer ||
            before->head / group_heads != s->head / group_heads) {
            c->groups[c->n_groups] = (cpa_verify_group){.first = i,
                                                        .last_position = -1,
                                                        .kv_head = s->head / group_heads,
                                                        .checker = (int32_t)(c->n_groups % verify->control->size)};
            c->n_groups++;
        }
        cpa_verify_group *g = &c->groups[c->n_groups - 1];
        g->count++;
        if (s->position > g->last_position) g->last_position = s->position;
    }
    return CPA_OK;
}

/* Begins the reference rows of a group from the queries that their owners sent. */
static cpa_status begin_rows(check *c, const cpa_verify_group *g, const cpa_verify_piece *pieces, cpa_error *err) {
    const cpa_worker_options *o = &c->verify->worker->options;
    if (g->count > c->cap_rows) {
        cpa_reference_row *rows = realloc(c->rows, (size_t)g->count * sizeof *rows);
        if (!rows) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld rows", (long long)g->count);
        c->rows = rows;
        c->cap_rows = g->count;
    }
    for (int32_t r = 0; r < o->map.cp_size; r++) {
        const char *data = pieces[r].samples;
        for (int64_t i = 0; i < g->count; i++) {
            if (cpa_owner_rank(o->map, chunk_of(c, g)->phase, sample_of(c, g, i)->position) != r) continue;
            cpa_verify_begin_row(c->verify, &c->rows[i], data);
            data += c->verify->sample_bytes;
        }
    }
    return CPA_OK;
}

/* Asks the source again for the keys and values of a piece. */
static void recall_piece(check *c, const cpa_verify_group *g, const cpa_verify_piece *piece, int32_t rank) {
    const cpa_worker *worker = c->verify->worker;
    const cpa_worker_seq *seq = &worker->seqs[chunk_of(c, g)->seq];
    int32_t slot = cpa_owner_slot(worker->options.map, rank, chunk_of(c, g)->phase);
    for (int64_t t = 0; t < piece->tokens; t++) {
        c->positions[t] = cpa_shard_pos(worker->options.map, slot, piece->first + t);
        c->tokens[t] = seq->tokens[c->positions[t]];
    }
    if (!worker->source->recall) return;
    worker->source->recall(worker->source->ctx, sample_of(c, g, 0)->layer, g->kv_head, piece->tokens, c->tokens,
                           c->positions, c->k_recalled, c->v_recalled);
}

/* Whether a row of the cache, as it lies there (`raw`) and as floats, is what the source gave in the cache's dtype. */
static int is_fresh(const check *c, const char *raw, const float *have, const char *recalled, int64_t row,
                    float tensor_scale, int32_t dim) {
    const cpa_worker_options *o = &c->verify->worker->options;
    int64_t bytes = dim * cpa_dtype_bytes(o->model.dtype);
    float want[CPA_MAX_HEAD_DIM];
    if (o->model.dtype == o->kv_dtype) return memcmp(raw, recalled + row * bytes, (size_t)bytes) == 0;
    cpa_reference_widen(recalled + row * bytes, o->model.dtype, dim, want);
    return cpa_reference_may_hold(have, want, o->kv_dtype, tensor_scale, dim);
}

static void report_stale(check *c, const cpa_verify_group *g, int32_t rank, int64_t position) {
    c->verify->stats.violations++;
    if (c->verdict != CPA_OK) return;
    c->verdict = cpa_fail(
        &c->violation, CPA_CHECK_FAILED,
        "check failed: request %llu, token %lld, layer %d, KV head %d: the cache of rank %d does not hold "
        "the key and value that were computed for this token: a stale block",
        (unsigned long long)chunk_of(c, g)->request, (long long)position, sample_of(c, g, 0)->layer, g->kv_head, rank);
}

/* Adds one rank's keys and values of a part to the rows of the group. */
static void add_keys(check *c, const cpa_verify_group *g, const cpa_verify_piece *piece, int32_t rank) {
    const cpa_worker_options *o = &c->verify->worker->options;
    const cpa_model_shape *m = &o->model;
    const cpa_mask mask = cpa_model_mask(m, sample_of(c, g, 0)->layer);
    recall_piece(c, g, piece, rank);
    int compare = c->verify->worker->source->recall != NULL;
    for (int64_t t = 0; t < piece->tokens; t++) {
        float k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM];
        const char *k_raw = piece->k + t * piece->k_bytes, *v_raw = piece->v + t * piece->v_bytes;
        cpa_reference_read_row(k_raw, o->kv_dtype, o->k_scale, m->head_dim, k);
        cpa_reference_read_row(v_raw, o->kv_dtype, o->v_scale, m->v_head_dim, v);
        if (compare && !(is_fresh(c, k_raw, k, c->k_recalled, t, o->k_scale, m->head_dim) &&
                         is_fresh(c, v_raw, v, c->v_recalled, t, o->v_scale, m->v_head_dim))) {
            report_stale(c, g, rank, c->positions[t]);
            compare = 0; /* one report a piece is enough */
        }
        for (int64_t i = 0; i < g->count; i++) {
            if (cpa_reference_sees(mask, sample_of(c, g, i)->position, c->positions[t])) {
                cpa_reference_add(&c->rows[i], k, v);
            }
        }
    }
}

static void report_row(check *c, const cpa_verify_group *g, int64_t i, double error, double tolerance) {
    const cpa_verify_sample *sample = sample_of(c, g, i);
    c->verify->stats.violations++;
    if (c->verdict != CPA_OK) return;
    c->wrong_sample = g->first + i;
    c->verdict = cpa_fail(
        &c->violation, CPA_CHECK_FAILED,
        "check failed: request %llu, token %lld, layer %d, head %d, %s: |result - float64 reference| = %.3g, "
        "allowed %.3g",
        (unsigned long long)chunk_of(c, g)->request, (long long)sample->position, sample->layer, sample->head,
        c->verify->control->size == 1 ? "local" : cpa_algorithm_name(chunk_of(c, g)->algorithm), error, tolerance);
}

static void end_rows(check *c, const cpa_verify_group *g) {
    for (int64_t i = 0; i < g->count; i++) {
        double want[CPA_MAX_HEAD_DIM], lse, tolerance;
        cpa_reference_end(&c->rows[i], want, &lse, &tolerance);
        double error = cpa_reference_error(c->rows[i].got, want, c->rows[i].v_dim);
        c->verify->stats.rows++;
        c->verify->stats.max_error = fmax(c->verify->stats.max_error, error);
        if (!(error <= tolerance)) report_row(c, g, i, error, tolerance);
    }
}

static cpa_status check_part(void *ctx, const cpa_verify_group *group, int64_t part, int last,
                             const cpa_verify_piece *pieces, cpa_error *err) {
    check *c = ctx;
    if (part == 0) CPA_TRY(begin_rows(c, group, pieces, err));
    for (int32_t r = 0; r < c->verify->control->size; r++) add_keys(c, group, &pieces[r], r);
    if (last) end_rows(c, group);
    return CPA_OK;
}

static cpa_status check_groups(check *c, cpa_error *err) {
    const cpa_model_shape *model = &c->verify->worker->options.model;
    int64_t row = CPA_PART_TOKENS * cpa_dtype_bytes(model->dtype);
    c->tokens = malloc(CPA_PART_TOKENS * sizeof *c->tokens);
    c->positions = malloc(CPA_PART_TOKENS * sizeof *c->positions);
    c->k_recalled = malloc((size_t)(row * model->head_dim));
    c->v_recalled = malloc((size_t)(row * model->v_head_dim));
    if (!c->tokens || !c->positions || !c->k_recalled || !c->v_recalled) {
        return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory");
    }
    CPA_TRY(build_groups(c, err));
    return cpa_verify_gather(c->verify, c->plan, c->groups, c->n_groups, check_part, c, err);
}

cpa_status cpa_verify_step(cpa_verify *verify, const cpa_step_plan *plan, cpa_error *err) {
    if (verify->n_samples == 0) return CPA_OK;
    check c = {.verify = verify, .plan = plan, .wrong_sample = -1};
    cpa_status status = check_groups(&c, err);
    if (status == CPA_OK) {
        cpa_error verdict = c.violation;
        status = cpa_control_agree(verify->control, c.verdict, &verdict);
        if (status == CPA_CHECK_FAILED) status = cpa_verify_diagnose(verify, plan, c.wrong_sample, &verdict);
        if (status != CPA_OK && err) *err = verdict;
    }
    free(c.v_recalled);
    free(c.k_recalled);
    free(c.positions);
    free(c.tokens);
    free(c.rows);
    free(c.groups);
    verify->n_samples = 0;
    return status;
}
