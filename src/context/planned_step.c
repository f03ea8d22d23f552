#include "src/context/planned_step.h"

#include <stdlib.h>

#include "base/min_max.h"

void cpa_planned_step_destroy(cpa_planned_step *step) {
    free(step->chunks);
}

int cpa_planned_has_form(const cpa_planned_step *step, int32_t form) {
    int64_t i = 0;
    while (i < step->n_chunks && step->chunks[i].form != form) i++;
    return i < step->n_chunks || step->rows[form] > 0;
}

int64_t cpa_planned_end(const cpa_planned_step *step) {
    int64_t end = 0;
    for (int64_t i = 0; i < step->n_chunks; i++) end = cpa_max64(end, step->chunks[i].end);
    return end;
}

cpa_chunk_share cpa_planned_share(const cpa_planned_step *step, const cpa_planned_chunk *chunk, int32_t rank) {
    cpa_chunk_share share = {.tokens = cpa_tokens_on(step->map, chunk->placement, rank)};
    share.first = cpa_tokens_before(step->map, share.tokens, chunk->start);
    share.keys = cpa_tokens_before(step->map, share.tokens, chunk->end);
    share.rows = share.keys - share.first;
    return share;
}

void cpa_planned_map_rows(const cpa_planned_step *step, const cpa_planned_chunk *chunk, int32_t rank, int64_t first_row,
                          int32_t *map) {
    const cpa_chunk_share share = cpa_planned_share(step, chunk, rank);
    for (int64_t i = 0; i < share.rows; i++) {
        const int64_t position = cpa_token_position(step->map, share.tokens, share.first + i);
        map[i] = (int32_t)(first_row + position - chunk->start);
    }
}

void cpa_planned_map_own(const cpa_planned_step *step, int32_t form, int32_t *map) {
    int64_t first = 0;
    for (int64_t i = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        const int64_t tokens = chunk->end - chunk->start;
        if (chunk->form == form && cpa_step_is_replicated(step)) {
            for (int64_t t = 0; t < tokens; t++) map[chunk->row + t] = (int32_t)(first + t);
        } else if (chunk->form == form) {
            cpa_planned_map_rows(step, chunk, step->rank, first, map + chunk->row);
        }
        first += tokens;
    }
}

cpa_attend_item cpa_planned_own_item(const cpa_planned_step *step, const cpa_planned_chunk *chunk, int64_t first) {
    cpa_chunk_share own = cpa_planned_share(step, chunk, step->rank);
    return (cpa_attend_item){
        .q_row = chunk->row + first - own.first,
        .q_count = own.keys - first,
        .q_first = first,
        .k_first = 0,
        .k_count = own.keys,
        .table = chunk->table,
        .q_set = own.tokens,
        .k_set = own.tokens,
    };
}

int cpa_planned_own_in_pass_kv(const cpa_planned_step *step, const cpa_planned_chunk *chunk) {
    return cpa_step_exchanges(step) && step->gathers && chunk->algorithm == CPA_PASS_KV;
}

int64_t cpa_planned_own_items(const cpa_planned_step *step, int32_t form, cpa_attend_item *items, int64_t n,
                              int64_t first_row) {
    for (int64_t i = 0; i < step->n_chunks; i++) {
        if (step->chunks[i].form != form) continue;
        cpa_chunk_share own = cpa_planned_share(step, &step->chunks[i], step->rank);
        if (own.rows == 0 || cpa_planned_own_in_pass_kv(step, &step->chunks[i])) continue;
        items[n] = cpa_planned_own_item(step, &step->chunks[i], own.first);
        items[n++].q_row += first_row;
    }
    return n;
}
