/* bench topk: the best entries of rows of scores, as an indexer's are chosen. Bytes are those of one read of the
 * scores. */
#include "base/check.h"
#include "bench/memory.h"
#include "bench/nn_rows.h"

#include <cpattn/topk.h>

#include <string.h>

static cpa_status call_topk(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_topk_args args = {.size = sizeof args,
                                .rows = on_host ? s->period : s->rows,
                                .width = s->in.width,
                                .logits = cpa_bench_memory_of(&s->in, on_host),
                                .k = (int32_t)s->out.width,
                                .indices = cpa_bench_memory_of(&s->out, on_host)};
    return cpa_topk(&args, stream);
}

static cpa_status prepare_topk(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                               cpa_error *err) {
    cpa_bench_nn *s = NULL;
    if (shape[2] > CPA_MOST_TOPK)
        return cpa_fail(err, CPA_INVALID, "bench topk: k is %lld, expected at most %d", (long long)shape[2],
                        CPA_MOST_TOPK);
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_topk, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, CPA_F32, s->rows, shape[1], 3, 1, err));
    row->bytes = (double)(s->rows * cpa_bench_row_bytes(&s->in));
    return cpa_bench_make_out(s, CPA_F32, shape[2], err); /* indices, of as many bytes */
}

static cpa_status check_topk(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    const int64_t bytes = cpa_bench_row_bytes(&s->out);
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++)
        row->wrong += memcmp((char *)s->host_out + i * bytes, (char *)s->out.host + i * bytes, (size_t)bytes) != 0;
    return CPA_OK;
}

const cpa_bench cpa_bench_topk = {
    .name = "topk",
    .dims = "rows x columns x k",
    .n_dims = 3,
    .shapes_host = "4x16Kx512",
    .shapes_cuda = "1x128Kx2K,64x128Kx2K,4Kx64Kx2K",
    .checked = "lists of up to 16 rows",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_topk,
    .run = cpa_bench_nn_run,
    .check = check_topk,
    .release = cpa_bench_nn_release,
};
