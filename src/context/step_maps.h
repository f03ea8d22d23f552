/* Row maps of a step: filled on the host as it is planned, and brought to the device with its plan. */
#ifndef CPA_STEP_MAPS_H
#define CPA_STEP_MAPS_H

#include "src/context/context_ops.h"

typedef struct cpa_step_maps {
    int32_t *sets[2]; /* host, page-locked, in turn: one may be on its way to the device as the next is filled */
    int64_t capacities[2];
    int turn;
    int32_t *host; /* the one of `sets` with the maps of the step */
    int64_t entries;
    const cpa_stream *uploaded; /* stream that copied the maps to the device; NULL: none has yet */
    cpa_context_buffer device;
} cpa_step_maps;

/* Room for so many entries of the next step; what was there is lost. */
cpa_status cpa_step_maps_renew(cpa_step_maps *maps, cpa_context_ops *ops, int64_t entries);
/* Enqueues the copy to the device, once for each stream. */
cpa_status cpa_step_maps_upload(cpa_step_maps *maps, cpa_context_ops *ops, cpa_stream *stream);
void cpa_step_maps_free(cpa_step_maps *maps, cpa_context_ops *ops);

#endif
