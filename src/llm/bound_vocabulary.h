/* What answers of a model may be bound by: the tokens of its network as its tokenizer writes them. */
#ifndef CPA_LLM_BOUND_VOCABULARY_H
#define CPA_LLM_BOUND_VOCABULARY_H

#include "src/grammar/constraints.h"
#include "src/text/tokenizer.h"

/* *out is NULL where there is no tokenizer, or no token that ends an answer. CPA_NO_MEMORY. */
cpa_status cpa_bound_vocabulary_open(const cpa_tokenizer *tokenizer, int64_t vocabulary, const uint32_t *end_ids,
                                     int64_t n_end_ids, cpa_constraints **out, cpa_error *err);

#endif
