#include "src/text/token_list.h"

#include <stdlib.h>

#include "base/array.h"

int cpa_token_list_add(cpa_token_list *list, uint32_t id) {
    if (!cpa_array_reserve(&list->ids, &list->capacity, list->count + 1, sizeof *list->ids)) return 0;
    list->ids[list->count++] = id;
    return 1;
}

void cpa_token_list_release(cpa_token_list *list) {
    free(list->ids);
    *list = (cpa_token_list){.count = 0};
}

int cpa_token_is_among(uint32_t id, const uint32_t *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] == id) return 1;
    }
    return 0;
}
