/* How an update of a reserved plan deals units to teams: what one thread notes while it cuts, and the pieces that all of
 * them write then (attend_plan_update.cu). Compiled for the host for its test alone. */
#ifndef CPA_CUDA_ATTEND_ASSIGN_H
#define CPA_CUDA_ATTEND_ASSIGN_H

#include "kernels/cuda/attend/attend.h"

/* What was assigned so far. All zero at first. */
typedef struct cpa_cuda_assigner {
    cpa_cuda_decode_turn turn;
    int32_t units, cuts, partial_rows, splits;
} cpa_cuda_assigner;

/* Cuts the unit of that number of an item, of so many rows. */
CPA_HOST_DEVICE static inline void cpa_cuda_assign_unit(const cpa_cuda_update_args *a,
                                                        const cpa_cuda_decode_shares *shares, cpa_cuda_assigner *to,
                                                        cpa_cuda_decode_unit unit, int32_t item, int32_t of_item,
                                                        int32_t rows) {
    const int32_t first = to->cuts;
    int32_t begin = 0;
    do {
        const int32_t take = (int32_t)cpa_cuda_assign_piece(shares, &to->turn, &unit);
        const cpa_cuda_cut cut = {to->units, begin, take, (int32_t)to->turn.team};
        a->cuts[to->cuts++] = cut;
        begin += take;
    } while (unit.left > 0);
    const int32_t n = to->cuts - first;
    const cpa_cuda_unit noted = {item, of_item, first, n, to->partial_rows, to->splits};
    a->units[to->units++] = noted;
    if (n > 1) {
        to->splits += a->team.ctas;
        to->partial_rows += n * rows;
    }
}

/* The same of all units of an item, each of whose is `unit` before it is assigned. */
CPA_HOST_DEVICE static inline void cpa_cuda_assign_item(const cpa_cuda_update_args *a,
                                                        const cpa_cuda_decode_shares *shares, cpa_cuda_assigner *to,
                                                        cpa_cuda_decode_unit unit, int32_t item, int32_t packed_rows) {
    int32_t of_item = 0;
    for (int32_t row = 0; row < packed_rows; row += a->team.rows) {
        const int32_t left = packed_rows - row;
        cpa_cuda_assign_unit(a, shares, to, unit, item, of_item++, left < a->team.rows ? left : a->team.rows);
    }
}

/* Where a cut's pieces lie: the first of each team at its own place, the others after those. A place holds a piece for
 * each CTA of a team. */
CPA_HOST_DEVICE static inline int32_t cpa_cuda_place_of_cut(const cpa_cuda_update_args *a, int32_t cut) {
    const int32_t team = a->cuts[cut].team;
    const int first = cut == 0 || a->cuts[cut - 1].team != team;
    return (first ? team : a->teams + cut - team - 1) * a->team.ctas;
}

/* Writes the piece of a CTA of the cut's team. */
CPA_HOST_DEVICE static inline void cpa_cuda_write_cut(const cpa_cuda_update_args *a, int32_t index, int32_t cta,
                                                      int32_t n_cuts) {
    const cpa_cuda_cut cut = a->cuts[index];
    const cpa_cuda_unit unit = a->units[cut.unit];
    const cpa_cuda_item *from = &a->items[unit.item];
    const int32_t packed_rows = (int32_t)from->item.q_count * a->group, keys = (int32_t)from->item.k_count;
    const cpa_cuda_row_tile tile = cpa_cuda_row_tile_of(a->team, packed_rows, unit.of_item, cta);
    const int32_t rows = tile.end - tile.begin, k_end = (cut.begin + cut.tiles) * CPA_CUDA_DECODE_KEYS;
    const int32_t first_partial = unit.first_partial + unit.cuts * cta * a->team.tile; /* those before it are full */
    const int shares_team = index + 1 < n_cuts && a->cuts[index + 1].team == cut.team;
    cpa_cuda_piece piece; /* whole before it is stored: no load waits for a store */
    piece.q_row = from->item.q_row;
    piece.state_shift = from->state_shift;
    piece.q_first = from->item.q_first;
    piece.k_first = from->item.k_first;
    piece.table = from->item.table;
    piece.row_begin = tile.begin;
    piece.row_end = tile.end;
    piece.k_begin = cut.begin * CPA_CUDA_DECODE_KEYS;
    piece.k_end = k_end < keys ? k_end : keys;
    piece.q_set = from->item.q_set;
    piece.k_set = from->item.k_set;
    piece.partial = unit.cuts > 1 ? first_partial + (index - unit.first_cut) * rows : -1;
    piece.next = shares_team ? cpa_cuda_place_of_cut(a, index + 1) + cta : -1;
    piece.pieces = piece.states = unit.cuts;
    piece.first_partial = first_partial;
    piece.counter = unit.counter + cta;
    piece.ready = from->ready;
    piece.refused = from->refused;
    a->pieces[cpa_cuda_place_of_cut(a, index) + cta] = piece;
}

#endif
