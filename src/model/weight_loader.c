#include "src/model/weight_loader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/device.h"

/* Elements that are converted at once. */
enum { STAGED = 1 << 20 };

cpa_status cpa_weight_loader_open(const cpa_safetensors *files, cpa_dtype dtype, cpa_stream *stream,
                                  cpa_weight_loader *out, cpa_error *err) {
    *out = (cpa_weight_loader){.files = files, .dtype = dtype, .stream = stream, .layer = "", .err = err};
    out->wide = malloc(STAGED * sizeof *out->wide);
    if (!out->wide) return cpa_fail(err, CPA_NO_MEMORY, "weights: no memory");
    return stream->device->table->alloc_host(stream->device, STAGED * (int64_t)sizeof(float), &out->staged, err);
}

void cpa_weight_loader_close(cpa_weight_loader *loader) {
    loader->stream->device->table->free_host(loader->stream->device, loader->staged);
    free(loader->wide);
}

static cpa_status failed(const cpa_weight_loader *l, const char *name, cpa_status status) {
    return cpa_fail(l->err, status, "%s: %s", name, l->stream->error.message);
}

cpa_status cpa_weight_loader_wait(const cpa_weight_loader *loader) {
    const cpa_status status = loader->stream->device->table->stream_sync(loader->stream);
    return status == CPA_OK ? CPA_OK : failed(loader, "weights", status);
}

/* So many elements of a tensor from `first` on. */
static cpa_status convert(const cpa_weight_loader *l, const cpa_tensor *tensor, int64_t first, int64_t elements,
                          void *out) {
    const cpa_device_table *table = l->stream->device->table;
    const int64_t from_bytes = cpa_dtype_bytes(tensor->dtype), to_bytes = cpa_dtype_bytes(l->dtype);
    for (int64_t at = 0; at < elements; at += STAGED) {
        const int64_t n = cpa_min64(elements - at, STAGED);
        const char *from = (const char *)tensor->data + (first + at) * from_bytes;
        memcpy(l->staged, from, (size_t)(n * from_bytes)); /* for alignment */
        cpa_widen(l->wide, l->staged, tensor->dtype, n);
        cpa_narrow(l->staged, l->wide, l->dtype, n);
        cpa_status status = table->copy((char *)out + at * to_bytes, l->staged, n * to_bytes, l->stream);
        if (status == CPA_OK) status = table->stream_sync(l->stream);
        if (status != CPA_OK) return failed(l, tensor->name, status);
    }
    return CPA_OK;
}

/* A block of a tensor with rows of `width`. */
static cpa_status copy_block(const cpa_weight_loader *l, const cpa_tensor *tensor, int64_t width, cpa_slice rows,
                             cpa_slice columns, char *out) {
    const int64_t bytes = cpa_dtype_bytes(l->dtype), first = rows.begin * width + columns.begin;
    const char *from = (const char *)tensor->data + first * cpa_dtype_bytes(tensor->dtype);
    cpa_status status;
    if (tensor->dtype == l->dtype) {
        status = l->stream->device->table->copy_rows(out, columns.count * bytes, from, width * bytes,
                                                     columns.count * bytes, rows.count, l->stream);
        return status == CPA_OK ? CPA_OK : failed(l, tensor->name, status);
    }
    if (columns.count == width) return convert(l, tensor, first, rows.count * width, out);
    for (int64_t row = 0; row < rows.count; row++)
        CPA_TRY(convert(l, tensor, first + row * width, columns.count, out + row * columns.count * bytes));
    return CPA_OK;
}

enum { SHAPE_TEXT = 24 * CPA_TENSOR_MAX_DIMS };
static const char *format_shape(const int64_t *shape, int32_t dims, char text[SHAPE_TEXT]) {
    int n = snprintf(text, SHAPE_TEXT, "[");
    for (int32_t i = 0; i < dims; i++)
        n += snprintf(text + n, (size_t)(SHAPE_TEXT - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + n, (size_t)(SHAPE_TEXT - n), "]");
    return text;
}

typedef struct tensor_name {
    char text[160];
} tensor_name;
static tensor_name name_of(const cpa_weight_loader *l, const char *name, const char *kind) {
    tensor_name whole;
    snprintf(whole.text, sizeof whole.text, "%s%s%s%s", l->layer, name, kind ? "." : "", kind ? kind : "");
    return whole;
}

/* The tensor of that name, of a dtype that can be read and of that shape. */
static cpa_status find(const cpa_weight_loader *l, const char *name, const int64_t *shape, int32_t dims,
                       const cpa_tensor **out) {
    const cpa_tensor *tensor = cpa_safetensors_find(l->files, name);
    if (!tensor) return cpa_fail(l->err, CPA_INVALID, "the weights have no tensor %s", name);
    if (tensor->dims != dims || memcmp(tensor->shape, shape, (size_t)dims * sizeof *shape) != 0) {
        char found[SHAPE_TEXT], expected[SHAPE_TEXT];
        return cpa_fail(l->err, CPA_INVALID, "%s: found shape %s, expected %s", name,
                        format_shape(tensor->shape, tensor->dims, found), format_shape(shape, dims, expected));
    }
    if (!tensor->plain) {
        return cpa_fail(l->err, CPA_UNSUPPORTED, "%s: found dtype %s, supported are F32, BF16 and F16", name,
                        tensor->type);
    }
    *out = tensor;
    return CPA_OK;
}

/* What `wanted` of several tensors on top of each other has of the one that begins at row `first`. */
static cpa_slice rows_within(cpa_slice wanted, int64_t first, int64_t rows) {
    const int64_t begin = cpa_max64(wanted.begin, first), end = cpa_min64(wanted.begin + wanted.count, first + rows);
    return begin < end ? (cpa_slice){begin - first, end - begin} : (cpa_slice){0, 0};
}

cpa_status cpa_load_block(const cpa_weight_loader *l, const char *kind, const cpa_weight_part *parts, int n,
                          int64_t columns, cpa_slice own_rows, cpa_slice own_columns, void *out) {
    char *at = out;
    int64_t first = 0;
    for (int i = 0; out && i < n; i++) {
        const int64_t shape[2] = {parts[i].rows, columns};
        const cpa_slice rows = rows_within(own_rows, first, parts[i].rows);
        const cpa_tensor *tensor = NULL;
        CPA_TRY(find(l, name_of(l, parts[i].name, kind).text, shape, columns ? 2 : 1, &tensor));
        if (rows.count > 0) CPA_TRY(copy_block(l, tensor, columns ? columns : 1, rows, own_columns, at));
        at += rows.count * own_columns.count * cpa_dtype_bytes(l->dtype);
        first += parts[i].rows;
    }
    return CPA_OK;
}

cpa_status cpa_load_rows(const cpa_weight_loader *l, const char *kind, const cpa_weight_part *parts, int n,
                         int64_t columns, cpa_slice own_rows, void *out) {
    const int64_t width = columns ? columns : 1;
    char *at = out;
    for (int i = 0; out && i < n; i++) {
        CPA_TRY(cpa_load_block(l, kind, &parts[i], 1, columns, own_rows, (cpa_slice){0, width}, at));
        at += own_rows.count * width * cpa_dtype_bytes(l->dtype);
    }
    return CPA_OK;
}

cpa_status cpa_load_whole(const cpa_weight_loader *l, const char *kind, const cpa_weight_part *part, int64_t columns,
                          void *out) {
    return cpa_load_rows(l, kind, part, 1, columns, (cpa_slice){0, part->rows}, out);
}

cpa_status cpa_load_matrices(const cpa_weight_loader *l, const char *name, int64_t matrices, int64_t rows,
                             int64_t columns, cpa_slice wanted, void *out) {
    const int64_t shape[3] = {matrices, rows, columns};
    const cpa_tensor *tensor = NULL;
    CPA_TRY(find(l, name_of(l, name, NULL).text, shape, 3, &tensor));
    return copy_block(l, tensor, columns, (cpa_slice){wanted.begin * rows, wanted.count * rows},
                      (cpa_slice){0, columns}, out);
}

int cpa_weight_loader_has(const cpa_weight_loader *l, const char *name) {
    return cpa_safetensors_find(l->files, name_of(l, name, NULL).text) != NULL;
}
