/* Rows of the operators beside attention, for their benchmarks. They repeat after a period, of at most 16 rows; those of
 * the first period are on the host as well, and are checked against what the host back end makes of them. */
#ifndef CPA_BENCH_NN_ROWS_H
#define CPA_BENCH_NN_ROWS_H

#include <cpattn/nn.h>

#include "bench/benchmark.h"

/* A tensor: the first period of it on the host as well. */
typedef struct cpa_bench_tensor {
    cpa_dtype dtype;
    int64_t width; /* elements of a row */
    void *device, *host;
} cpa_bench_tensor;

typedef struct cpa_bench_nn cpa_bench_nn;

/* A call of the operator over all rows, or on the host over the first period. */
typedef cpa_status cpa_bench_nn_call(const cpa_bench_nn *s, int on_host, cpa_stream *stream);

/* The tensors of a case; those that it does not have are zero. */
struct cpa_bench_nn {
    cpa_bench_site *site;
    cpa_bench_nn_call *call;
    cpa_device *host; /* for the reference */
    cpa_stream *host_stream;
    int64_t rows, period;
    cpa_bench_tensor in, residual, weight, out;
    cpa_bench_tensor numbers[2], counts; /* arguments of sample: temperature and top_p; top_k */
    cpa_bench_tensor positions, table;   /* of rotations: positions, which are slots as well; table of angles */
    cpa_bench_tensor scales;             /* what codes in `out` are multiplied by */
    cpa_attention_shape shape;
    cpa_kv_view cache;
    void *host_out;
};

static inline int64_t cpa_bench_row_bytes(const cpa_bench_tensor *t) {
    return t->width * cpa_dtype_bytes(t->dtype);
}

static inline void *cpa_bench_memory_of(const cpa_bench_tensor *t, int on_host) {
    return on_host ? t->host : t->device;
}

/* *state, and so *out, is to be released even where this fails. */
cpa_status cpa_bench_nn_prepare(cpa_bench_site *site, int64_t rows, cpa_bench_nn_call *call, cpa_bench_nn **out,
                                void **state, cpa_error *err);
void cpa_bench_nn_release(void *state);

/* Normal noise of that size. */
cpa_status cpa_bench_make_noise(cpa_bench_nn *s, cpa_bench_tensor *t, cpa_dtype dtype, int64_t rows, int64_t width,
                                float size, uint64_t seed, cpa_error *err);
/* A number for each row; `number` has the bytes of the dtype. */
cpa_status cpa_bench_make_numbers(cpa_bench_nn *s, cpa_bench_tensor *t, const void *number, cpa_error *err);
/* Positions 0, 1, ..., which are slots too, and the cosines and sines of all of them for `dim` rotated elements. */
cpa_status cpa_bench_make_positions(cpa_bench_nn *s, int64_t dim, cpa_error *err);
/* s->out, poisoned on the device. */
cpa_status cpa_bench_make_out(cpa_bench_nn *s, cpa_dtype dtype, int64_t width, cpa_error *err);

/* The first period of the results in host_out, and those of the host in out.host. */
cpa_status cpa_bench_nn_reference(cpa_bench_nn *s, cpa_error *err);

/* What a benchmark of such rows runs; and its check, which counts the rows of the first period that are not within a step
 * of the dtype of the host's. */
cpa_status cpa_bench_nn_run(void *state, int64_t call, cpa_error *err);
cpa_status cpa_bench_nn_check(void *state, cpa_bench_row *row, cpa_error *err);

#endif
