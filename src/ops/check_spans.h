/* The spans of the operators that gather tokens out of pages. */
#ifndef CPA_OPS_CHECK_SPANS_H
#define CPA_OPS_CHECK_SPANS_H

#include <cpattn/types.h>

#include "base/check.h"

typedef struct cpa_checked_spans {
    const cpa_kv_view *src;
    const int32_t *block_tables; /* [n_table_entries] */
    int64_t n_table_entries;
    const cpa_kv_span *spans; /* [n_spans] */
    int64_t n_spans, dst_rows;
} cpa_checked_spans;

/* Fails unless they read blocks that src has, through entries that there are, and fill rows that there are, none of them
 * twice. `where` begins the line. */
cpa_status cpa_check_spans(const char *where, const cpa_checked_spans *given, cpa_error *err);

#endif
