#include "src/model/weight_loader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"
#include "kernels/device.h"
#include "src/model/stored_weight.h"

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

/* Elements that are in `wide` to a place, as `dtype`. */
static cpa_status put(const cpa_weight_loader *l, const char *name, int64_t n, cpa_dtype dtype, void *out) {
    const cpa_device_table *table = l->stream->device->table;
    cpa_narrow(l->staged, l->wide, dtype, n);
    cpa_status status = table->copy(out, l->staged, n * cpa_dtype_bytes(dtype), l->stream);
    if (status == CPA_OK) status = table->stream_sync(l->stream);
    return status == CPA_OK ? CPA_OK : failed(l, name, status);
}

/* So many elements of a tensor from `first` on. */
static cpa_status convert(const cpa_weight_loader *l, const cpa_stored_weight *weight, int64_t first, int64_t elements,
                          char *out) {
    for (int64_t at = 0; at < elements; at += STAGED) {
        const int64_t n = cpa_min64(elements - at, STAGED);
        cpa_stored_weight_read(weight, first + at, n, l->wide);
        CPA_TRY(put(l, weight->tensor->name, n, l->dtype, out + at * cpa_dtype_bytes(l->dtype)));
    }
    return CPA_OK;
}

/* A block of a tensor with rows of `width`. */
static cpa_status copy_block(const cpa_weight_loader *l, const cpa_stored_weight *weight, int64_t width, cpa_slice rows,
                             cpa_slice columns, char *out) {
    const cpa_tensor *tensor = weight->tensor;
    const int64_t bytes = cpa_dtype_bytes(l->dtype), first = rows.begin * width + columns.begin;
    if (!weight->scales && tensor->dtype == l->dtype) {
        const char *from = (const char *)tensor->data + first * bytes;
        const cpa_status status = l->stream->device->table->copy_rows(out, columns.count * bytes, from, width * bytes,
                                                                      columns.count * bytes, rows.count, l->stream);
        return status == CPA_OK ? CPA_OK : failed(l, tensor->name, status);
    }
    if (columns.count == width) return convert(l, weight, first, rows.count * width, out);
    for (int64_t row = 0; row < rows.count; row++)
        CPA_TRY(convert(l, weight, first + row * width, columns.count, out + row * columns.count * bytes));
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

/* The tensor of that name, which has that shape. */
static cpa_status find(const cpa_weight_loader *l, const char *name, const int64_t *shape, int32_t dims,
                       cpa_stored_weight *out) {
    const cpa_tensor *tensor = cpa_safetensors_find(l->files, name);
    if (tensor && (tensor->dims != dims || memcmp(tensor->shape, shape, (size_t)dims * sizeof *shape) != 0)) {
        char found[SHAPE_TEXT], expected[SHAPE_TEXT];
        return cpa_fail(l->err, CPA_INVALID, "%s: found shape %s, expected %s", name,
                        format_shape(tensor->shape, tensor->dims, found), format_shape(shape, dims, expected));
    }
    return cpa_stored_weight_find(l->files, name, out, l->err);
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
        cpa_stored_weight weight;
        CPA_TRY(find(l, name_of(l, parts[i].name, kind).text, shape, columns ? 2 : 1, &weight));
        if (rows.count > 0) CPA_TRY(copy_block(l, &weight, columns ? columns : 1, rows, own_columns, at));
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
    cpa_stored_weight weight;
    CPA_TRY(find(l, name_of(l, name, NULL).text, shape, 3, &weight));
    return copy_block(l, &weight, columns, (cpa_slice){wanted.begin * rows, wanted.count * rows},
                      (cpa_slice){0, columns}, out);
}

int cpa_weight_loader_has(const cpa_weight_loader *l, const char *name) {
    return cpa_safetensors_find(l->files, name_of(l, name, NULL).text) != NULL;
}

cpa_status cpa_load_transposed(const cpa_weight_loader *l, const char *name, cpa_head_rows of, int64_t columns,
                               void *out) {
    const int64_t shape[2] = {of.heads * of.rows, columns}, matrix = of.count * columns;
    cpa_stored_weight weight;
    CPA_TRY(find(l, name_of(l, name, NULL).text, shape, 2, &weight));
    float *rows = malloc((size_t)matrix * sizeof *rows);
    cpa_status status = rows && matrix <= STAGED ? CPA_OK : cpa_fail(l->err, CPA_NO_MEMORY, "%s: no memory", name);
    for (int64_t head = 0; status == CPA_OK && head < of.heads; head++) {
        cpa_stored_weight_read(&weight, (head * of.rows + of.first) * columns, matrix, rows);
        for (int64_t i = 0; i < matrix; i++) l->wide[i] = rows[i % of.count * columns + i / of.count];
        status = put(l, name, matrix, l->dtype, (char *)out + head * matrix * cpa_dtype_bytes(l->dtype));
    }
    free(rows);
    return status;
}

cpa_status cpa_load_floats(const cpa_weight_loader *l, const char *name, int64_t n, float *out) {
    cpa_stored_weight weight;
    CPA_TRY(find(l, name_of(l, name, NULL).text, &n, 1, &weight));
    cpa_stored_weight_read(&weight, 0, n, l->wide);
    return put(l, name, n, CPA_F32, out);
}
