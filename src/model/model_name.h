/* What tells the weights of a folder from others of the same shape, in a store or a folder of blocks. */
#ifndef CPA_MODEL_NAME_H
#define CPA_MODEL_NAME_H

#include <cpattn/status.h>

enum { CPA_MODEL_NAME_BYTES = 32 };
/* The name of the model, of its config.json and of samples of all its weights, wherever its folder is and however its
 * tensors are spread over files; "" for a folder "". */
cpa_status cpa_model_name(const char *folder, char out[CPA_MODEL_NAME_BYTES], cpa_error *err);

#endif
