#include "src/llm/bound_vocabulary.h"

#include <stdlib.h>

#include "base/check.h"

enum { GRAMMAR_BYTES = 1 << 30 };

cpa_status cpa_bound_vocabulary_open(const cpa_tokenizer *tokenizer, int64_t vocabulary, const uint32_t *end_ids,
                                     int64_t n_end_ids, cpa_constraints **out, cpa_error *err) {
    *out = NULL;
    if (!tokenizer || n_end_ids == 0) return CPA_OK;
    const cpa_token_texts *texts = cpa_tokenizer_texts(tokenizer);
    cpa_grammar_token *tokens = calloc((size_t)vocabulary, sizeof *tokens);
    if (!tokens) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the tokens of a vocabulary");
    for (int64_t id = 0; id < vocabulary; id++) {
        const cpa_token_text *text = cpa_token_texts_find(texts, (uint32_t)id);
        if (!text) continue;
        tokens[id] = (cpa_grammar_token){
            .text = texts->texts.data + text->at, .bytes = text->bytes, .is_special = text->is_special};
    }
    const cpa_status status = cpa_constraints_open(tokens, vocabulary, end_ids, n_end_ids, GRAMMAR_BYTES, out, err);
    free(tokens);
    return status;
}
