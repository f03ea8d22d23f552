/* Blocks of a caller's cache as rows of tokens: each layer goes through blocks in the order of tokens, in memory of the
 * device, and, unless the rows are there too, through page-locked memory of the host. Rows on the device that have no
 * scales of their own are blocks of a cache by themselves, with other strides: these go from one to the other at
 * once. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/blocks.h>
#include <cpattn/ops.h>

#include "base/struct_size.h"
#include "kernels/block_layout.h"
#include "kernels/device.h"
#include "kernels/kv_view.h"
#include "src/ops/check_args.h"

/* Staging of one pass: as many blocks as fit, at least one. */
enum { STAGING_BYTES = 32 << 20 };

/* A layer's blocks in the order of tokens. */
static cpa_block_layout layout_of(const cpa_kv_view *kv) {
    cpa_attention_shape shape = cpa_kv_view_shape(kv);
    shape.layout = CPA_TOKEN_MAJOR;
    return cpa_block_layout_of(&shape, kv->block_size);
}

static int64_t row_bytes_of(const cpa_block_section *section) {
    return section->heads * (section->row_bytes + section->scale_bytes);
}

static int64_t layer_row_bytes(const cpa_block_layout *layout) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < layout->n_sections; i++) bytes += row_bytes_of(&layout->sections[i]);
    return bytes;
}

int64_t cpa_blocks_row_bytes(const cpa_kv_view *layers, int32_t n_layers) {
    int64_t bytes = 0;
    for (int32_t i = 0; layers && i < n_layers; i++) {
        if (cpa_check_view("blocks", &layers[i], NULL) != CPA_OK) return 0;
        const cpa_block_layout layout = layout_of(&layers[i]);
        bytes += layer_row_bytes(&layout);
    }
    return bytes;
}

static cpa_status check(const char *where, const cpa_blocks_args *args, int is_import, cpa_error *err) {
    REQUIRE(err, args->n_layers >= 1 && args->layers, "%s: n_layers is %d and layers is %s; expected at least 1", where,
            args->n_layers, args->layers ? "set" : "NULL");
    for (int32_t i = 0; i < args->n_layers; i++) {
        CPA_TRY(cpa_check_view(where, &args->layers[i], err));
        REQUIRE(err,
                args->layers[i].block_size == args->layers[0].block_size &&
                    args->layers[i].num_blocks == args->layers[0].num_blocks,
                "%s: layers[%d] has %lld blocks of %d tokens, and layers[0] %lld of %d", where, i,
                (long long)args->layers[i].num_blocks, args->layers[i].block_size,
                (long long)args->layers[0].num_blocks, args->layers[0].block_size);
    }
    REQUIRE(err, args->n >= 0 && args->n <= INT32_MAX && (args->n == 0 || (args->ids && args->rows)),
            "%s: n is %lld, ids is %s and rows is %s", where, (long long)args->n, args->ids ? "set" : "NULL",
            args->rows ? "set" : "NULL");
    cpa_checked_range *used = malloc((size_t)(args->n + 1) * sizeof *used);
    if (!used) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the check of its ids", where);
    cpa_status status = CPA_OK;
    for (int64_t i = 0; i < args->n && status == CPA_OK; i++) {
        used[i] = (cpa_checked_range){args->ids[i], (int64_t)args->ids[i] + 1, i};
        if (args->ids[i] < 0 || args->ids[i] >= args->layers[0].num_blocks)
            status = cpa_fail(err, CPA_INVALID, "%s: ids[%lld] is %d, expected 0 to %lld", where, (long long)i,
                              args->ids[i], (long long)args->layers[0].num_blocks - 1);
    }
    if (status == CPA_OK && is_import) status = cpa_check_disjoint(where, "ids", "block", used, args->n, err);
    free(used);
    return status;
}

/* Of one call: staging of `capacity` blocks in each layer, one layer behind the other. */
typedef struct staging {
    char *device, *host;
    int64_t capacity, bytes;
    int64_t (*pairs)[2]; /* [capacity] */
} staging;

static cpa_status open_pairs(int64_t n, cpa_stream *stream, staging *out) {
    out->pairs = malloc((size_t)n * sizeof *out->pairs);
    return out->pairs ? CPA_OK : cpa_fail(&stream->error, CPA_NO_MEMORY, "blocks: no memory for a list of blocks");
}

static cpa_status open_staging(const cpa_blocks_args *args, cpa_stream *stream, staging *out) {
    const cpa_device_table *table = stream->device->table;
    int64_t block_bytes = 0;
    for (int32_t i = 0; i < args->n_layers; i++) block_bytes += layout_of(&args->layers[i]).bytes;
    out->capacity = STAGING_BYTES / block_bytes;
    if (out->capacity > args->n) out->capacity = args->n;
    if (out->capacity < 1) out->capacity = 1;
    out->bytes = out->capacity * block_bytes;
    CPA_TRY(open_pairs(out->capacity, stream, out));
    void *memory;
    CPA_TRY(table->alloc(stream->device, out->bytes, &memory, &stream->error));
    out->device = memory;
    if (args->rows_on_device) return CPA_OK;
    CPA_TRY(table->alloc_host(stream->device, out->bytes, &memory, &stream->error));
    out->host = memory;
    return CPA_OK;
}

static void close_staging(staging *s, cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    if (s->host) table->free_host(stream->device, s->host);
    if (s->device) table->free(stream->device, s->device);
    free(s->pairs);
}

/* One pass: blocks [first, first + n) of the list. */
typedef struct pass {
    const cpa_blocks_args *args;
    const staging *staging;
    cpa_stream *stream;
    int is_import;
    int64_t first, n, row_bytes;
} pass;

/* Between the cache of a layer and its blocks in other memory. */
static cpa_status move_blocks(const pass *p, const cpa_kv_view *kv, const cpa_kv_view *others) {
    const int64_t(*pairs)[2] = (const int64_t(*)[2])p->staging->pairs;
    const cpa_kv_view *src = p->is_import ? others : kv, *dst = p->is_import ? kv : others;
    /* Strides say all of the other orders. */
    if (kv->layout == CPA_VLLM_X)
        return cpa_kv_convert(&(cpa_kv_convert_args){sizeof(cpa_kv_convert_args), *src, *dst, pairs, p->n}, p->stream);
    return cpa_kv_copy(&(cpa_kv_copy_args){sizeof(cpa_kv_copy_args), *src, *dst, pairs, p->n}, p->stream);
}

/* Numbers of the blocks of the pass in the cache, and in the other memory, where they lie in their order. */
static void pair_blocks(const pass *p) {
    for (int64_t i = 0; i < p->n; i++) {
        p->staging->pairs[i][p->is_import] = p->args->ids[p->first + i];
        p->staging->pairs[i][!p->is_import] = i;
    }
}

static cpa_status move_layers(const pass *p) {
    char *at = p->staging->device;
    pair_blocks(p);
    for (int32_t i = 0; i < p->args->n_layers; i++) {
        const cpa_kv_view *kv = &p->args->layers[i];
        const cpa_block_layout layout = layout_of(kv);
        const cpa_kv_view staged = cpa_block_layout_view(&layout, at, p->staging->capacity, 0);
        CPA_TRY(move_blocks(p, kv, &staged));
        at += p->staging->capacity * layout.bytes;
    }
    return CPA_OK;
}

/* The row of one token between a block of a layer and the row of all layers. */
static void move_row(const cpa_block_layout *layout, char *block, int64_t token, char *row, int is_import) {
    for (int32_t i = 0; i < layout->n_sections; i++) {
        const cpa_block_section *section = &layout->sections[i];
        const int64_t bytes = section->heads * section->row_bytes, word = section->scale_bytes;
        char *rows = block + section->at + token * bytes;
        memcpy(is_import ? rows : row, is_import ? row : rows, (size_t)bytes);
        row += bytes;
        char *scales = block + section->at + section->scales_at;
        for (int32_t head = 0; head < section->heads && word > 0; head++, row += word) {
            char *scale = scales + (head * layout->block_size + token) * word;
            memcpy(is_import ? scale : row, is_import ? row : scale, (size_t)word);
        }
    }
}

/* The same of all tokens of a block, in memory of the device. */
static cpa_status move_block_on_device(const pass *p, const cpa_block_layout *layout, char *block, char *rows) {
    const cpa_device_table *table = p->stream->device->table;
    const int64_t tokens = layout->block_size, pitch = p->row_bytes;
    for (int32_t i = 0; i < layout->n_sections; i++) {
        const cpa_block_section *section = &layout->sections[i];
        const int64_t bytes = section->heads * section->row_bytes, word = section->scale_bytes;
        char *at = block + section->at;
        CPA_TRY(p->is_import ? table->copy_rows(at, bytes, rows, pitch, bytes, tokens, p->stream)
                             : table->copy_rows(rows, pitch, at, bytes, bytes, tokens, p->stream));
        rows += bytes;
        at += section->scales_at;
        for (int32_t head = 0; head < section->heads && word > 0; head++, at += tokens * word, rows += word)
            CPA_TRY(p->is_import ? table->copy_rows(at, word, rows, pitch, word, tokens, p->stream)
                                 : table->copy_rows(rows, pitch, at, word, word, tokens, p->stream));
    }
    return CPA_OK;
}

/* The rows of the pass and the bytes of its staging that they go with, layer by layer: on the device, or on the
 * host. */
static cpa_status move_rows(const pass *p) {
    const int64_t block_size = p->args->layers[0].block_size;
    const int on_device = p->args->rows_on_device;
    char *blocks = on_device ? p->staging->device : p->staging->host;
    char *rows = (char *)p->args->rows + p->first * block_size * p->row_bytes;
    for (int32_t layer = 0; layer < p->args->n_layers; layer++) {
        const cpa_block_layout layout = layout_of(&p->args->layers[layer]);
        for (int64_t i = 0; i < p->n && on_device; i++)
            CPA_TRY(move_block_on_device(p, &layout, blocks + i * layout.bytes, rows + i * block_size * p->row_bytes));
        for (int64_t i = 0; i < p->n * block_size && !on_device; i++)
            move_row(&layout, blocks + i / block_size * layout.bytes, i % block_size, rows + i * p->row_bytes,
                     p->is_import);
        blocks += p->staging->capacity * layout.bytes;
        rows += layer_row_bytes(&layout);
    }
    return CPA_OK;
}

/* Through page-locked memory of the host, unless rows are on the device. */
static cpa_status run_pass(const pass *p) {
    const cpa_device_table *table = p->stream->device->table;
    const staging *s = p->staging;
    const int on_device = p->args->rows_on_device;
    if (p->is_import) {
        CPA_TRY(move_rows(p));
        if (!on_device) CPA_TRY(table->copy(s->device, s->host, s->bytes, p->stream));
        CPA_TRY(move_layers(p));
        return table->stream_sync(p->stream);
    }
    CPA_TRY(move_layers(p));
    if (!on_device) CPA_TRY(table->copy(s->host, s->device, s->bytes, p->stream));
    if (!on_device) CPA_TRY(table->stream_sync(p->stream));
    CPA_TRY(move_rows(p));
    return on_device ? table->stream_sync(p->stream) : CPA_OK;
}

/* ---- rows on the device as they are ---- */

/* Whether rows of the layers are blocks of a cache by themselves: none has scales behind the rows of a block, or in a
 * row, and each begins where kernels load it. */
static int are_blocks(const cpa_blocks_args *args) {
    int64_t multiple = cpa_blocks_row_bytes(args->layers, args->n_layers) | (int64_t)(uintptr_t)args->rows;
    for (int32_t layer = 0; layer < args->n_layers; layer++) {
        const cpa_block_layout layout = layout_of(&args->layers[layer]);
        for (int32_t i = 0; i < layout.n_sections; i++) {
            const cpa_block_section *section = &layout.sections[i];
            if (section->scale_bytes > 0 ||
                section->row_bytes != section->width * cpa_dtype_bytes(layout.shape.kv_dtype))
                return 0;
            multiple |= section->row_bytes;
        }
    }
    return args->rows_on_device && multiple % CPA_SECTION_ALIGNMENT == 0;
}

/* The rows of a layer, which begin at `at` in those of all, as blocks. */
static cpa_kv_view view_rows(const pass *p, const cpa_block_layout *layout, char *at) {
    cpa_kv_view view = cpa_block_layout_view(layout, at, p->n, 0);
    const int64_t stride = p->row_bytes / cpa_dtype_bytes(view.dtype);
    if (!view.v_in_k) view.v = at + row_bytes_of(&layout->sections[0]);
    view.k_token_stride = view.v_token_stride = stride;
    view.k_block_stride = view.v_block_stride = stride * layout->block_size;
    return view;
}

static cpa_status move_directly(const pass *p, staging *s) {
    char *at = p->args->rows;
    CPA_TRY(open_pairs(p->n, p->stream, s));
    pair_blocks(p);
    for (int32_t i = 0; i < p->args->n_layers; i++) {
        const cpa_block_layout layout = layout_of(&p->args->layers[i]);
        const cpa_kv_view rows = view_rows(p, &layout, at);
        CPA_TRY(move_blocks(p, &p->args->layers[i], &rows));
        at += layer_row_bytes(&layout);
    }
    return p->stream->device->table->stream_sync(p->stream);
}

static cpa_status move_in_passes(pass *p, staging *s) {
    CPA_TRY(open_staging(p->args, p->stream, s));
    for (; p->first < p->args->n; p->first += p->n) {
        p->n = p->args->n - p->first < s->capacity ? p->args->n - p->first : s->capacity;
        CPA_TRY(run_pass(p));
    }
    return CPA_OK;
}

static cpa_status move_all(const char *where, const cpa_blocks_args *given, int is_import, cpa_stream *stream) {
    cpa_blocks_args args;
    staging s = {0};
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE(where, given, cpa_blocks_args, rows, &args, &stream->error));
    CPA_TRY(check(where, &args, is_import, &stream->error));
    if (args.n == 0) return CPA_OK;
    pass p = {&args, &s, stream, is_import, 0, args.n, cpa_blocks_row_bytes(args.layers, args.n_layers)};
    const cpa_status status = are_blocks(&args) ? move_directly(&p, &s) : move_in_passes(&p, &s);
    close_staging(&s, stream);
    return status;
}

cpa_status cpa_blocks_export(const cpa_blocks_args *args, cpa_stream *stream) {
    return move_all("blocks_export", args, 0, stream);
}

cpa_status cpa_blocks_import(const cpa_blocks_args *args, cpa_stream *stream) {
    return move_all("blocks_import", args, 1, stream);
}
