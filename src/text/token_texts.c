#include "src/text/token_texts.h"

#include <stdlib.h>

#include "base/array.h"

int cpa_token_texts_set(cpa_token_texts *texts, uint32_t id, cpa_token_kind kind, const char *text, size_t bytes) {
    const int64_t at = texts->texts.count;
    if (at + (int64_t)bytes > UINT32_MAX || !cpa_bytes_add(&texts->texts, text, bytes)) return 0;
    if (!cpa_array_reserve(&texts->tokens, &texts->capacity, (int64_t)id + 1, sizeof *texts->tokens)) return 0;
    while (texts->count <= (int64_t)id) texts->tokens[texts->count++] = (cpa_token_text){.kind = CPA_TOKEN_NONE};
    cpa_token_text *token = &texts->tokens[id];
    *token = (cpa_token_text){(uint32_t)at, (uint32_t)bytes, (uint8_t)kind, token->is_special};
    return 1;
}

void cpa_token_texts_release(cpa_token_texts *texts) {
    free(texts->tokens);
    cpa_bytes_release(&texts->texts);
    *texts = (cpa_token_texts){.count = 0};
}

const cpa_token_text *cpa_token_texts_find(const cpa_token_texts *texts, uint32_t id) {
    return (int64_t)id < texts->count && texts->tokens[id].kind != CPA_TOKEN_NONE ? &texts->tokens[id] : NULL;
}
