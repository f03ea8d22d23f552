#include "src/context/kv_pieces.h"

#include <stdlib.h>

#include "base/check.h"

cpa_status cpa_kv_pieces_add(cpa_kv_pieces *pieces, cpa_context_ops *ops, cpa_kv_piece piece) {
    CPA_TRY(cpa_context_ensure_array(ops, &pieces->data, &pieces->capacity, pieces->count + 1, sizeof *pieces->data));
    pieces->data[pieces->count++] = piece;
    return CPA_OK;
}

void cpa_kv_pieces_destroy(cpa_kv_pieces *pieces) {
    free(pieces->data);
}
