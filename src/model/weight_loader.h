/* Copies tensors of safetensors files, or blocks of them, to memory of a device, and converts where the files have
 * another dtype, or codes (stored_weight.h). Tensors that the model has as one matrix are read one behind the other. */
#ifndef CPA_MODEL_WEIGHT_LOADER_H
#define CPA_MODEL_WEIGHT_LOADER_H

#include <cpattn/device.h>

#include "src/model/safetensors.h"
#include "src/model/sliced_linear.h"

/* What the loading of all tensors shares. */
typedef struct cpa_weight_loader {
    const cpa_safetensors *files;
    cpa_dtype dtype;
    cpa_stream *stream;
    float *wide;    /* elements of a tensor of another dtype, in fp32 */
    void *staged;   /* page-locked: elements of such a tensor before and after conversion */
    char layer[32]; /* what the names of a layer's tensors begin with */
    cpa_error *err;
} cpa_weight_loader;

/* What is opened is closed, whatever has failed. */
cpa_status cpa_weight_loader_open(const cpa_safetensors *files, cpa_dtype dtype, cpa_stream *stream,
                                  cpa_weight_loader *out, cpa_error *err);
void cpa_weight_loader_close(cpa_weight_loader *loader);
/* Waits for all copies; also what a call below that fails needs not. */
cpa_status cpa_weight_loader_wait(const cpa_weight_loader *loader);

/* Tensors of a layer that follow each other in one matrix, or one bias, in that order; names without the layer's. */
typedef struct cpa_weight_part {
    const char *name;
    int64_t rows;
} cpa_weight_part;

/* Each copies to `out`, contiguous, from tensors [rows, columns], or with columns = 0 [rows], named LAYER + NAME +
 * "." + kind. CPA_INVALID names a tensor that is missing or has another shape. Nothing is done where out is NULL.
 *
 * The rows and columns that are wanted of what the parts are together; a bias has columns = 0. */
cpa_status cpa_load_block(const cpa_weight_loader *loader, const char *kind, const cpa_weight_part *parts, int n,
                          int64_t columns, cpa_slice own_rows, cpa_slice own_columns, void *out);
/* The rows that are wanted of each part. */
cpa_status cpa_load_rows(const cpa_weight_loader *loader, const char *kind, const cpa_weight_part *parts, int n,
                         int64_t columns, cpa_slice own_rows, void *out);
cpa_status cpa_load_whole(const cpa_weight_loader *loader, const char *kind, const cpa_weight_part *part,
                          int64_t columns, void *out);
/* The matrices `wanted` of a tensor [matrices, rows, columns] that is named LAYER + name. */
cpa_status cpa_load_matrices(const cpa_weight_loader *loader, const char *name, int64_t matrices, int64_t rows,
                             int64_t columns, cpa_slice wanted, void *out);
/* Of a matrix of `heads` times `rows` rows, the rows [first, first + count) of each head, transposed: out [heads,
 * columns, count]. */
typedef struct cpa_head_rows {
    int64_t heads, rows, first, count;
} cpa_head_rows;
cpa_status cpa_load_transposed(const cpa_weight_loader *loader, const char *name, cpa_head_rows of, int64_t columns,
                               void *out);
/* A tensor [n] named LAYER + name as fp32, whatever the dtype. */
cpa_status cpa_load_floats(const cpa_weight_loader *loader, const char *name, int64_t n, float *out);
/* Whether the files have LAYER + name. */
int cpa_weight_loader_has(const cpa_weight_loader *loader, const char *name);

#endif
