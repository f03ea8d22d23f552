#include "src/context/score_rows.h"

#include "base/check.h"
#include "src/context/pass_q_plan.h"

void cpa_score_rows_free(cpa_score_rows *rows, cpa_context_ops *ops) {
    if (ops->device) cpa_step_maps_free(&rows->maps, ops);
}

/* Where the rows of attends are not those of the step. */
static int maps_rows(const cpa_context_ops *ops, const cpa_form_lane *lanes) {
    return lanes && (ops->forms.count > 1 || (ops->map.cp_size > 1 && !cpa_step_is_replicated(lanes->q.step)));
}

cpa_status cpa_score_rows_plan(cpa_score_rows *rows, cpa_context_ops *ops, const cpa_form_lane *lanes) {
    int64_t entries = 0;
    if (rows->planned || !maps_rows(ops, lanes)) return CPA_OK;
    for (int32_t f = 0; f < ops->forms.count; f++) {
        rows->first[f][CPA_SCORE_OWN] = rows->first[f][CPA_SCORE_KEPT] = entries;
        rows->first[f][CPA_SCORE_REMOTE] = entries += lanes[f].q.step->rows[f];
        entries += cpa_pass_q_attended_rows(&lanes[f].q);
    }
    CPA_TRY(cpa_step_maps_renew(&rows->maps, ops, entries));
    for (int64_t i = 0; i < entries; i++) rows->maps.host[i] = 0; /* rows that fill a step up */
    for (int32_t f = 0; f < ops->forms.count; f++) {
        cpa_planned_map_own(lanes[f].q.step, f, rows->maps.host + rows->first[f][CPA_SCORE_OWN]);
        if (cpa_pass_q_attended_rows(&lanes[f].q) > 0)
            cpa_pass_q_map_attended(&lanes[f].q, rows->maps.host + rows->first[f][CPA_SCORE_REMOTE]);
    }
    rows->planned = 1;
    return CPA_OK;
}

/* The selection of a layer with other rows, of a form on a side. */
static void map_selection(cpa_context_score *score, int32_t form, int side, const cpa_key_selection *of,
                          const int32_t *row_map) {
    cpa_key_selection *selection = &score->selection[form][side];
    *selection = *of;
    if (of->bits) {
        score->bits[form][side] = *of->bits;
        score->bits[form][side].row_map = row_map;
        selection->bits = &score->bits[form][side];
    }
    if (of->indices) {
        score->indices[form][side] = *of->indices;
        score->indices[form][side].row_map = row_map;
        selection->indices = &score->indices[form][side];
    }
    if (of->blocks) {
        score->blocks[form][side] = *of->blocks;
        score->blocks[form][side].row_map = row_map;
        selection->blocks = &score->blocks[form][side];
    }
}

/* Whether rows that are attended where their keys lie may select blocks. */
static int selects_blocks(const cpa_context_ops *ops, const cpa_form_lane *lanes) {
    const cpa_planned_step *step = lanes ? lanes[0].q.step : NULL;
    if (!step || ops->least_blocks == 0) return 1;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        if (!cpa_planned_own_in_pass_kv(step, chunk) && chunk->end - chunk->start >= ops->least_blocks) return 1;
    }
    return 0;
}

cpa_status cpa_score_rows_begin(cpa_score_rows *rows, cpa_context_ops *ops, const cpa_form_lane *lanes,
                                const int32_t *reserved_rows, const cpa_layer *layer) {
    cpa_context_score *score = &ops->score;
    score->rules = layer->rules;
    score->has_selection = layer->selection != NULL;
    score->has_bias = layer->bias != NULL;
    if (!score->has_selection && !score->has_bias) return CPA_OK;
    const int maps = maps_rows(ops, lanes);
    if (maps) CPA_TRY(cpa_score_rows_plan(rows, ops, lanes));
    const int32_t *device_maps = rows->maps.device.memory;
    const int by_blocks = layer->selection && layer->selection->blocks && selects_blocks(ops, lanes);
    for (int32_t f = 0; f < ops->forms.count; f++) {
        for (int side = 0; side < CPA_SCORE_SIDES; side++) {
            const int32_t *map = maps ? device_maps + rows->first[f][side] : reserved_rows;
            cpa_key_selection of = layer->selection ? *layer->selection : (cpa_key_selection){NULL};
            if (side != CPA_SCORE_OWN && !by_blocks) of.blocks = NULL;
            if (layer->selection) map_selection(score, f, side, &of, map);
            if (layer->bias) {
                score->bias[f][side] = *layer->bias;
                score->bias[f][side].row_map = map;
            }
        }
    }
    return CPA_OK;
}

cpa_status cpa_score_rows_upload(cpa_score_rows *rows, cpa_context_ops *ops, cpa_stream *stream) {
    if (!rows->planned) return CPA_OK;
    return cpa_step_maps_upload(&rows->maps, ops, stream);
}
