#include "src/model/synthetic_expansion.h"

#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/hash.h"
#include "kernels/device.h"

/* Of variance 1: the sum of the four quarters of a hash, each uniform. */
static float noise(uint64_t key) {
    const uint64_t h = cpa_mix64(key);
    float sum = 0;
    for (int part = 0; part < 4; part++) sum += (float)(h >> (16 * part) & 0xffff) * 0x1p-16f - 0.5f;
    return sum * 1.7320508f;
}

/* The matrix of head `index`: [nope + values, latent]. */
static void fill_head(float *matrix, int64_t index, int32_t nope, int32_t values, int32_t latent, uint64_t seed) {
    const float unit = 1 / sqrtf((float)latent);
    const uint64_t first = seed + (uint64_t)index * (uint64_t)(nope + values) * (uint64_t)latent;
    for (int32_t i = 0; i < nope + values; i++) {
        for (int32_t j = 0; j < latent; j++) {
            const float scale = i < nope ? unit / 2 : unit;
            matrix[i * latent + j] =
                scale * noise((first + (uint64_t)(i * latent + j)) * CPA_GOLDEN) + (float)(i == j && i < nope);
        }
    }
}

/* Fills the device's memory with so many heads. */
static cpa_status fill(void *memory, cpa_device *device, const cpa_attention_shape *shape, cpa_row_form widths,
                       int64_t heads, uint64_t seed, cpa_error *err) {
    const int32_t latent = shape->v_dim, nope = widths.k_dim - (shape->k_dim - latent);
    const int64_t n = (int64_t)(nope + widths.v_dim) * latent, bytes = n * cpa_dtype_bytes(shape->dtype);
    float *matrix = malloc((size_t)n * sizeof *matrix);
    char *all = malloc((size_t)(heads * bytes));
    cpa_stream *stream = NULL;
    cpa_status status = matrix && all ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "synthetic model: no memory");
    for (int64_t head = 0; status == CPA_OK && head < heads; head++) {
        fill_head(matrix, head, nope, widths.v_dim, latent, seed);
        cpa_narrow(all + head * bytes, matrix, shape->dtype, n);
    }
    if (status == CPA_OK) status = device->table->stream_create(device, &stream, err);
    if (stream && status == CPA_OK) {
        status = device->table->copy(memory, all, heads * bytes, stream);
        if (status == CPA_OK) status = device->table->stream_sync(stream);
        if (status != CPA_OK) cpa_fail(err, status, "synthetic model: %s", stream->error.message);
    }
    if (stream) device->table->stream_destroy(stream);
    free(all);
    free(matrix);
    return status;
}

/* Whether a form has heads that latents could be expanded to; the context refuses what has none. */
static int has_heads(const cpa_attention_shape *shape, cpa_row_form widths) {
    return widths.k_dim > shape->k_dim - shape->v_dim && widths.k_dim <= CPA_MAX_HEAD_DIM && widths.v_dim > 0 &&
           widths.v_dim <= CPA_MAX_HEAD_DIM;
}

cpa_status cpa_synthetic_expansion_make(cpa_synthetic_expansion *expansion, cpa_device *device,
                                        const cpa_model_shape *model, uint64_t seed, cpa_error *err) {
    const cpa_attention_shape *shape = &model->attention;
    expansion->n_forms = model->n_forms;
    for (int32_t f = 0; f < model->n_forms; f++) {
        const cpa_row_form widths = model->forms[f].widths;
        expansion->forms[f] = model->forms[f];
        if (!widths.expanded || !has_heads(shape, widths)) continue;
        const int64_t rows = widths.k_dim - (shape->k_dim - shape->v_dim) + widths.v_dim;
        const int64_t head_bytes = rows * shape->v_dim * cpa_dtype_bytes(shape->dtype);
        const int64_t heads = (int64_t)shape->q_heads + model->layers - 1;
        if (expansion->memory)
            return cpa_fail(err, CPA_UNSUPPORTED, "synthetic model: several forms are expanded, expected one");
        CPA_TRY(device->table->alloc(device, heads * head_bytes, &expansion->memory, err));
        CPA_TRY(fill(expansion->memory, device, shape, widths, heads, seed, err));
        expansion->layers[f] = calloc((size_t)model->layers, sizeof(void *));
        if (!expansion->layers[f]) return cpa_fail(err, CPA_NO_MEMORY, "synthetic model: no memory");
        for (int32_t layer = 0; layer < model->layers; layer++)
            expansion->layers[f][layer] = (char *)expansion->memory + layer * head_bytes;
        expansion->forms[f].layer_expansions = expansion->layers[f];
    }
    return CPA_OK;
}

void cpa_synthetic_expansion_free(cpa_synthetic_expansion *expansion, cpa_device *device) {
    for (int32_t f = 0; f < CPA_MOST_ROW_FORMS; f++) free(expansion->layers[f]);
    if (device) device->table->free(device, expansion->memory);
    *expansion = (cpa_synthetic_expansion){.memory = NULL};
}
