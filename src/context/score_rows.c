#include "src/context/score_rows.h"

#include "base/check.h"
#include "src/context/pass_q_plan.h"

void cpa_score_rows_free(cpa_score_rows *rows, cpa_context_ops *ops) {
    if (ops->device) cpa_step_maps_free(&rows->maps, ops);
}

/* Where the rows of attends are not those of the step. */
static int maps_rows(const cpa_context_ops *ops, const cpa_pass_q *q) {
    return ops->map.cp_size > 1 && q && !cpa_step_is_replicated(q->step);
}

cpa_status cpa_score_rows_plan(cpa_score_rows *rows, cpa_context_ops *ops, const cpa_pass_q *q) {
    if (rows->planned || !maps_rows(ops, q)) return CPA_OK;
    const int64_t own = q->step->rows, remote = cpa_pass_q_attended_rows(q);
    CPA_TRY(cpa_step_maps_renew(&rows->maps, ops, own + remote));
    for (int64_t i = 0; i < own + remote; i++) rows->maps.host[i] = 0; /* rows that fill a step up */
    cpa_planned_map_own(q->step, rows->maps.host);
    if (remote > 0) cpa_pass_q_map_attended(q, rows->maps.host + own);
    rows->planned = 1;
    return CPA_OK;
}

/* The selection of a layer with other rows. */
static void map_selection(cpa_context_score *score, int side, const cpa_key_selection *of, const int32_t *row_map) {
    cpa_key_selection *selection = &score->selection[side];
    *selection = *of;
    if (of->bits) {
        score->bits[side] = *of->bits;
        score->bits[side].row_map = row_map;
        selection->bits = &score->bits[side];
    }
    if (of->indices) {
        score->indices[side] = *of->indices;
        score->indices[side].row_map = row_map;
        selection->indices = &score->indices[side];
    }
    if (of->blocks) {
        score->blocks[side] = *of->blocks;
        score->blocks[side].row_map = row_map;
        selection->blocks = &score->blocks[side];
    }
}

cpa_status cpa_score_rows_begin(cpa_score_rows *rows, cpa_context_ops *ops, const cpa_pass_q *q,
                                const cpa_context_args *layer) {
    cpa_context_score *score = &ops->score;
    *score = (cpa_context_score){
        .rules = layer->rules, .has_selection = layer->selection != NULL, .has_bias = layer->bias != NULL};
    const int maps = (score->has_selection || score->has_bias) && maps_rows(ops, q);
    if (maps) CPA_TRY(cpa_score_rows_plan(rows, ops, q));
    for (int side = 0; side < CPA_SCORE_SIDES; side++) {
        const int32_t *map = rows->maps.device.memory;
        if (maps && side == CPA_SCORE_REMOTE) map += q->step->rows;
        if (layer->selection) map_selection(score, side, layer->selection, maps ? map : NULL);
        if (layer->bias) {
            score->bias[side] = *layer->bias;
            score->bias[side].row_map = maps ? map : NULL;
        }
    }
    return CPA_OK;
}

cpa_status cpa_score_rows_upload(cpa_score_rows *rows, cpa_context_ops *ops, cpa_stream *stream) {
    if (!rows->planned) return CPA_OK;
    return cpa_step_maps_upload(&rows->maps, ops, stream);
}
