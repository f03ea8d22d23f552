/* Many copies at once: one after the other. */
#include "kernels/copy_list.h"

#include <string.h>

static cpa_status copy(const cpa_copy_list *list, cpa_stream *stream) {
    (void)stream;
    for (int64_t i = 0; i < list->n; i++) memcpy(list->dsts[i], list->srcs[i], list->bytes[i]);
    return CPA_OK;
}

static cpa_status clear(void *memory, int64_t bytes, cpa_stream *stream) {
    (void)stream;
    memset(memory, 0, (size_t)bytes);
    return CPA_OK;
}

const cpa_copy_list_table cpa_host_copy_list = {copy, clear};
