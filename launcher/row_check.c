#include "launcher/row_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/context.h>
#include <cpattn/ops.h>

#include "base/check.h"
#include "base/convert.h"
#include "kernels/host/device/host.h"
#include "program/exit_code.h"
#include "src/check/cases/judge.h"
#include "src/check/cases/row_file.h"
#include "src/check/product.h"

enum { RANGES = 16, BLOCK = 16 };

/* Those of the keys that the row sees that are of a rank (-1: of any) and of the indices [begin, end); or the others. */
typedef struct key_set {
    const cpa_row_read *of;
    int32_t rank;
    int64_t begin, end;
    int others;
} key_set;

static int is_in(const void *ctx, int64_t key) {
    const key_set *set = ctx;
    const int inside = (set->rank < 0 || set->of->rank[key] == set->rank) && key >= set->begin && key < set->end;
    return set->of->seen[key] && inside != set->others;
}

/* What the row is over a set of keys, and how far the run's result is from that. */
static double expect_over(const key_set *set, cpa_case_expected *out) {
    const cpa_row_file *row = &set->of->row;
    float slope = (float)row->slope, sink = (float)row->sink;
    const cpa_case_score score = {.softcap = (float)row->softcap,
                                  .temperature_len = (float)row->temperature_len,
                                  .slopes = &slope,
                                  .sinks = row->has_sink ? &sink : NULL};
    cpa_case_expect(&(cpa_case_row){.dtype = row->dtype,
                                    .k_dim = row->k_dim,
                                    .v_dim = row->v_dim,
                                    .scale = row->scale,
                                    .q = row->q,
                                    .k = set->of->k,
                                    .v = set->of->v,
                                    .k_stride = row->k_dim,
                                    .v_stride = row->v_dim,
                                    .n_keys = row->keys,
                                    .index = row->token,
                                    .score = &score,
                                    .given = is_in,
                                    .given_ctx = set},
                    out);
    if (row->out_dim > 0)
        cpa_reference_apply_matrix(row->matrix, row->v_dim, row->out_dim, row->dtype, out->out, &out->out_tolerance);
    return cpa_reference_error(row->result, out->out, cpa_row_result_dim(row));
}

/* ---- the keys ---- */

/* The share of a set in the row's probabilities, and how far the result is from what the row is without these keys and
 * over them alone. */
static void print_set(key_set set, const char *name, double all_lse) {
    const cpa_row_file *row = &set.of->row;
    cpa_case_expected expected;
    int64_t n = 0;
    for (int64_t i = 0; i < row->keys; i++) n += is_in(&set, i);
    if (n == 0) return;
    const double alone = expect_over(&set, &expected), weight = exp(expected.lse - all_lse);
    set.others = 1;
    const double without = expect_over(&set, &expected);
    printf("%-24s %9lld %9.4f %14.3g %14.3g%s\n", name, (long long)n, weight, without, alone,
           row->error <= row->tolerance ? ""
           : without <= row->tolerance  ? "   the result is that without these keys"
           : alone <= row->tolerance    ? "   the result is that of these keys alone"
                                        : "");
}

static void print_keys(const cpa_row_read *r, double all_lse) {
    const cpa_row_file *row = &r->row;
    const int64_t step = (row->keys + RANGES - 1) / RANGES;
    char name[64];
    printf("\n%-24s %9s %9s %14s %14s\n", "keys", "seen", "weight", "off without", "off alone");
    for (int32_t rank = 0; rank < row->ranks && row->ranks > 1; rank++) {
        snprintf(name, sizeof name, "of rank %d", rank);
        print_set((key_set){r, rank, 0, row->keys, 0}, name, all_lse);
    }
    for (int64_t begin = 0; begin < row->keys; begin += step) {
        const int64_t end = begin + step < row->keys ? begin + step : row->keys;
        snprintf(name, sizeof name, "[%lld, %lld)", (long long)begin, (long long)end);
        print_set((key_set){r, -1, begin, end, 0}, name, all_lse);
    }
}

/* ---- attend on the host ---- */

/* The row as a sequence of one head in a cache: every key in its place, a mask of bits says what is seen. */
typedef struct host_row {
    cpa_kv_view kv;
    int32_t *table;
    uint32_t *bits;
    char q[CPA_MAX_HEAD_DIM * sizeof(float)];
} host_row;

static void free_host_row(host_row *h) {
    free(h->bits);
    free(h->table);
    free(h->kv.v);
    free(h->kv.k);
}

/* A quantised cache is one of floats here: codes and scales are not kept. */
static cpa_status make_host_row(const cpa_row_read *r, host_row *h, cpa_error *err) {
    const cpa_row_file *row = &r->row;
    const int64_t blocks = (row->keys + BLOCK - 1) / BLOCK, words = cpa_mask_words(row->keys);
    h->kv = (cpa_kv_view){.dtype = cpa_dtype_is_quantised(row->kv_dtype) ? CPA_F32 : row->kv_dtype,
                          .block_size = BLOCK,
                          .num_blocks = blocks,
                          .kv_heads = 1,
                          .k_dim = row->k_dim,
                          .v_dim = row->v_dim};
    const int64_t bytes = cpa_dtype_bytes(h->kv.dtype);
    h->kv.k = calloc((size_t)(blocks * BLOCK * row->k_dim * bytes) + 1, 1);
    h->kv.v = calloc((size_t)(blocks * BLOCK * row->v_dim * bytes) + 1, 1);
    h->table = malloc((size_t)blocks * sizeof *h->table + 1);
    h->bits = malloc((size_t)words * sizeof *h->bits + 1);
    if (!h->kv.k || !h->kv.v || !h->table || !h->bits)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld keys", (long long)row->keys);
    for (int64_t i = 0; i < blocks; i++) h->table[i] = (int32_t)i;
    cpa_narrow(h->kv.k, r->k, h->kv.dtype, row->keys * row->k_dim);
    cpa_narrow(h->kv.v, r->v, h->kv.dtype, row->keys * row->v_dim);
    cpa_narrow(h->q, row->q, row->dtype, row->k_dim);
    return cpa_mask_pack(r->seen, 1, row->keys, 0, h->bits);
}

/* O times the matrix of the row. */
static void multiply(const cpa_row_file *row, const float *o, float *out) {
    double wide[CPA_MAX_HEAD_DIM], tolerance = 0;
    for (int32_t d = 0; d < row->v_dim; d++) wide[d] = (double)o[d];
    cpa_reference_apply_matrix(row->matrix, row->v_dim, row->out_dim, row->dtype, wide, &tolerance);
    for (int32_t d = 0; d < row->out_dim; d++) out[d] = (float)wide[d];
}

/* Attends the row with the device as it is; its result, in fp32 where it is O times a matrix, and its LSE. */
static cpa_status attend(const cpa_row_read *r, const host_row *h, cpa_device *device, cpa_stream *stream, float *out,
                         float *lse, cpa_error *err) {
    const cpa_row_file *row = &r->row;
    const int64_t no_word = 0, first = 0;
    const int32_t width = (int32_t)row->keys;
    const float slope = (float)row->slope, sink = (float)row->sink;
    const cpa_score_rules rules = {.softcap = (float)row->softcap,
                                   .temperature_len = (float)row->temperature_len,
                                   .alibi_slopes = slope != 0 ? &slope : NULL,
                                   .sink_logits = row->has_sink ? &sink : NULL};
    const cpa_key_bits seen = {.bits = h->bits, .row_word = &no_word, .first = &first, .width = &width};
    const cpa_key_selection selection = {.bits = &seen};
    const cpa_attend_item item = {.q_count = 1, .q_first = row->token, .k_count = row->keys};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {1, BLOCK},
                                    .shape = {.q_heads = 1,
                                              .kv_heads = 1,
                                              .k_dim = row->k_dim,
                                              .v_dim = row->v_dim,
                                              .dtype = row->dtype,
                                              .kv_dtype = h->kv.dtype},
                                    .block_size = BLOCK,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = h->table,
                                    .n_table_entries = h->kv.num_blocks};
    char narrow[CPA_MAX_HEAD_DIM * sizeof(float)];
    float o[CPA_MAX_HEAD_DIM];
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = h->q,
                                  .q_dtype = row->dtype,
                                  .kv = h->kv,
                                  .scale = (float)row->scale,
                                  .state = {.o = row->out_dim > 0 ? o : NULL, .lse = lse},
                                  .out = row->out_dim > 0 ? NULL : narrow,
                                  .rules = &rules,
                                  .selection = &selection};
    cpa_attend_plan *plan = NULL;
    cpa_status status = cpa_attend_plan_create(device, &plan, err);
    if (status == CPA_OK) status = cpa_attend_plan_set(plan, &batch, err);
    if (status == CPA_OK && cpa_attend(plan, &args, stream) != CPA_OK)
        status = cpa_fail(err, CPA_INVALID, "attend: %s", cpa_stream_error(stream));
    cpa_attend_plan_destroy(plan);
    if (status != CPA_OK) return status;
    if (row->out_dim > 0)
        multiply(row, o, out);
    else
        cpa_widen(out, narrow, row->dtype, row->v_dim);
    return CPA_OK;
}

static cpa_status print_paths(const cpa_row_read *r, const host_row *h, const double *want, cpa_device *device,
                              cpa_stream *stream, cpa_error *err) {
    for (int i = 0; cpa_attend_isas[i]; i++) {
        float out[CPA_MAX_HEAD_DIM], lse;
        char name[64];
        if (!cpa_attend_isas[i]->supported()) continue;
        cpa_host_use_isa((cpa_host_device *)device, cpa_attend_isas[i]);
        CPA_TRY(attend(r, h, device, stream, out, &lse, err));
        snprintf(name, sizeof name, "host, %s", cpa_attend_isas[i]->name);
        printf("%-24s %9.3g %14.9g\n", name, cpa_reference_error(out, want, cpa_row_result_dim(&r->row)), (double)lse);
    }
    return CPA_OK;
}

static cpa_status attend_on_host(const cpa_row_read *r, const double *want, cpa_error *err) {
    const cpa_device_options options = {.size = sizeof options, .threads = 1};
    cpa_device *device = NULL;
    cpa_stream *stream = NULL;
    host_row h = {.table = NULL};
    cpa_status status;
    CPA_TRY_GOTO(cpa_device_open(&options, &device, err), done);
    CPA_TRY_GOTO(cpa_stream_create(device, &stream, err), done);
    CPA_TRY_GOTO(make_host_row(r, &h, err), done);
    status = print_paths(r, &h, want, device, stream, err);
done:
    free_host_row(&h);
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    return status;
}

/* ---- a row ---- */

static void print_what(const cpa_row_read *r) {
    const cpa_row_file *row = &r->row;
    char by_matrix[40] = "";
    int64_t seen = 0;
    if (row->out_dim > 0) snprintf(by_matrix, sizeof by_matrix, ", results of %d by a matrix", row->out_dim);
    for (int64_t i = 0; i < row->keys; i++) seen += r->seen[i];
    printf(
        "request %llu, token %lld, layer %d, head %d, KV head %d: %s, %s over %s, widths %d/%d%s, %lld keys, of which "
        "it "
        "sees %lld\n",
        (unsigned long long)row->request, (long long)row->token, row->layer, row->head, row->kv_head,
        row->ranks == 1 ? "one rank" : cpa_algorithm_name((cpa_algorithm)row->algorithm), cpa_dtype_name(row->dtype),
        cpa_dtype_name(row->kv_dtype), row->k_dim, row->v_dim, by_matrix, (long long)row->keys, (long long)seen);
    if (row->other_choice)
        printf("another choice: key %lld was chosen, with the index score %.9g, but not key %lld with %.9g\n",
               (long long)row->listed_key, row->listed_score, (long long)row->missing_key, row->missing_score);
}

static cpa_status check_row(const cpa_row_read *r, int *is_wrong, cpa_error *err) {
    const cpa_row_file *row = &r->row;
    const key_set all = {r, -1, 0, row->keys, 0};
    float kept[CPA_MAX_HEAD_DIM];
    cpa_case_expected expected;
    const double error = expect_over(&all, &expected);
    const int is_off = !(error <= expected.out_tolerance);
    *is_wrong = is_off || row->other_choice;
    for (int32_t d = 0; d < cpa_row_result_dim(row); d++) kept[d] = (float)row->reference[d];
    print_what(r);
    printf("\n%-24s %9s %14s\n", "", "off by", "LSE");
    printf("%-24s %9.3g %14s   allowed %.3g: %s\n", "result of the run", error, "", expected.out_tolerance,
           is_off ? "wrong" : "right");
    printf("%-24s %9.3g %14s   allowed %.3g\n", "as the run had it", row->error, "", row->tolerance);
    printf("%-24s %9.3g %14.9g\n", "reference of the run",
           cpa_reference_error(kept, expected.out, cpa_row_result_dim(row)), expected.lse);
    CPA_TRY(attend_on_host(r, expected.out, err));
    print_keys(r, expected.lse);
    return CPA_OK;
}

int cpa_row_check_main(int argc, char **argv) {
    int code = CPA_EXIT_DONE;
    if (argc < 2 || argv[1][0] == '-') {
        fprintf(
            argc < 2 ? stderr : stdout,
            "usage: cp_attn check FILE...\n"
            "Computes rows of --violation-dump again: how far a result is from float64, what attend of the host makes\n"
            "of the same inputs, and which keys explain the difference.\n");
        return argc < 2 || strcmp(argv[1], "--help") != 0 ? CPA_EXIT_BAD_INPUT : CPA_EXIT_DONE;
    }
    for (int i = 1; i < argc; i++) {
        cpa_row_read r;
        cpa_error err;
        int is_wrong = 0;
        cpa_status status = cpa_row_file_read(argv[i], &r, &err);
        if (status == CPA_OK) {
            status = check_row(&r, &is_wrong, &err);
            cpa_row_read_release(&r);
        }
        if (status != CPA_OK) {
            fprintf(stderr, "cp_attn check: %s\n", err.message);
            return (int)cpa_exit_code_of(status);
        }
        if (is_wrong) code = CPA_EXIT_CHECK_FAILED;
    }
    return code;
}
