#include "src/check/verify_diagnose.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/kv_view.h"
#include "src/check/reference.h"
#include "src/check/verify_dump.h"
#include "src/check/verify_keys.h"
#include "src/check/verify_latents.h"

/* What the row would be under each mistake, gathered while its keys go by. */
typedef struct diagnosis {
    cpa_verify *verify;
    const cpa_verify_sample *sample;
    cpa_owner_map map;
    cpa_placement placement;
    int32_t owner;  /* rank that owns the token of the query */
    int32_t keeper; /* rank that kept the sample */
    cpa_reference_row row;
    cpa_reference_row *shards; /* [size]: each rank's keys alone */
    const cpa_step_plan *plan;
    const cpa_plan_chunk *chunk;
    cpa_reference_row without_self, with_next; /* key < query; key <= query + 1 */
    cpa_reference_row with_branches;           /* key <= query, drafts of other branches too */
    cpa_reference_row without_rules;           /* scores as they are */
    cpa_reference_row without_list;            /* all keys that the mask shows */
    char *list;                                /* list of the row; NULL: the model does not select keys */
    cpa_verify_latents latents;                /* latents that are read wrongly */
    cpa_verify_keys *keys;                     /* scratch */
    cpa_verify_tensor expansion;               /* matrix that the keys of the head are expanded by, if they are */
    double tolerance;
    char finding[160];
    const cpa_verify_wrong_row *wrong;
    int64_t n_keys; /* keys on all ranks */
    cpa_verify_dump dump;
} diagnosis;

/* Begins rows of the query without any key. */
static void begin_rows(const diagnosis *d, cpa_reference_row *rows, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        cpa_reference_begin(&rows[i], d->row.q, d->row.k_dim, d->row.v_dim, d->row.dtype, d->row.scale);
        cpa_reference_set_rules(&rows[i], &d->row.rules);
    }
}

/* Whether this O gives the result. */
static int equals(const diagnosis *d, double o[CPA_MAX_HEAD_DIM]) {
    double tolerance = d->tolerance;
    cpa_verify_matrix_apply(&d->verify->matrix, o, &tolerance);
    return cpa_reference_error(d->row.got, o, cpa_verify_form(d->verify, d->sample)->out_dim) <= tolerance;
}

/* Whether the result is the merge of the shards but `left_out` (-1: none), with the LSE of the own shard and those of
 * the others scaled. */
static int equals_merge(const diagnosis *d, int32_t left_out, double own_scale, double remote_scale) {
    double max = -INFINITY, sum = 0, o[CPA_MAX_HEAD_DIM] = {0};
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t r = 0; r < d->map.cp_size; r++) {
            const cpa_reference_row *s = &d->shards[r];
            if (r == left_out || s->sum == 0) continue;
            double lse = (s->max + log(s->sum)) * (r == d->owner ? own_scale : remote_scale);
            if (pass == 0) {
                max = fmax(max, lse);
                continue;
            }
            double weight = exp(lse - max);
            sum += weight;
            for (int32_t i = 0; i < d->row.v_dim; i++) o[i] += weight * s->o[i] / s->sum;
        }
    }
    if (d->row.rules.has_sink && sum > 0) sum += exp(d->row.rules.sink - max);
    for (int32_t i = 0; i < d->row.v_dim; i++) o[i] = sum > 0 ? o[i] / sum : 0;
    return equals(d, o);
}

static int equals_row(const diagnosis *d, const cpa_reference_row *row) {
    cpa_reference_row ended = *row;
    double o[CPA_MAX_HEAD_DIM], lse, tolerance;
    cpa_reference_end(&ended, o, &lse, &tolerance);
    return equals(d, o);
}

/* Names the first mistake that gives the result. */
static void name_mistake(diagnosis *d, int32_t kv_head) {
    const cpa_model_shape *m = &d->verify->worker->options.model;
    int32_t expected = d->sample->head / (m->attention.q_heads / m->attention.kv_heads);
    const double log2_e = 1.4426950408889634;
    if (d->finding[0]) return;
    if (kv_head != expected) {
        if (equals_merge(d, -1, 1, 1)) {
            snprintf(d->finding, sizeof d->finding, "it reads KV head %d instead of %d", kv_head, expected);
        }
        return;
    }
    if (equals_merge(d, -1, 1, 1)) return; /* so little is wrong that no mistake can be told from none */
    if (m->layer_rules && equals_row(d, &d->without_rules)) {
        snprintf(d->finding, sizeof d->finding, "the score rules of the layer are missing from it");
        return;
    }
    if (equals_merge(d, -1, 1, log2_e)) {
        snprintf(d->finding, sizeof d->finding, "the LSE of the remote partial states is in base 2");
        return;
    }
    if (equals_merge(d, -1, log2_e, 1)) {
        snprintf(d->finding, sizeof d->finding, "the LSE of the partial state of the own shard is in base 2");
        return;
    }
    for (int32_t r = 0; r < d->map.cp_size; r++) {
        if (d->shards[r].sum > 0 && equals_merge(d, r, 1, 1)) {
            snprintf(d->finding, sizeof d->finding, "the shard of rank %d is missing from it", r);
            return;
        }
    }
    if (equals_row(d, &d->shards[d->owner])) {
        snprintf(d->finding, sizeof d->finding, "the shards of all ranks but rank %d are missing from it", d->owner);
        return;
    }
    if (d->list && equals_row(d, &d->without_list)) {
        snprintf(d->finding, sizeof d->finding, "the query attends keys that are not on its list");
        return;
    }
    if (d->chunk->parents >= 0 && equals_row(d, &d->with_branches)) {
        snprintf(d->finding, sizeof d->finding, "the query sees drafts of other branches of its tree");
        return;
    }
    for (int32_t i = 0; i < d->latents.count; i++) {
        if (!equals_row(d, &d->latents.rows[i])) continue;
        cpa_verify_latents_name(i, d->finding, sizeof d->finding);
        return;
    }
    const int causal = cpa_verify_mask(d->verify, d->sample).causal;
    if (causal && equals_row(d, &d->without_self)) {
        snprintf(d->finding, sizeof d->finding, "the causal mask is off by one: the query does not see its own key");
    } else if (causal && equals_row(d, &d->with_next)) {
        snprintf(d->finding, sizeof d->finding, "the causal mask is off by one: the query sees the next key");
    }
}

/* Whether a file can hold the row: not the codes of tiles. */
static int may_keep(const diagnosis *d) {
    return !cpa_dtype_has_tiles(d->verify->worker->options.model.attention.kv_dtype);
}

/* Begins what is compared, and the file of the row. */
static void begin_diagnosis(diagnosis *d, const cpa_verify_part *part, int keeps) {
    cpa_verify_begin_row(d->verify, d->sample, &d->row, part->pieces[d->keeper].samples);
    begin_rows(d, d->shards, d->map.cp_size);
    begin_rows(d, &d->without_self, 1);
    begin_rows(d, &d->with_next, 1);
    begin_rows(d, &d->with_branches, 1);
    begin_rows(d, &d->without_rules, 1);
    begin_rows(d, &d->without_list, 1);
    if (d->list) memcpy(d->list, part->pieces[d->keeper].samples + d->verify->list_at, (size_t)d->verify->list_bytes);
    cpa_reference_set_rules(&d->without_rules, &(cpa_reference_rules){.index = d->sample->position});
    cpa_verify_latents_begin(&d->latents, d->verify, &d->row);
    if (keeps) cpa_verify_dump_begin(&d->dump, d->verify, d->plan, d->wrong, &d->row, d->n_keys);
}

/* Adds token `t` of a rank's piece, at a position, to the rows that have it under their mistake. */
static void diagnose_key(diagnosis *d, const cpa_verify_part *part, int32_t rank, int64_t t, int64_t position,
                         int keeps) {
    const cpa_form *form = cpa_verify_form(d->verify, d->sample);
    const cpa_mask mask = cpa_verify_mask(d->verify, d->sample);
    const int64_t query = d->sample->position;
    const int is_listed = !d->list || cpa_verify_selects((const cpa_verify_list *)(const void *)d->list, position);
    const int shown = cpa_verify_sees(d->plan, d->chunk, mask, query, position), sees = shown && is_listed;
    const float *k = d->keys->k, *v = d->keys->v;
    cpa_verify_read_keys(d->verify, part, rank, t, 1, d->keys);
    cpa_verify_shape_keys(d->verify, form, d->expansion.values, 1, d->keys);
    if (keeps) cpa_verify_dump_key(&d->dump, (cpa_row_file_key){position, rank, sees}, k, v);
    if (sees) cpa_reference_add_ruled(&d->shards[rank], 1, k, v, &position, NULL);
    if (sees) cpa_reference_add_keys(&d->without_rules, 1, k, v);
    if (sees && position < query) cpa_reference_add_ruled(&d->without_self, 1, k, v, &position, NULL);
    if (sees || position == query + 1) cpa_reference_add_ruled(&d->with_next, 1, k, v, &position, NULL);
    if (shown) cpa_reference_add_ruled(&d->without_list, 1, k, v, &position, NULL);
    if (is_listed && cpa_reference_sees(mask, query, position))
        cpa_reference_add_ruled(&d->with_branches, 1, k, v, &position, NULL);
    if (sees)
        cpa_verify_latents_add(&d->latents, d->verify, form, d->expansion.values, &part->pieces[rank], t, position,
                               d->keys);
}

static void diagnose_part(diagnosis *d, const cpa_verify_part *part) {
    const cpa_attention_shape *shape = &d->verify->worker->options.model.attention;
    const int keeps = may_keep(d) && part->group->kv_head == d->sample->head / (shape->q_heads / shape->kv_heads);
    if (part->is_first) begin_diagnosis(d, part, keeps);
    for (int32_t r = 0; r < d->map.cp_size; r++) {
        const cpa_token_set tokens = cpa_tokens_on(d->map, d->placement, r);
        const cpa_verify_piece *piece = &part->pieces[r];
        for (int64_t t = 0; t < piece->tokens; t++)
            diagnose_key(d, part, r, t, cpa_token_position(d->map, tokens, piece->first + t), keeps);
    }
    if (part->last && keeps) cpa_verify_dump_end(&d->dump, d->verify);
    if (part->last) name_mistake(d, part->group->kv_head);
}

static cpa_status diagnose_parts(void *ctx, const cpa_verify_part *parts, int64_t n_parts, cpa_error *err) {
    (void)err;
    for (int64_t p = 0; p < n_parts; p++) diagnose_part(ctx, &parts[p]);
    return CPA_OK;
}

/* How far a result may be from that of a mistake and still be explained by it: a few units of the dtype's rounding at
 * the size of the result, or what was allowed. */
static double equality_tolerance(const cpa_verify *verify, const cpa_verify_wrong_row *wrong) {
    return fmax(verify->worker->options.model.attention.dtype == CPA_F32 ? 1e-4 : 2e-2, wrong->tolerance);
}

/* The lowest rank that has a wrong row chooses; all take its sample and diagnose it on that rank, *checker. None has:
 * *checker is their number. */
static cpa_status choose(cpa_control *control, const cpa_verify_wrong_row *wrong, int32_t *checker, int64_t *sample,
                         cpa_error *verdict) {
    double chooser = wrong->sample < 0 ? -control->size : -control->rank;
    CPA_TRY(cpa_control_max(control, &chooser, 1, verdict));
    *checker = (int32_t)-chooser;
    *sample = wrong->sample;
    return *checker == control->size ? CPA_OK : cpa_control_bcast(control, sample, sizeof *sample, *checker, verdict);
}

cpa_status cpa_verify_diagnose(cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_wrong_row *wrong,
                               cpa_error *verdict) {
    const cpa_model_shape *model = &verify->worker->options.model;
    cpa_control *control = verify->control;
    cpa_error err = {CPA_OK, ""};
    int64_t wrong_sample;
    int32_t checker;
    CPA_TRY(choose(control, wrong, &checker, &wrong_sample, verdict));
    if (checker == control->size) return CPA_CHECK_FAILED; /* only stale blocks: the message says so */
    const cpa_verify_sample *sample = &verify->samples[wrong_sample];
    diagnosis d = {.verify = verify,
                   .plan = plan,
                   .chunk = &plan->chunks[sample->chunk],
                   .sample = sample,
                   .map = verify->worker->options.map,
                   .placement = plan->chunks[sample->chunk].placement,
                   .tolerance = equality_tolerance(verify, wrong),
                   .wrong = wrong};
    d.owner = cpa_owner_rank(d.map, d.placement, sample->position);
    d.keeper = cpa_verify_keeper(verify, plan, sample);
    d.shards = malloc((size_t)control->size * sizeof *d.shards);
    d.keys = malloc(sizeof *d.keys);
    d.list = verify->list_bytes > 0 ? malloc((size_t)verify->list_bytes) : NULL;
    cpa_verify_group *groups = calloc((size_t)model->attention.kv_heads, sizeof *groups);
    const int has_memory = d.shards && d.keys && groups && (d.list || verify->list_bytes == 0);
    cpa_status status = has_memory ? CPA_OK : cpa_fail(&err, CPA_NO_MEMORY, "diagnosis: no memory");
    int32_t expected = sample->head / (model->attention.q_heads / model->attention.kv_heads);
    /* One key further, where the chunk has one, for a mask that lets it through. */
    const cpa_plan_chunk *chunk = &plan->chunks[sample->chunk];
    int64_t next = cpa_verify_last_key(verify, chunk, sample);
    next += next + 1 < chunk->start + chunk->count;
    d.n_keys = next + 1;
    for (int32_t h = 0; status == CPA_OK && h < model->attention.kv_heads; h++) {
        /* The head that should have been read comes first. */
        groups[h] = (cpa_verify_group){.first = wrong_sample,
                                       .count = 1,
                                       .last_position = next,
                                       .kv_head = (expected + h) % model->attention.kv_heads,
                                       .checker = checker};
    }
    if (status == CPA_OK)
        status =
            cpa_verify_matrix_take(&verify->matrix, verify->worker, sample->form, sample->layer, sample->head, &err);
    if (status == CPA_OK)
        status =
            cpa_verify_expansion_take(&d.expansion, verify->worker, sample->form, sample->layer, sample->head, &err);
    if (status == CPA_OK)
        status = cpa_verify_gather(verify, plan, groups, model->attention.kv_heads, diagnose_parts, &d, &err);
    cpa_verify_tensor_free(&d.expansion);
    free(groups);
    free(d.keys);
    free(d.list);
    free(d.shards);
    if (status == CPA_OK) status = cpa_control_bcast(control, d.finding, sizeof d.finding, checker, &err);
    if (status == CPA_OK) status = cpa_control_bcast(control, d.dump.said, sizeof d.dump.said, checker, &err);
    if (status != CPA_OK) {
        *verdict = err;
        return status;
    }
    size_t used = strlen(verdict->message);
    snprintf(verdict->message + used, sizeof verdict->message - used, "%s%s%s", d.finding[0] ? "; " : "", d.finding,
             d.dump.said);
    return CPA_CHECK_FAILED;
}
