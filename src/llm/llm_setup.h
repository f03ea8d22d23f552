/* What an llm is created with on one rank: its options made whole, and what follows from the folder, the memory and the
 * device. */
#ifndef CPA_LLM_LLM_SETUP_H
#define CPA_LLM_LLM_SETUP_H

#include <cpattn/llm.h>

#include "src/llm/length_limits.h"
#include "src/model/transformer.h"

/* It must not move: the engine's options point into it. */
typedef struct cpa_llm_setup {
    const char *folder;
    cpa_llm_options options;
    cpa_engine_options engine; /* without network, forms and callbacks */
    cpa_model_config config;
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_transformer_options transformer;
    cpa_length_limits lengths; /* the same on every rank */
} cpa_llm_setup;

/* Collective over `comm`; fails on all ranks alike. `options` may be NULL; folder and options must outlive *out. */
cpa_status cpa_llm_setup_find(const char *folder, const cpa_llm_options *options, cpa_comm *comm, cpa_llm_setup *out,
                              cpa_error *err);

#endif
