#include "kernels/host/attend/attend_rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/host/attend/state.h"

cpa_status cpa_attend_workspace_create(cpa_attend_workspace **out, cpa_error *err) {
    const size_t rows = CPA_HOST_UNIT_ROWS, wide = rows * CPA_MAX_HEAD_DIM, tile = CPA_ATTEND_PACKED;
    const size_t head = 4096, scores = CPA_ATTEND_GROUP_ROWS * CPA_ATTEND_TILE;
    const size_t floats = 3 * wide + 2 * tile + scores + 5 * rows;
    char *memory;
    _Static_assert(sizeof(cpa_attend_workspace) <= 4096, "the head of a workspace holds its pointers");
    if (posix_memalign((void **)&memory, head,
                       head + floats * sizeof(float) +
                           rows * (sizeof(cpa_attend_visible) + sizeof(cpa_attend_row_score)) +
                           CPA_ATTEND_TILE * (sizeof(int64_t) + sizeof(int32_t) + 1)))
        return cpa_fail(err, CPA_NO_MEMORY, "device: no memory for a thread's work space");
    cpa_attend_workspace *work = (cpa_attend_workspace *)(void *)memory;
    float *next = (float *)(void *)(memory + head);
    work->k = next, next += tile;
    work->v = next, next += tile;
    work->scores = next, next += scores;
    work->q = next, next += wide;
    work->o = next, next += wide;
    work->state_o = next, next += wide;
    work->max = next, next += rows;
    work->top = next, next += rows;
    work->sum = next, next += rows;
    work->lse = next, next += rows;
    work->state_lse = next, next += rows;
    work->visible = (cpa_attend_visible *)(void *)next;
    work->score = (cpa_attend_row_score *)(void *)(work->visible + rows);
    work->key_index = (int64_t *)(void *)(work->score + rows);
    work->key_after = (int32_t *)(work->key_index + CPA_ATTEND_TILE);
    work->weighs = (uint8_t *)(work->key_after + CPA_ATTEND_TILE);
    *out = work;
    return CPA_OK;
}

void cpa_attend_workspace_destroy(cpa_attend_workspace *work) {
    free(work);
}

/* With bits, causality decides before the first of them alone, key by key, and nothing is seen behind the last. */
static int64_t end_with_bits(const cpa_attend_job *job, const cpa_attend_item *item, const cpa_attend_row_score *score,
                             int64_t causal_end) {
    const cpa_owner_map map = job->plan->batch.map;
    const int64_t end = cpa_tokens_before(map, item->k_set, score->bits_end);
    if (score->bits_end > score->bits_first) return cpa_min64(end, item->k_first + item->k_count);
    return cpa_min64(end, causal_end);
}

/* The position of a shard is monotone in its local index, so a mask on positions is a range of local indices. */
static cpa_attend_visible visible_keys(const cpa_attend_job *job, const cpa_attend_item *item, int64_t query,
                                       const cpa_attend_row_score *score) {
    const cpa_mask *mask = &job->args.mask;
    cpa_owner_map map = job->plan->batch.map;
    int64_t position = cpa_token_position(map, item->q_set, item->q_first + query);
    cpa_attend_visible visible = {.end = item->k_first + item->k_count};
    const int64_t ahead = cpa_mask_ahead(*mask);
    if (ahead > 0) {
        const int64_t before = position + ahead > 0 ? cpa_tokens_before(map, item->k_set, position + ahead) : 0;
        visible.end = cpa_min64(visible.end, before);
    }
    if (score && score->bits) visible.end = end_with_bits(job, item, score, visible.end);
    if (mask->window > 0 && position >= mask->window) {
        visible.first = cpa_tokens_before(map, item->k_set, position - mask->window + 1);
        visible.sinks = cpa_tokens_before(map, item->k_set, mask->sinks);
    }
    return visible;
}

int64_t cpa_attend_query_head(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t row) {
    int32_t kv_head = unit->kv_head + row / unit->rows;
    return (int64_t)kv_head * job->group + (unit->row + row % unit->rows) % job->group;
}

static const char *find_query(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t row) {
    const cpa_host_member member = cpa_host_member_of(job->plan, unit, job->group, row);
    int64_t index = job->plan->items[member.item].q_row + member.token;
    int64_t at = index * job->args.q_row_stride + cpa_attend_query_head(job, unit, row) * job->args.q_head_stride;
    return (const char *)job->args.q + at * cpa_dtype_bytes(job->args.q_dtype);
}

/* The query of a row of the unit as floats [k_dim]. */
static void read_query(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t row, float *q) {
    cpa_widen(q, find_query(job, unit, row), job->args.q_dtype, job->plan->batch.shape.k_dim);
}

/* The query of a row of the unit as pairs of bf16, filled up to the last word with zeros. */
static void read_pairs(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t row, float *q) {
    const size_t bytes = (size_t)job->plan->batch.shape.k_dim * (size_t)cpa_dtype_bytes(CPA_BF16);
    memcpy(q, find_query(job, unit, row), bytes);
    memset((char *)q + bytes, 0, CPA_PAIR_Q_WORDS * sizeof *q - bytes);
}

/* Row `row` of the unit goes to its column of its group, [k_dim][rows of the group]. */
static void load_query(const cpa_attend_job *job, const cpa_host_unit *unit, cpa_attend_workspace *work, int32_t row) {
    int32_t k_dim = job->plan->batch.shape.k_dim, full = job->isa->rows, in_unit = row % unit->rows;
    int32_t column = in_unit % full, group_rows = (int32_t)cpa_min64(full, unit->rows - (in_unit - column));
    float *to = work->q + (int64_t)(row - column) * k_dim + column, wide[CPA_MAX_HEAD_DIM];
    read_query(job, unit, row, wide);
    for (int32_t d = 0; d < k_dim; d++) to[(int64_t)d * group_rows] = wide[d];
}

static int has_score(const cpa_attend_job *job) {
    return job->score.transforms || job->score.has_bits || job->score.selects.any;
}

static void load_scores(const cpa_attend_job *job, const cpa_host_unit *unit, cpa_attend_workspace *work) {
    for (int32_t i = 0; i < cpa_host_unit_rows(unit); i++) {
        const cpa_host_member member = cpa_host_member_of(job->plan, unit, job->group, i % unit->rows);
        const cpa_attend_item *item = &job->plan->items[member.item];
        const int64_t index = cpa_token_position(job->plan->batch.map, item->q_set, item->q_first + member.token);
        work->score[i] = cpa_attend_row_score_of(&job->score, item->q_row + member.token,
                                                 (int32_t)cpa_attend_query_head(job, unit, i), index);
    }
}

void cpa_attend_load_rows(const cpa_attend_job *job, const cpa_host_unit *unit, cpa_attend_workspace *work) {
    work->tiles[0] = work->tiles[1] = 0;
    for (int32_t i = 0; i < cpa_host_unit_rows(unit); i++) {
        work->top[i] = CPA_LOWEST_EXPONENT;
        if (job->isa->pairs)
            read_pairs(job, unit, i, work->q + (int64_t)i * CPA_PAIR_Q_WORDS);
        else
            load_query(job, unit, work, i);
    }
    const int scores = has_score(job);
    if (scores) load_scores(job, unit, work);
    for (int32_t i = 0; i < unit->rows; i++) {
        const cpa_host_member member = cpa_host_member_of(job->plan, unit, job->group, i);
        work->visible[i] =
            visible_keys(job, &job->plan->items[member.item], member.token, scores ? &work->score[i] : NULL);
    }
}

/* The last key that one of the rows [first_row, last_row] may see, and one more. */
static int64_t end_of_visible(const cpa_attend_job *job, const cpa_attend_workspace *work, int32_t first_row,
                              int32_t last_row) {
    int64_t end = work->visible[last_row].end;
    for (int32_t i = first_row; job->score.has_bits && i < last_row; i++) end = cpa_max64(end, work->visible[i].end);
    return end;
}

/* Narrows *begin, *end to the keys that the rows [first_row, last_row] may see; returns 0 if there is none. */
static int narrow_to_visible(const cpa_attend_job *job, const cpa_attend_workspace *work, int32_t first_row,
                             int32_t last_row, int64_t *begin, int64_t *end) {
    int64_t first = work->visible[first_row].first, sinks = work->visible[last_row].sinks;
    *end = cpa_min64(*end, end_of_visible(job, work, first_row, last_row));
    if (sinks <= *begin)
        *begin = cpa_max64(*begin, first);
    else if (first >= *end)
        *end = cpa_min64(*end, sinks);
    return *begin < *end;
}

static int32_t clamp_lane(int64_t lane) {
    return (int32_t)cpa_max64(0, cpa_min64(lane, CPA_ATTEND_TILE));
}

/* What is done to the scores of a tile; rows: those of the group. */
static cpa_attend_tile_score score_of_tile(const cpa_attend_job *job, const cpa_attend_workspace *work,
                                           const cpa_attend_row_score *rows) {
    const cpa_attend_score_job *score = &job->score;
    return (cpa_attend_tile_score){.transforms = score->transforms,
                                   .alibi = score->rules.alibi_slopes != NULL,
                                   .causal = job->args.mask.causal,
                                   .selects = score->selects.any,
                                   .softcap = score->rules.softcap,
                                   .softcap_inverse = score->rules.softcap > 0 ? 1 / score->rules.softcap : 0,
                                   .bias_dtype = score->bias.dtype,
                                   .bias_first = score->bias.first,
                                   .bias_width = score->bias.width,
                                   .key_index = work->key_index,
                                   .key_after = work->key_after,
                                   .rows = rows};
}

/* Whether one of n rows of the unit may attend a key of the tile, whose indices are in the work space. */
static int any_attends(const cpa_attend_job *job, const cpa_attend_workspace *work, int32_t row, int32_t n,
                       const cpa_attend_tile *tile) {
    if (!job->score.selects.any) return 1;
    for (int32_t i = row; i < row + n; i++) {
        const int64_t first = work->key_index[tile->begin], last = work->key_index[tile->end - 1];
        if (cpa_attend_keys_meet(&work->score[i].keys, first, last)) return 1;
    }
    return 0;
}

/* Takes a group, whose first row of every head is `row` of the unit, and over all heads `unit_row`, through the keys of
 * the tile, which begins at local index `key`. */
static void attend_tile(const cpa_attend_job *job, const cpa_attend_workspace *work, const cpa_attend_group *group,
                        int32_t row, int32_t unit_row, int64_t key, cpa_attend_tile tile) {
    cpa_attend_lanes lanes[CPA_ATTEND_MAX_ROWS];
    cpa_attend_tile_score score;
    int64_t begin = key + tile.begin, end = key + tile.end;
    int32_t rows = group->rows, panel = job->isa->lanes;
    if (!narrow_to_visible(job, work, row, row + rows - 1, &begin, &end)) return;
    tile.begin = (int32_t)(begin - key);
    tile.end = (int32_t)(end - key);
    if (!any_attends(job, work, unit_row, rows * group->heads, &tile)) return;
    tile.masked = tile.begin % panel || tile.end % panel || work->visible[row].end < end ||
                  work->visible[row + rows - 1].first > begin || job->score.has_bits;
    tile.visible = lanes;
    for (int32_t i = 0; tile.masked && i < rows; i++) {
        const cpa_attend_visible *visible = &work->visible[row + i];
        lanes[i] = (cpa_attend_lanes){.end = clamp_lane(visible->end - key),
                                      .first = clamp_lane(visible->first - key),
                                      .sinks = clamp_lane(visible->sinks - key)};
    }
    if (has_score(job)) {
        score = score_of_tile(job, work, work->score + unit_row);
        tile.score = &score;
    }
    job->isa->attend(&tile, group);
}

/* `rows` neighbouring rows of the unit and of `heads` heads. */
static cpa_attend_group group_of(const cpa_attend_job *job, const cpa_attend_workspace *work, int32_t row, int32_t rows,
                                 int32_t heads) {
    const int64_t row_words = job->isa->pairs ? CPA_PAIR_Q_WORDS : job->plan->batch.shape.k_dim;
    return (cpa_attend_group){.rows = rows,
                              .heads = heads,
                              .q = work->q + row * row_words,
                              .max = work->max + row,
                              .top = work->top + row,
                              .sum = work->sum + row,
                              .o = work->o + row * job->o_stride,
                              .o_stride = job->o_stride,
                              .scores = work->scores};
}

/* The keys, or the values, of the unit's item from a KV head on, as pages. */
static cpa_attend_pages find_pages(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t kv_head,
                                   cpa_kv_part part) {
    const cpa_kv_view *kv = &job->args.kv;
    const cpa_kv_pool pool = cpa_kv_pool_of(kv, part);
    const int64_t scale_stride = kv->block_size * pool.scale_bytes;
    return (cpa_attend_pages){
        .first = pool.memory + kv_head * pool.head_stride,
        .block_stride = pool.block_stride,
        .token_stride = pool.token_stride,
        .head_stride = pool.head_stride,
        .block_shift = __builtin_ctz((unsigned)kv->block_size),
        .dtype = kv->dtype,
        .part = part,
        .dim = pool.dim,
        .row_dim = pool.row_dim,
        .keys = job->plan->items[unit->item].k_count,
        .table = job->plan->batch.block_tables + job->plan->items[unit->item].table,
        .run_bytes = pool.runs > 1 ? pool.run_bytes : 0,
        .run_stride = pool.run_stride,
        .tensor_scale = pool.tensor_scale,
        .head_scales = pool.head_scales ? pool.head_scales + kv_head * pool.head_scale_step : NULL,
        .head_scale_step = pool.head_scale_step,
        .scale_bytes = pool.scale_bytes,
        .scale_head_stride = scale_stride,
        .scales = scale_stride ? pool.memory + pool.scales_at + kv_head * scale_stride : NULL,
    };
}

static void find_keys_and_values(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t kv_head,
                                 cpa_attend_pages *k, cpa_attend_pages *v) {
    *k = find_pages(job, unit, kv_head, CPA_KEYS);
    *v = find_pages(job, unit, kv_head, CPA_VALUES);
}

/* Rows [row, row + rows) begin with nothing. */
static void begin_rows(const cpa_attend_job *job, cpa_attend_workspace *work, int32_t row, int32_t rows) {
    memset(work->o + row * job->o_stride, 0, (size_t)(rows * job->o_stride) * sizeof *work->o);
    memset(work->sum + row, 0, (size_t)rows * sizeof *work->sum);
    for (int32_t i = row; i < row + rows; i++) work->max[i] = CPA_LOWEST_EXPONENT;
}

/* The keys of one tile of a split that the item has and some row of the unit sees; returns 0 if there is none. */
static int find_tile(const cpa_attend_job *job, const cpa_host_unit *unit, cpa_attend_workspace *work, int64_t key,
                     cpa_attend_tile *tile) {
    const cpa_attend_item *item = &job->plan->items[unit->item];
    int64_t begin = cpa_max64(key, item->k_first),
            end = cpa_min64(key + CPA_ATTEND_TILE, item->k_first + item->k_count);
    if (!narrow_to_visible(job, work, 0, unit->rows - 1, &begin, &end)) return 0;
    tile->key0 = key - item->k_first;
    tile->begin = (int32_t)(begin - key);
    tile->end = (int32_t)(end - key);
    tile->scale = job->score_scale;
    if (job->score.indices)
        cpa_attend_index_keys(job->plan->batch.map, item->k_set, key, work->key_index, work->key_after);
    return any_attends(job, work, 0, cpa_host_unit_rows(unit), tile);
}

/* One row through the split again, with the bits that it would have if the values of keys that weigh nothing for it
 * were zeros. */
static void attend_alone(const cpa_attend_job *job, const cpa_host_unit *unit, int64_t split,
                         cpa_attend_workspace *work, int32_t row) {
    float q[CPA_MAX_HEAD_DIM];
    cpa_attend_pages k, v;
    cpa_attend_tile tile = {.k_pages = &k, .v_pages = &v, .weighs = work->weighs};
    cpa_attend_group group = group_of(job, work, row, 1, 1);
    group.q = q;
    if (job->isa->pairs)
        read_pairs(job, unit, row, q);
    else
        read_query(job, unit, row, q);
    find_keys_and_values(job, unit, unit->kv_head + row / unit->rows, &k, &v);
    begin_rows(job, work, row, 1);
    for (int64_t at = 0; at < CPA_HOST_SPLIT_TOKENS; at += CPA_ATTEND_TILE) {
        int64_t key = split * CPA_HOST_SPLIT_TOKENS + at;
        if (find_tile(job, unit, work, key, &tile)) attend_tile(job, work, &group, row % unit->rows, row, key, tile);
    }
}

/* Divides by the sum and takes the logarithm. The sum with +0 makes one zero of two: which keys of no weight passed by
 * must not show. The sum is NaN if a score was NaN or +inf, and 0 if all scores weigh nothing. Returns 0 if O, but not
 * the sum, is not finite: an exponent of ones carries into the sign. */
static int end_row(const cpa_attend_job *job, cpa_attend_workspace *work, int32_t row) {
    float *o = work->o + row * job->o_stride, sum = work->sum[row], inverse = sum > 0 ? 1 / sum : 0;
    uint32_t carries = 0;
    if (isnan(sum)) {
        cpa_state_set_nan(o, &work->lse[row], job->o_stride);
        return 1;
    }
    for (int64_t d = 0; d < job->o_stride; d++) {
        o[d] = o[d] * inverse + 0.0f;
        carries |= (cpa_float_bits(o[d]) & 0x7f800000) + 0x00800000;
    }
    work->lse[row] = sum > 0 ? (float)((double)work->max[row] * M_LN2 + log((double)sum)) : -INFINITY;
    return !(carries >> 31);
}

static void end_split(const cpa_attend_job *job, const cpa_host_unit *unit, int64_t split, cpa_attend_workspace *work,
                      int poll) {
    for (int32_t row = 0; row < cpa_host_unit_rows(unit); row++) {
        work->top[row] = fmaxf(work->top[row], work->max[row]);
        if (end_row(job, work, row)) continue;
        attend_alone(job, unit, split, work, row);
        (void)end_row(job, work, row);
        if (poll) cpa_progress_look(&job->stream->progress);
    }
}

int cpa_attend_split(const cpa_attend_job *job, const cpa_host_unit *unit, int64_t split, cpa_attend_workspace *work,
                     int poll) {
    int64_t split_key = split * CPA_HOST_SPLIT_TOKENS;
    cpa_attend_pages k, v;
    int seen = 0;
    find_keys_and_values(job, unit, unit->kv_head, &k, &v);
    for (int64_t key = split_key; key < split_key + CPA_HOST_SPLIT_TOKENS; key += CPA_ATTEND_TILE) {
        cpa_attend_tile tile = {.k_pages = &k, .v_pages = &v, .skip = job->skip, .counts = work->tiles};
        if (!find_tile(job, unit, work, key, &tile)) continue;
        if (!seen) begin_rows(job, work, 0, cpa_host_unit_rows(unit));
        seen = 1;
        if (unit->rows > job->isa->rows) {
            job->isa->pack(&tile, work->k, work->v);
            tile.k = work->k;
            tile.v = work->v;
        }
        for (int32_t row = 0; row < unit->rows; row += job->isa->rows) {
            int32_t rows = (int32_t)cpa_min64(job->isa->rows, unit->rows - row);
            const cpa_attend_group group = group_of(job, work, row, rows, unit->kv_heads);
            attend_tile(job, work, &group, row, row, key, tile);
        }
        if (poll) cpa_progress_look(&job->stream->progress);
    }
    if (seen) end_split(job, unit, split, work, poll);
    return seen;
}
