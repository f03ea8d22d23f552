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
