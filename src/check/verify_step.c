/* Checks the samples of one step against float64. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "src/check/reference.h"
#include "src/check/reference_rows.h"
#include "src/check/verify_diagnose.h"
#include "src/check/verify_groups.h"
#include "src/check/verify_keys.h"
#include "src/check/verify_selected.h"
#include "src/check/verify_step.h"

enum { ROWS_PER_ITEM = 16, KEYS_AT_ONCE = CPA_VERIFY_KEYS_AT_ONCE };

/* What one thread needs for the keys that it walks. */
typedef struct scratch {
    cpa_verify_keys keys;
    cpa_verify_index_keys index;
    /* What the source gave for tokens of a piece. */
    uint32_t tokens[KEYS_AT_ONCE];
    int64_t positions[KEYS_AT_ONCE]; /* positions of the tokens in the cache */
    int64_t told[KEYS_AT_ONCE];      /* positions that the model was told of the tokens */
    float k_recalled[KEYS_AT_ONCE * CPA_MAX_HEAD_DIM], v_recalled[KEYS_AT_ONCE * CPA_MAX_HEAD_DIM];
} scratch;

/* Some rows of a group against one rank's keys of a part. */
typedef struct item {
    const cpa_verify_part *part;
    int32_t rank;
    int64_t first_row, n_rows;
    const char *lists;       /* lists of the rows, and what they were chosen by; NULL: the model does not select keys */
    const float *expansion;  /* matrix that their keys are expanded by; NULL: they are not */
    cpa_reference_row *rows; /* what the keys give for the rows */
    cpa_verify_selected *selected; /* and beside them for those of lists */
    int64_t stale;                 /* position of the first token that is not what the model gave; -1: none */
} item;

/* The state of one cpa_verify_step on the rank that checks. */
typedef struct check {
    cpa_verify *verify;
    const cpa_step_plan *plan;
    cpa_verify_group *groups;
    int64_t n_groups;
    /* Rows of the groups of a round, those of a group that the round before began first. */
    cpa_reference_row *rows;
    int64_t cap_rows, open_rows;
    /* With lists of `rows`: those, and what is beside the rows. */
    char *lists;
    cpa_verify_selected *selected;
    int64_t cap_lists, cap_selected;
    cpa_reference_row *found; /* what the items' keys give, item after item */
    cpa_verify_selected *found_selected;
    int64_t cap_found, cap_found_selected;
    item *items;
    int64_t n_items, cap_items;
    cpa_verify_tensor *expansions; /* matrices that keys of the groups of a round are expanded by */
    int64_t n_expansions, cap_expansions;
    scratch *scratch;           /* [threads] */
    cpa_verify_wrong_row wrong; /* the first row that is wrong */
    cpa_status verdict;         /* CPA_CHECK_FAILED once a violation was found here */
    cpa_error violation;        /* what the violation was */
} check;

static const cpa_verify_sample *sample_of(const check *c, const cpa_verify_group *g, int64_t i) {
    return &c->verify->samples[g->first + i];
}

static const cpa_plan_chunk *chunk_of(const check *c, const cpa_verify_group *g) {
    return &c->plan->chunks[sample_of(c, g, 0)->chunk];
}

/* Bytes of the list of a row, and of what it was chosen by. */
static int64_t list_bytes(const cpa_verify *verify) {
    return verify->list_bytes + verify->index_bytes;
}

static const cpa_verify_list *list_at(const cpa_verify *verify, const char *lists, int64_t i) {
    return lists ? (const cpa_verify_list *)(const void *)(lists + i * list_bytes(verify)) : NULL;
}

/* Begins the reference rows of a group, and their lists, from what their owners sent. */
static void begin_rows(const check *c, const cpa_verify_part *part, cpa_reference_row *rows, char *lists,
                       cpa_verify_selected *selected) {
    const cpa_verify_group *g = part->group;
    cpa_owner_map map = c->verify->worker->options.map;
    for (int64_t i = 0; selected && i < g->count; i++) cpa_verify_selected_begin(&selected[i]);
    for (int32_t r = 0; r < map.cp_size; r++) {
        const char *data = part->pieces[r].samples;
        for (int64_t i = 0; i < g->count; i++) {
            if (cpa_verify_keeper(c->verify, c->plan, sample_of(c, g, i)) != r) continue;
            const int64_t bytes = list_bytes(c->verify);
            cpa_verify_begin_row(c->verify, sample_of(c, g, i), &rows[i], data);
            data += c->verify->sample_bytes;
            if (bytes > 0) memcpy(lists + i * bytes, data - bytes, (size_t)bytes);
        }
    }
}

/* Whether a row of the cache, as it lies there (`raw`) and as floats, is what the model gave in the cache's dtype. */
static int is_fresh(const cpa_attention_shape *shape, cpa_kv_part part, const char *raw, const float *have,
                    const char *recalled, float tensor_scale, int32_t dim) {
    float want[CPA_MAX_HEAD_DIM];
    if (shape->dtype == shape->kv_dtype)
        return memcmp(raw, recalled, (size_t)(dim * cpa_dtype_bytes(shape->dtype))) == 0;
    cpa_reference_widen(recalled, shape->dtype, dim, want);
    return cpa_reference_may_hold(have, want, shape->kv_dtype, part, tensor_scale, dim);
}

/* Asks the model again for n tokens of a piece; the position of the first one that the cache does not hold, or -1. */
static int64_t find_stale(const check *c, const item *it, int64_t first, int64_t n, scratch *s) {
    const cpa_worker *worker = c->verify->worker;
    const cpa_worker_options *o = &worker->options;
    const cpa_attention_shape cache = cpa_verify_part_shape(c->verify, it->part), *shape = &cache;
    const cpa_verify_piece *piece = &it->part->pieces[it->rank];
    const cpa_verify_group *g = it->part->group;
    const int64_t bytes = cpa_dtype_bytes(shape->dtype);
    const int64_t k_row = cpa_shape_row_bytes(shape, CPA_KEYS), v_row = cpa_shape_row_bytes(shape, CPA_VALUES);
    const int32_t k_dim = shape->k_dim, v_dim = shape->v_dim;
    const char *k = (const char *)s->k_recalled, *v = (const char *)s->v_recalled;
    for (int64_t t = 0; t < n; t++) {
        s->tokens[t] = worker->seqs[chunk_of(c, g)->seq].tokens[s->positions[t]];
        s->told[t] = cpa_plan_position(c->plan, chunk_of(c, g), s->positions[t]);
    }
    worker->network->recall(worker->network->ctx, sample_of(c, g, 0)->layer, g->kv_head, n, s->tokens, s->told,
                            s->k_recalled, s->v_recalled);
    const float k_scale = cpa_verify_scale(c->verify, CPA_KEYS, g->kv_head);
    const float v_scale = cpa_verify_scale(c->verify, CPA_VALUES, g->kv_head);
    const int64_t start = chunk_of(c, g)->start;
    const cpa_mask mask = cpa_model_mask(&o->model, sample_of(c, g, 0)->layer);
    for (int64_t t = 0; t < n; t++) {
        /* What no query of the step sees may be in a block that is someone else's by now. */
        if (s->positions[t] < start && !cpa_reference_sees(mask, start, s->positions[t])) continue;
        if (!is_fresh(shape, CPA_KEYS, piece->k + (first + t) * k_row, s->keys.k_raw + t * k_dim, k + t * k_dim * bytes,
                      k_scale, k_dim))
            return s->positions[t];
        if (!shape->v_in_k && !is_fresh(shape, CPA_VALUES, piece->v + (first + t) * v_row, s->keys.v_raw + t * v_dim,
                                        v + t * v_dim * bytes, v_scale, v_dim))
            return s->positions[t];
    }
    return -1;
}

/* What a row attends: the chunk and the mask show it, and the list, if there is one, names it. */
typedef struct attended {
    const cpa_plan_chunk *chunk;
    cpa_mask mask;
    int64_t query;
    const cpa_verify_list *list;
} attended;

typedef enum share { UNSEEN, LEFT_OUT, ATTENDED } share;

static share share_of(const check *c, const attended *a, int64_t key) {
    if (!cpa_verify_sees(c->plan, a->chunk, a->mask, a->query, key)) return UNSEEN;
    return !a->list || cpa_verify_selects(a->list, key) ? ATTENDED : LEFT_OUT;
}

/* Adds those of n keys that a row attends, and those that its list leaves out, runs of neighbours at once. */
static void add_attended(const check *c, const attended *a, cpa_reference_row *row, cpa_verify_selected *selected,
                         int64_t n, const scratch *s) {
    for (int64_t t = 0, end; t < n; t = end) {
        const share is = share_of(c, a, s->positions[t]);
        const float *k = s->keys.k + t * row->k_dim;
        for (end = t + 1; end < n && share_of(c, a, s->positions[end]) == is;) end++;
        if (is == ATTENDED)
            cpa_reference_add_ruled(row, end - t, k, s->keys.v + t * row->v_dim, s->positions + t, NULL);
        if (is == LEFT_OUT) cpa_verify_selected_leave(selected, row, end - t, k, s->positions + t);
    }
}

/* Adds n index keys to the rows of an item that judge what was chosen for them. */
static void add_index(const check *c, const item *it, int64_t first, int64_t n, scratch *s) {
    cpa_verify_read_index(c->verify, &it->part->pieces[it->rank], first, n, &s->index);
    for (int64_t i = 0; i < it->n_rows; i++) {
        const cpa_verify_sample *sample = sample_of(c, it->part->group, it->first_row + i);
        const cpa_verify_chooser row = {c->verify, list_at(c->verify, it->lists, i), sample->position};
        if (sample->judges && row.list->is_chosen)
            cpa_verify_choice_add(&it->selected[i].choice, &row, &s->index, n, s->positions);
    }
}

/* Works through one item, a few keys at a time. */
static void check_item(void *ctx, int64_t index, int32_t thread) {
    const check *c = ctx;
    item *it = &c->items[index];
    scratch *s = &c->scratch[thread];
    const cpa_worker_options *o = &c->verify->worker->options;
    const cpa_verify_piece *piece = &it->part->pieces[it->rank];
    const cpa_verify_sample *sample = sample_of(c, it->part->group, 0);
    const cpa_mask mask = cpa_verify_mask(c->verify, sample);
    const cpa_token_set tokens = cpa_tokens_on(o->map, chunk_of(c, it->part->group)->placement, it->rank);
    for (int64_t first = 0; first < piece->tokens; first += KEYS_AT_ONCE) {
        int64_t n = piece->tokens - first < KEYS_AT_ONCE ? piece->tokens - first : KEYS_AT_ONCE;
        for (int64_t t = 0; t < n; t++) s->positions[t] = cpa_token_position(o->map, tokens, piece->first + first + t);
        cpa_verify_read_keys(c->verify, it->part, it->rank, first, n, &s->keys);
        if (it->first_row == 0 && it->stale < 0 && c->verify->worker->network->recall)
            it->stale = find_stale(c, it, first, n, s);
        cpa_verify_shape_keys(c->verify, cpa_verify_form(c->verify, sample), it->expansion, n, &s->keys);
        for (int64_t i = 0; i < it->n_rows; i++) {
            const attended a = {chunk_of(c, it->part->group), mask,
                                sample_of(c, it->part->group, it->first_row + i)->position,
                                list_at(c->verify, it->lists, i)};
            add_attended(c, &a, &it->rows[i], it->lists ? &it->selected[i] : NULL, n, s);
        }
        if (it->part->group->judges) add_index(c, it, first, n, s);
    }
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

/* A row that is wrong in some way; `what` says in which. */
static void report_row(check *c, const cpa_verify_group *g, const cpa_verify_wrong_row *wrong, const char *what) {
    const cpa_verify_sample *sample = &c->verify->samples[wrong->sample];
    char form[24] = "";
    c->verify->stats.violations++;
    if (c->verdict != CPA_OK) return;
    c->wrong = *wrong;
    if (c->verify->worker->forms.count > 1) snprintf(form, sizeof form, ", form %d", sample->form);
    c->verdict =
        cpa_fail(&c->violation, CPA_CHECK_FAILED, "check failed: request %llu, token %lld, layer %d, head %d%s, %s: %s",
                 (unsigned long long)chunk_of(c, g)->request, (long long)sample->position, sample->layer, sample->head,
                 form, c->verify->control->size == 1 ? "local" : cpa_algorithm_name(chunk_of(c, g)->algorithm), what);
}

/* Compares the result of an ended row. */
static void check_result(check *c, const cpa_verify_group *g, const cpa_verify_wrong_row *found) {
    char what[128];
    if (isfinite(found->error) || !(found->error <= found->tolerance))
        c->verify->stats.max_error = fmax(c->verify->stats.max_error, found->error);
    if (found->error <= found->tolerance) return;
    snprintf(what, sizeof what, "%s|result - float64 reference| = %.3g, allowed %.3g",
             c->verify->list_bytes > 0 ? "another result: " : "", found->error, found->tolerance);
    report_row(c, g, found, what);
}

/* Compares the list of a row with what an indexer should have chosen, and counts what it leaves out. Whether it can be
 * told. */
static int check_list(check *c, const cpa_verify_group *g, const cpa_reference_row *row,
                      const cpa_verify_selected *selected, const cpa_verify_list *list, cpa_verify_wrong_row *found) {
    cpa_verify_stats *stats = &c->verify->stats;
    const cpa_verify_sample *sample = &c->verify->samples[found->sample];
    const cpa_verify_chooser chooser = {c->verify, list, sample->position};
    const double left_out = cpa_verify_selected_mass(selected, row);
    char what[320] = "another choice: ";
    const size_t said = strlen(what);
    if (list->count >= 0 && left_out >= 0) {
        stats->listed_rows++;
        stats->left_out += left_out;
        stats->most_left_out = fmax(stats->most_left_out, left_out);
    }
    if (!sample->judges || !list->is_chosen) return 1;
    if (!cpa_verify_choice_judge(&selected->choice, &chooser, what + said, sizeof what - said)) {
        found->is_choice = 1;
        found->choice = selected->choice;
        report_row(c, g, found, what);
        found->is_choice = 0;
    }
    return !selected->choice.undecided;
}

/* Ends a row, and compares it. `selected` and `list` are NULL where the model does not select keys. */
static cpa_status end_row(check *c, const cpa_verify_group *g, int64_t i, cpa_reference_row *row,
                          const cpa_verify_selected *selected, const cpa_verify_list *list, cpa_error *err) {
    const cpa_verify_sample *s = sample_of(c, g, i);
    const cpa_form *form = cpa_verify_form(c->verify, s);
    const int32_t out_dim = form->out_dim;
    cpa_verify_wrong_row found = {.sample = g->first + i};
    double lse, *want = found.reference;
    cpa_reference_end(row, want, &lse, &found.tolerance);
    const cpa_worker *worker = c->verify->worker;
    const cpa_dtype cache = cpa_verify_shape(c->verify, s).kv_dtype;
    const int by_blocks = worker->sparse && cpa_dtype_is_quantised(cache) && !worker->device->caps.bit_exact;
    const int rounds_rows = cpa_dtype_is_turboquant(cache) || by_blocks;
    if (form->is_expanded || rounds_rows) found.tolerance += cpa_reference_product_tolerance(row);
    found.tolerance += cpa_reference_skip_tolerance(row);
    CPA_TRY(cpa_verify_matrix_take(&c->verify->matrix, c->verify->worker, s->form, s->layer, s->head, err));
    cpa_verify_matrix_apply(&c->verify->matrix, want, &found.tolerance);
    /* Where a value is not finite, whether its key weighs enough to show is a matter of rounding. */
    for (int32_t d = 0; d < out_dim && !isnan(lse); d++)
        if (!isfinite(want[d])) row->got[d] = (float)want[d];
    found.error = cpa_reference_error(row->got, want, out_dim);
    c->verify->stats.rows++;
    const int is_told = !list || check_list(c, g, row, selected, list, &found);
    c->verify->stats.undecided += row->undecided || !is_told;
    if (!row->undecided) check_result(c, g, &found);
    return CPA_OK;
}

static cpa_status end_rows(check *c, const cpa_verify_group *g, cpa_reference_row *rows,
                           const cpa_verify_selected *selected, const char *lists, cpa_error *err) {
    for (int64_t i = 0; i < g->count; i++)
        CPA_TRY(end_row(c, g, i, &rows[i], selected ? &selected[i] : NULL, list_at(c->verify, lists, i), err));
    return CPA_OK;
}

/* Where what items find goes. */
typedef struct found_rows {
    cpa_reference_row *rows;
    cpa_verify_selected *selected; /* NULL: the model does not select keys */
} found_rows;

/* Deals the pieces and rows of a part to items. */
static void add_items(check *c, const cpa_verify_part *part, const cpa_reference_row *rows, const char *lists,
                      const float *expansion, found_rows *found) {
    for (int32_t r = 0; r < c->verify->control->size; r++) {
        for (int64_t first = 0; first < part->group->count; first += ROWS_PER_ITEM) {
            int64_t left = part->group->count - first, n = left < ROWS_PER_ITEM ? left : ROWS_PER_ITEM;
            for (int64_t i = 0; i < n; i++) {
                const cpa_reference_row *row = &rows[first + i];
                cpa_reference_begin(&found->rows[i], row->q, row->k_dim, row->v_dim, row->dtype, row->scale);
                cpa_reference_set_rules(&found->rows[i], &row->rules);
                cpa_reference_set_skip(&found->rows[i], (double)c->verify->worker->options.skip_tiles);
                if (found->selected) cpa_verify_selected_begin(&found->selected[i]);
            }
            const char *of_rows = lists ? lists + first * list_bytes(c->verify) : NULL;
            c->items[c->n_items++] = (item){part, r, first, n, of_rows, expansion, found->rows, found->selected, -1};
            found->rows += n;
            if (found->selected) found->selected += n;
        }
    }
}

/* Room for the parts of a round: rows of groups that begin in it, items, and the rows of those. */
static cpa_status reserve_round(check *c, const cpa_verify_part *parts, int64_t n_parts, cpa_error *err) {
    int64_t size = c->verify->control->size, rows = c->open_rows, found = 0, items = 0;
    const int has_lists = c->verify->list_bytes > 0;
    for (int64_t p = 0; p < n_parts; p++) {
        int64_t count = parts[p].group->count;
        if (parts[p].is_first) rows += count;
        found += size * count;
        items += size * ((count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
    }
    c->n_items = 0;
    if (cpa_array_reserve(&c->rows, &c->cap_rows, rows, sizeof *c->rows) &&
        cpa_array_reserve(&c->found, &c->cap_found, found, sizeof *c->found) &&
        cpa_array_reserve(&c->items, &c->cap_items, items, sizeof *c->items) &&
        (!has_lists ||
         (cpa_array_reserve(&c->lists, &c->cap_lists, rows * list_bytes(c->verify), 1) &&
          cpa_array_reserve(&c->selected, &c->cap_selected, rows, sizeof *c->selected) &&
          cpa_array_reserve(&c->found_selected, &c->cap_found_selected, found, sizeof *c->found_selected))))
        return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld rows", (long long)(rows + found));
}

/* The matrices that keys of the parts of a round are expanded by: each keeps what it had in the round before. */
static cpa_status reserve_expansions(check *c, int64_t n_parts, cpa_error *err) {
    if (!cpa_array_reserve(&c->expansions, &c->cap_expansions, n_parts, sizeof *c->expansions))
        return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld matrices", (long long)n_parts);
    for (; c->n_expansions < n_parts; c->n_expansions++)
        c->expansions[c->n_expansions] = (cpa_verify_tensor){.from = NULL};
    return CPA_OK;
}

/* Begins the rows of a round, and deals them to items. */
static cpa_status deal_parts(check *c, const cpa_verify_part *parts, int64_t n_parts, cpa_error *err) {
    const int has_lists = c->verify->list_bytes > 0;
    found_rows found = {c->found, has_lists ? c->found_selected : NULL};
    int64_t row = 0;
    for (int64_t p = 0; p < n_parts; p++) {
        char *lists = has_lists ? c->lists + row * list_bytes(c->verify) : NULL;
        if (parts[p].is_first) begin_rows(c, &parts[p], c->rows + row, lists, has_lists ? c->selected + row : NULL);
        const cpa_verify_sample *sample = sample_of(c, parts[p].group, 0);
        CPA_TRY(cpa_verify_expansion_take(&c->expansions[p], c->verify->worker, sample->form, sample->layer,
                                          sample->head, err));
        add_items(c, &parts[p], c->rows + row, lists, c->expansions[p].values, &found);
        if (parts[p].last) row += parts[p].group->count;
    }
    return CPA_OK;
}

/* Joins what an item found with the rows of its group, which begin at `row`. */
static void join_item(check *c, const item *it, int64_t row) {
    if (it->stale >= 0) report_stale(c, it->part->group, it->rank, it->stale);
    for (int64_t j = 0; j < it->n_rows; j++) {
        cpa_reference_join(&c->rows[row + it->first_row + j], &it->rows[j]);
        if (it->selected) cpa_verify_selected_join(&c->selected[row + it->first_row + j], &it->selected[j]);
    }
}

/* Keeps the last `n` rows, those from `row` on, for the next round. */
static void keep_open_rows(check *c, int64_t row, int64_t n) {
    const int64_t bytes = list_bytes(c->verify);
    c->open_rows = n;
    memmove(c->rows, c->rows + row, (size_t)n * sizeof *c->rows);
    if (bytes == 0) return;
    memmove(c->selected, c->selected + row, (size_t)n * sizeof *c->selected);
    memmove(c->lists, c->lists + row * bytes, (size_t)(n * bytes));
}

/* Checks the parts of a round: the threads take the items, and their rows are joined in the order of the keys. */
static cpa_status check_parts(void *ctx, const cpa_verify_part *parts, int64_t n_parts, cpa_error *err) {
    check *c = ctx;
    const cpa_stream *stream = c->verify->worker->stream;
    const int has_lists = c->verify->list_bytes > 0;
    int64_t row = 0;
    CPA_TRY(reserve_round(c, parts, n_parts, err));
    CPA_TRY(reserve_expansions(c, n_parts, err));
    CPA_TRY(deal_parts(c, parts, n_parts, err));
    cpa_threads_run(c->verify->threads, c->n_items, check_item, c, &stream->progress);
    for (int64_t i = 0; i < c->n_items; i++) {
        const item *it = &c->items[i];
        join_item(c, it, row);
        if (i + 1 < c->n_items && c->items[i + 1].part == it->part) continue;
        if (!it->part->last) continue;
        CPA_TRY(end_rows(c, it->part->group, c->rows + row, has_lists ? c->selected + row : NULL,
                         has_lists ? c->lists + row * list_bytes(c->verify) : NULL, err));
        row += it->part->group->count;
    }
    keep_open_rows(c, row, parts[n_parts - 1].last ? 0 : parts[n_parts - 1].group->count);
    return CPA_OK;
}

static cpa_status check_groups(check *c, cpa_error *err) {
    c->scratch = malloc((size_t)c->verify->n_threads * sizeof *c->scratch);
    if (!c->scratch) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory");
    CPA_TRY(cpa_verify_group_samples(c->verify, c->plan, &c->groups, &c->n_groups, err));
    return cpa_verify_gather(c->verify, c->plan, c->groups, c->n_groups, check_parts, c, err);
}

static cpa_status check_samples(cpa_verify *verify, const cpa_step_plan *plan, cpa_error *err) {
    check c = {.verify = verify, .plan = plan, .wrong.sample = -1};
    cpa_status status = check_groups(&c, err);
    if (status == CPA_OK) {
        cpa_error verdict = c.violation;
        status = cpa_control_agree(verify->control, c.verdict, &verdict);
        if (status == CPA_CHECK_FAILED) status = cpa_verify_diagnose(verify, plan, &c.wrong, &verdict);
        if (status != CPA_OK && err) *err = verdict;
    }
    for (int64_t i = 0; i < c.n_expansions; i++) cpa_verify_tensor_free(&c.expansions[i]);
    free(c.expansions);
    free(c.scratch);
    free(c.items);
    free(c.found);
    free(c.rows);
    free(c.lists);
    free(c.selected);
    free(c.found_selected);
    free(c.groups);
    verify->n_samples = 0;
    return status;
}

/* Whether the ranks agree on times after the step that began last even without samples. */
static int agrees(const cpa_verify *verify) {
    return verify->budget.share > 0 && verify->steps % VERIFY_AGREE_STEPS == 1;
}

int cpa_verify_is_idle(const cpa_verify *verify) {
    return verify->n_samples == 0 && !agrees(verify);
}

void cpa_verify_pause(cpa_verify *verify, double seconds) {
    if (verify->start_s > 0) verify->start_s += seconds;
}

cpa_status cpa_verify_step(cpa_verify *verify, const cpa_step_plan *plan, cpa_error *err) {
    int checked = verify->n_samples > 0;
    /* Ranks that are done sooner wait here, so that the check is charged with its own time alone. */
    if (checked) CPA_TRY(cpa_control_agree(verify->control, CPA_OK, err));
    double begin_s = cpa_clock_now();
    if (checked) CPA_TRY(check_samples(verify, plan, err));
    double end_s = cpa_clock_now();
    verify->stats.seconds += end_s - begin_s;
    if (!agrees(verify) && !(checked && verify->budget.share > 0)) return CPA_OK;
    double seconds[] = {end_s - verify->start_s, verify->stats.seconds};
    CPA_TRY(cpa_control_max(verify->control, seconds, 2, err));
    cpa_verify_budget_agree(&verify->budget, seconds[0], seconds[1]);
    return CPA_OK;
}
