/* Ids that grow in number. */
#ifndef CPA_TEXT_TOKEN_LIST_H
#define CPA_TEXT_TOKEN_LIST_H

#include <stdint.h>

/* One of zeros is empty. */
typedef struct cpa_token_list {
    uint32_t *ids;
    int64_t count, capacity;
} cpa_token_list;

/* 0 without memory, else 1. */
int cpa_token_list_add(cpa_token_list *list, uint32_t id);
void cpa_token_list_release(cpa_token_list *list);

int cpa_token_is_among(uint32_t id, const uint32_t *ids, int64_t n);

#endif
