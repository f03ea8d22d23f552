/* What a layer does to scores and which keys it attends, as the attends of a context take it: rows of a selection and of
 * a bias are those of the whole step, and a map tells which of them the rows of an attend are. */
#ifndef CPA_SCORE_ROWS_H
#define CPA_SCORE_ROWS_H

#include "src/context/form_lane.h"
#include "src/context/step_maps.h"

typedef struct cpa_score_rows {
    cpa_step_maps maps; /* row maps of each form: of own rows, then of the rows of pass-Q's attend */
    int64_t first[CPA_MOST_ROW_FORMS][CPA_SCORE_SIDES]; /* entry of `maps` where the map of a form and side begins */
    int planned;                                        /* not 0: the maps are those of the planned step */
} cpa_score_rows;

/* Another step has been planned. */
static inline void cpa_score_rows_forget(cpa_score_rows *rows) {
    rows->planned = 0;
}
void cpa_score_rows_free(cpa_score_rows *rows, cpa_context_ops *ops);
/* Whether rows of some part of the selection are mapped; NULL is none. */
static inline int cpa_selection_maps_rows(const cpa_key_selection *selection) {
    return selection &&
           ((selection->bits && selection->bits->row_map) || (selection->indices && selection->indices->row_map) ||
            (selection->blocks && selection->blocks->row_map));
}
/* Plans the maps of the step ahead of its layers, which all have a selection. */
cpa_status cpa_score_rows_plan(cpa_score_rows *rows, cpa_context_ops *ops, const cpa_form_lane *lanes);
/* Makes ops->score that of a layer; lanes: of the planned step, NULL for the reserved one, which brings the map of its
 * rows, NULL where they are those of the step. */
cpa_status cpa_score_rows_begin(cpa_score_rows *rows, cpa_context_ops *ops, const cpa_form_lane *lanes,
                                const int32_t *reserved_rows, const cpa_layer *layer);
/* Enqueues what brings the maps to the device, once a step; nothing where none are planned. */
cpa_status cpa_score_rows_upload(cpa_score_rows *rows, cpa_context_ops *ops, cpa_stream *stream);
/* What a graph of the step bakes in. */
static inline uint64_t cpa_score_rows_shape(const cpa_score_rows *rows) {
    return rows->planned ? (uint64_t)(uintptr_t)rows->maps.device.memory : 0;
}

#endif
