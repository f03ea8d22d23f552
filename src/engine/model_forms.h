/* Forms of a model's rows, as options give them. */
#ifndef CPA_MODEL_FORMS_H
#define CPA_MODEL_FORMS_H

#include <cpattn/model.h>
#include <cpattn/status.h>

/* What can be told of them without a device; their widths are the context's. Without a network the synthetic model gives
 * what keys are expanded by, and no other matrix. */
cpa_status cpa_model_forms_check(const cpa_model_shape *model, int has_network, cpa_error *err);
/* All that ranks have to have alike, and that hidden states depend on; without matrices, which lie on devices. */
uint64_t cpa_model_forms_hash(const cpa_model_shape *model);

#endif
