/* The tensors of a layer's mixture of experts, in the forms that checkpoints have: a matrix for each expert, as they are
 * published, or the experts of a layer in one tensor, as transformers 5 has them in memory. */
#ifndef CPA_MODEL_EXPERT_WEIGHTS_H
#define CPA_MODEL_EXPERT_WEIGHTS_H

#include "src/model/weight_loader.h"
#include "src/model/weights.h"

/* Loads the router and the experts `own` of the loader's layer to where `weights` says. */
cpa_status cpa_expert_weights_load(const cpa_weight_loader *loader, const cpa_model_config *config, cpa_slice own,
                                   const cpa_feed_forward_weights *weights);

#endif
