/* A step plan as bytes (step_plan_fields.h).
 *
 * Wire form, little-endian: magic "CPAP", version, step, flags, the counts, then the arrays field by field. Decoding
 * checks the magic, the version, every count and index against the bytes and limits at hand, and that nothing is left
 * over; a plan that fails leaves `out` untouched and says where it broke. */
#ifndef CPA_STEP_PLAN_WIRE_H
#define CPA_STEP_PLAN_WIRE_H

#include "src/schedule/step_plan.h"

/* Encodes into *buffer (malloc'd, grown as needed, kept by the caller from step to step). */
cpa_status cpa_step_plan_encode(const cpa_step_plan *plan, uint8_t **buffer, int64_t *capacity, int64_t *bytes,
                                cpa_error *err);
cpa_status cpa_step_plan_decode(const uint8_t *buffer, int64_t bytes, const cpa_plan_limits *limits, cpa_step_plan *out,
                                cpa_error *err);

#endif
