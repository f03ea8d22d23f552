/* One unit of attend: some rows of one KV head on their way through the splits, tile by tile. */
#ifndef CPA_HOST_ATTEND_ROWS_H
#define CPA_HOST_ATTEND_ROWS_H

#include "kernels/host/attend/attend_plan.h"
#include "kernels/host/attend/attend_score.h"

/* What every unit of one call shares. Strides are resolved. */
typedef struct cpa_attend_job {
    const cpa_host_plan *plan;
    const cpa_attend_isa *isa;
    cpa_attend_args args;
    const cpa_stream *stream;
    cpa_attend_score_job score;
    float score_scale; /* log2(e) included, unless scores change: exponentials are powers of two */
    float skip;        /* skip_tiles times log2(e) */
    int32_t group;     /* query heads of a KV head */
    int64_t o_stride;  /* floats of a row of o: v_dim rounded up to whole panels */
} cpa_attend_job;

/* The keys that a row sees are, in local indices, [0, min(sinks, end)) and [first, end), less those that its bits hide.
 * All three ascend from row to row of a unit, but for `end` of rows that may have bits. */
typedef struct cpa_attend_visible {
    int64_t end, first, sinks;
} cpa_attend_visible;

/* One thread's room for the rows of one unit; memory of the device. */
struct cpa_attend_workspace {
    float *q;                    /* groups of rows, [k_dim][rows] each */
    float *o;                    /* [rows, o_stride], the state of the split at hand */
    float *max, *sum;            /* [rows] */
    float *top;                  /* [rows], max of the splits before the one at hand */
    float *lse;                  /* [rows], of the split at hand */
    float *state_o;              /* [rows, v_dim], the fold over the splits so far */
    float *state_lse;            /* [rows] */
    float *k, *v;                /* a packed tile */
    float *scores;               /* scores of a group over a tile */
    uint8_t *weighs;             /* [CPA_ATTEND_TILE], for rows that go through a split again */
    cpa_attend_visible *visible; /* [rows] */
    cpa_attend_row_score *score; /* [heads][rows] rules of scores; where the call has rules */
    int64_t *key_index; /* [CPA_ATTEND_TILE] indices of the keys of the tile at hand; where the call has rules */
    int32_t *key_after; /* [CPA_ATTEND_TILE] key_index less the first of it; where the call has rules */
    int64_t tiles[2];   /* with skip: tiles that groups of the unit looked at, and those that were left out */
};

cpa_status cpa_attend_workspace_create(cpa_attend_workspace **out, cpa_error *err);
void cpa_attend_workspace_destroy(cpa_attend_workspace *work);

/* The query head of a row of the unit. */
int64_t cpa_attend_query_head(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t row);

/* Loads the queries of a unit and what its rows see; none has looked at a tile yet. */
void cpa_attend_load_rows(const cpa_attend_job *job, const cpa_host_unit *unit, cpa_attend_workspace *work);

/* Computes work->o (first v_dim of each o_stride) and work->lse over one split. Returns 0, with neither set, if no row
 * sees a key of it. `poll` moves messages between tiles. */
int cpa_attend_split(const cpa_attend_job *job, const cpa_host_unit *unit, int64_t split, cpa_attend_workspace *work,
                     int poll);

#endif
