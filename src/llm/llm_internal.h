/* An llm: what its parts share. */
#ifndef CPA_LLM_LLM_INTERNAL_H
#define CPA_LLM_LLM_INTERNAL_H

#include <semaphore.h>

#include "src/grammar/constraints.h"
#include "src/llm/folder_model.h"
#include "src/llm/llm_setup.h"
#include "src/llm/prompt_ids.h"
#include "src/llm/request_table.h"
#include "src/model/model_name.h"

struct cpa_llm {
    cpa_comm *comm;
    cpa_comm *own_comm; /* of one rank, where the caller has given none */
    int32_t rank;
    cpa_llm_setup setup;
    cpa_folder_model loaded;
    cpa_model network;
    cpa_block_store store; /* the engine's, if it has one, and its model, if it names none itself */
    char model_name[CPA_MODEL_NAME_BYTES];
    cpa_engine *engine;
    cpa_prompt_source source;     /* rank 0 */
    cpa_constraints *constraints; /* rank 0; NULL: answers cannot be bound */
    cpa_request_table requests;
    pthread_t thread; /* runs the engine, from `begin` on, if all ranks agree */
    int has_thread, all_agree;
    sem_t begin;
};

#endif
