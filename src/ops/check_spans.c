#include "src/ops/check_spans.h"

#include <stdlib.h>

#include "base/struct_size.h"
#include "src/ops/check_args.h"

/* The rows that the span fills. */
static cpa_status check_span(const char *where, const cpa_checked_spans *given, int64_t index,
                             cpa_checked_range *filled, cpa_error *err) {
    const cpa_kv_span span = given->spans[index];
    const int64_t block_size = given->src->block_size, entries = given->n_table_entries;
    const long long i = index;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(span), "%s: the reserved bytes of spans[%lld] are not zero", where, i);
    REQUIRE(err, span.table >= 0 && span.first >= 0 && span.count >= 0 && span.first <= CPA_MOST_TOKENS - span.count,
            "%s: spans[%lld] has table %lld, first %lld, count %lld; expected none negative, up to 2^44", where, i,
            (long long)span.table, (long long)span.first, (long long)span.count);
    REQUIRE(err, span.dst_row >= 0 && span.count <= given->dst_rows - span.dst_row,
            "%s: spans[%lld] fills %lld rows from %lld on of %lld", where, i, (long long)span.count,
            (long long)span.dst_row, (long long)given->dst_rows);
    *filled = (cpa_checked_range){span.dst_row, span.dst_row + span.count, index};
    if (span.count == 0) return CPA_OK;
    const int64_t last = (span.first + span.count - 1) / block_size;
    REQUIRE(err, span.table < entries && last < entries - span.table,
            "%s: spans[%lld] reads table entry %lld + %lld of %lld", where, i, (long long)span.table, (long long)last,
            (long long)entries);
    for (int64_t entry = span.table + span.first / block_size; entry <= span.table + last; entry++)
        REQUIRE(err, given->block_tables[entry] >= 0 && given->block_tables[entry] < given->src->num_blocks,
                "%s: spans[%lld] reads block %d through table entry %lld, expected 0..%lld", where, i,
                given->block_tables[entry], (long long)entry, (long long)given->src->num_blocks - 1);
    return CPA_OK;
}

static cpa_status check_each(const char *where, const cpa_checked_spans *given, cpa_error *err) {
    cpa_status status = CPA_OK;
    int64_t n = 0;
    cpa_checked_range *filled = malloc((size_t)(given->n_spans + 1) * sizeof *filled);
    if (!filled)
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the check of %lld spans", where,
                        (long long)given->n_spans);
    for (int64_t i = 0; i < given->n_spans; i++) {
        CPA_TRY_GOTO(check_span(where, given, i, &filled[n], err), done);
        n += filled[n].end > filled[n].begin;
    }
    status = cpa_check_disjoint(where, "spans", "row", filled, n, err);
done:
    free(filled);
    return status;
}

cpa_status cpa_check_spans(const char *where, const cpa_checked_spans *given, cpa_error *err) {
    REQUIRE(err, given->n_spans >= 0 && given->n_spans <= INT32_MAX, "%s: n_spans is %lld, expected 0..%d", where,
            (long long)given->n_spans, INT32_MAX);
    REQUIRE(err, given->n_table_entries >= 0, "%s: n_table_entries is %lld, expected at least 0", where,
            (long long)given->n_table_entries);
    REQUIRE(err, given->n_spans == 0 || (given->spans && given->block_tables), "%s: %s is NULL", where,
            given->spans ? "block_tables" : "spans");
    CPA_TRY(cpa_check_aligned(where, "spans", given->spans, sizeof given->spans->first, err));
    CPA_TRY(cpa_check_aligned(where, "block_tables", given->block_tables, sizeof *given->block_tables, err));
    return check_each(where, given, err);
}
