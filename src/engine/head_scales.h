/* Scales of the heads of a cache that a caller gives on the host (cpa_engine_options.scales_on_host). */
#ifndef CPA_HEAD_SCALES_H
#define CPA_HEAD_SCALES_H

#include <cpattn/engine.h>

/* Numbers above 0, where they lie on the host. */
cpa_status cpa_head_scales_check(const cpa_engine_options *options, cpa_error *err);
/* A hash of them; 0 where they do not lie on the host. */
uint64_t cpa_head_scales_hash(const cpa_engine_options *options);
/* Brings them to a device: `shape`, that of the options, then has them there. *memory is the caller's to free, and NULL
 * where they did not lie on the host. */
cpa_status cpa_head_scales_upload(const cpa_engine_options *options, cpa_device *device, cpa_attention_shape *shape,
                                  void **memory, cpa_error *err);

#endif
