#include "src/context/expanded_keys.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/kv_view.h"

/* What begins in the workspace does so at multiples of this many bytes. */
enum { ALIGNMENT = 256 };

/* ---- the workspace ---- */

static int64_t aligned(int64_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Bytes of a latent as a row, and of what it is expanded to. */
static int64_t latent_bytes(const cpa_context_options *options) {
    return options->shape.k_dim * cpa_dtype_bytes(options->shape.dtype);
}

static int64_t token_bytes(const cpa_context_options *options, const cpa_form *form) {
    return latent_bytes(options) + cpa_shape_k_bytes(&form->shape) + cpa_shape_v_bytes(&form->shape);
}

/* Latents, keys and values of the tokens of a pass, one behind the other. States lie elsewhere. */
static cpa_key_room room_of(const cpa_context_options *options, const cpa_form *form, int64_t split, int64_t bytes) {
    return (cpa_key_room){.bytes = bytes - 2 * ALIGNMENT,
                          .token_bytes = token_bytes(options, form),
                          .unit = options->block_size,
                          .step = split};
}

int64_t cpa_expanded_keys_least(const cpa_context_options *options, const cpa_form *form, int64_t split) {
    const cpa_key_room none = room_of(options, form, split, 0);
    return form->is_expanded ? cpa_key_room_least(&none) - none.bytes : 0;
}

/* ---- a setting ---- */

/* Room for n items, what they are made of, and so many entries of tables and blocks of the workspace. */
static cpa_status reserve(cpa_expanded_keys *keys, cpa_context_ops *ops, int64_t n, int64_t entries) {
    CPA_TRY(cpa_context_ensure_array(ops, &keys->items, &keys->items_capacity, n, sizeof *keys->items));
    CPA_TRY(cpa_context_ensure_array(ops, &keys->latents, &keys->latents_capacity, n, sizeof *keys->latents));
    CPA_TRY(cpa_context_ensure_array(ops, &keys->spans, &keys->spans_capacity, n, sizeof *keys->spans));
    CPA_TRY(cpa_context_ensure_array(ops, &keys->table, &keys->table_capacity, entries, sizeof *keys->table));
    CPA_TRY(cpa_context_ensure_array(ops, &keys->places, &keys->places_capacity, entries, sizeof *keys->places));
    keys->n_entries = entries;
    for (; keys->n_places < entries; keys->n_places++) keys->places[keys->n_places] = (int32_t)keys->n_places;
    return CPA_OK;
}

/* The keys of the first n of ops->items, and the passes that they make. */
static cpa_status cut_passes(cpa_expanded_keys *keys, cpa_context_ops *ops, const cpa_form *form, int64_t n) {
    const cpa_key_room room = room_of(&ops->options, form, ops->split, ops->workspace.bytes);
    CPA_TRY(cpa_context_ensure_array(ops, &keys->keys, &keys->keys_capacity, n, sizeof *keys->keys));
    for (int64_t i = 0; i < n; i++) keys->keys[i] = (cpa_key_item){ops->items[i].q_count, ops->items[i].k_count};
    keys->n_passes = cpa_key_passes(&room, keys->keys, n, NULL);
    CPA_TRY(cpa_context_ensure_array(ops, &keys->cut, &keys->cut_capacity, keys->n_passes, sizeof *keys->cut));
    CPA_TRY(cpa_context_ensure_array(ops, &keys->passes, &keys->passes_capacity, keys->n_passes, sizeof *keys->passes));
    cpa_key_passes(&room, keys->keys, n, keys->cut);
    return CPA_OK;
}

static int64_t blocks_of(const cpa_context_ops *ops, int64_t tokens) {
    return (tokens + ops->options.block_size - 1) / ops->options.block_size;
}

/* Copies the entries of the first n of ops->items out of the tables; each begins where the one before ends. */
static void copy_tables(cpa_expanded_keys *keys, const cpa_context_ops *ops, int64_t n, const int32_t *block_tables) {
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t blocks = blocks_of(ops, ops->items[i].k_count);
        if (blocks > 0)
            memcpy(keys->table + at, block_tables + ops->items[i].table, (size_t)blocks * sizeof *keys->table);
        at += blocks;
    }
}

/* Lists the items of a pass behind those of the passes before, and gives their blocks places in the workspace. *entry:
 * the first entry of the pass's first item. */
static void list_items(cpa_expanded_keys *keys, const cpa_context_ops *ops, const cpa_key_pass *cut, int64_t *entry,
                       cpa_expanded_pass *pass) {
    int64_t place = 0;
    pass->n_items = cut->n_items;
    pass->resumes = cut->is_cut && cut->key > 0;
    for (int64_t i = 0; i < cut->n_items; i++) {
        const cpa_attend_item *given = &ops->items[cut->item + i];
        cpa_attend_item *item = &keys->items[pass->item + i];
        *item = *given;
        item->table = place;
        keys->latents[pass->item + i] = *entry;
        if (cut->is_cut) {
            keys->latents[pass->item + i] += cut->key / ops->options.block_size;
            item->k_first += cut->key;
            item->k_count = cut->keys;
        }
        if (!cut->is_cut || cut->key + cut->keys == given->k_count) *entry += blocks_of(ops, given->k_count);
        pass->rows = place * ops->options.block_size + item->k_count;
        place += blocks_of(ops, item->k_count);
    }
}

static cpa_status set_pass(cpa_expanded_keys *keys, cpa_context_ops *ops, const cpa_form *form, int64_t index) {
    static const cpa_key_workspace none = {NULL, 0}; /* what is expanded lies as kernels take it */
    cpa_expanded_pass *pass = &keys->passes[index];
    const cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = ops->map,
        .shape = form->shape,
        .block_size = ops->options.block_size,
        .items = keys->items + pass->item,
        .n_items = pass->n_items,
        .block_tables = keys->places,
        .n_table_entries = keys->n_places,
        .cascade_attention = CPA_CASCADE_OFF,
    };
    const cpa_attend_fusion fusion = {.masked = ops->masked};
    if (index == keys->n_plans) {
        CPA_TRY(ops->device->operators->plan_create(ops->device, &none, &pass->plan, &ops->error));
        keys->n_plans++;
    }
    CPA_TRY(ops->device->operators->plan_set(pass->plan, &batch, fusion, &ops->error));
    ops->keys_attended += pass->plan->keys_attended;
    ops->keys_read += pass->plan->keys_read;
    return CPA_OK;
}

cpa_status cpa_expanded_keys_set(cpa_expanded_keys *keys, cpa_context_ops *ops, const cpa_form *form, int64_t n_items,
                                 const int32_t *block_tables) {
    int64_t n = 0, entries = 0, entry = 0;
    keys->n_passes = 0;
    if (n_items == 0) return CPA_OK;
    CPA_TRY(cut_passes(keys, ops, form, n_items));
    for (int64_t i = 0; i < keys->n_passes; i++) n += keys->cut[i].n_items;
    for (int64_t i = 0; i < n_items; i++) entries += blocks_of(ops, ops->items[i].k_count);
    CPA_TRY(reserve(keys, ops, n, entries));
    copy_tables(keys, ops, n_items, block_tables);
    n = 0;
    for (int64_t i = 0; i < keys->n_passes; i++) {
        keys->passes[i].item = n;
        list_items(keys, ops, &keys->cut[i], &entry, &keys->passes[i]);
        n += keys->passes[i].n_items;
        CPA_TRY(set_pass(keys, ops, form, i));
    }
    return CPA_OK;
}

void cpa_expanded_keys_free(cpa_expanded_keys *keys, const cpa_context_ops *ops) {
    for (int64_t i = 0; i < keys->n_plans; i++) ops->device->operators->plan_destroy(keys->passes[i].plan);
    free(keys->cut);
    free(keys->keys);
    free(keys->places);
    free(keys->table);
    free(keys->spans);
    free(keys->latents);
    free(keys->items);
    free(keys->passes);
}

/* ---- one attend ---- */

/* Where the latents, the keys and the values of a pass lie. */
typedef struct expanded_memory {
    void *latents;
    cpa_kv_view kv;
} expanded_memory;

static expanded_memory memory_of(const cpa_context_ops *ops, const cpa_form *form) {
    const cpa_context_options *o = &ops->options;
    const cpa_key_room room = room_of(o, form, ops->split, ops->workspace.bytes);
    const int64_t blocks = room.bytes / room.token_bytes / o->block_size, tokens = blocks * o->block_size;
    const int64_t keys_at = aligned(tokens * latent_bytes(o));
    expanded_memory memory = {ops->workspace.memory, cpa_kv_view_of(&form->shape, o->block_size, blocks)};
    memory.kv.k = ops->workspace.memory + keys_at;
    memory.kv.v = ops->workspace.memory + keys_at + aligned(tokens * cpa_shape_k_bytes(&form->shape));
    return memory;
}

/* What a pass gathers: the latents of items of which some row sees any. */
static int64_t list_spans(const cpa_expanded_keys *keys, const cpa_context_ops *ops, const cpa_expanded_pass *pass,
                          const cpa_attend_args *args) {
    const int has_bits = args->selection && args->selection->bits;
    int64_t n = 0;
    for (int64_t i = pass->item; i < pass->item + pass->n_items; i++) {
        const cpa_attend_item *item = &keys->items[i];
        if (!cpa_key_item_sees(ops->map, args->mask, has_bits, item)) continue;
        keys->spans[n++] = (cpa_kv_span){
            .table = keys->latents[i], .count = item->k_count, .dst_row = item->table * ops->options.block_size};
    }
    return n;
}

/* Latents, as rows, times the matrices of some heads, whatever these are. */
static cpa_latent_expand_args product_of(const cpa_context_ops *ops, const cpa_form *form,
                                         const expanded_memory *memory) {
    const cpa_attention_shape *from = &ops->options.shape, *to = &form->shape;
    return (cpa_latent_expand_args){
        .size = sizeof(cpa_latent_expand_args),
        .dtype = from->dtype,
        .latent_dim = from->v_dim,
        .rope_dim = from->k_dim - from->v_dim,
        .heads = to->kv_heads,
        .nope_dim = to->k_dim - (from->k_dim - from->v_dim),
        .v_dim = to->v_dim,
        .latents = memory->latents,
        .latent_row_stride = from->k_dim,
        .k = memory->kv.k,
        .k_row_stride = (int64_t)to->kv_heads * to->k_dim,
        .v = memory->kv.v,
        .v_row_stride = (int64_t)to->kv_heads * to->v_dim,
    };
}

/* Gathers the latents of a pass, and multiplies them. */
static cpa_status expand(const cpa_expanded_keys *keys, const cpa_context_ops *ops, const cpa_form *form,
                         const cpa_form_layer *layer, const cpa_expanded_pass *pass, int64_t n_spans,
                         const expanded_memory *memory, const cpa_kv_view *cache, cpa_stream *stream) {
    const cpa_attention_shape *from = &ops->options.shape;
    const cpa_latent_gather_args gather = {
        .size = sizeof gather,
        .src = *cache,
        .block_tables = keys->table,
        .n_table_entries = keys->n_entries,
        .spans = keys->spans,
        .n_spans = n_spans,
        .dst = memory->latents,
        .dst_rows = pass->rows,
        .dst_row_stride = from->k_dim,
        .dst_dtype = from->dtype,
    };
    cpa_latent_expand_args product = product_of(ops, form, memory);
    product.tokens = pass->rows;
    product.w_kv_b = layer->rows.expansion;
    CPA_TRY(ops->device->operators->latent_gather(&gather, stream));
    return ops->device->operators->latent_expand(&product, stream);
}

/* Rows and matrices are whatever lies in the workspace. */
cpa_status cpa_expanded_keys_warm_up(cpa_context_ops *ops, const cpa_form *form) {
    enum { WARM_ROWS = 64 };
    const cpa_device_table *table = ops->device->table;
    const expanded_memory memory = memory_of(ops, form);
    const int64_t tokens = memory.kv.num_blocks * memory.kv.block_size, row_bytes = cpa_shape_k_bytes(&form->shape);
    cpa_latent_expand_args product = product_of(ops, form, &memory);
    product.tokens = cpa_min64(WARM_ROWS, tokens / 2);
    const int64_t matrices_at = aligned(product.tokens * row_bytes);
    const int64_t head_bytes =
        (int64_t)(product.nope_dim + product.v_dim) * product.latent_dim * cpa_dtype_bytes(product.dtype);
    product.heads = (int32_t)cpa_min64(product.heads, (tokens * row_bytes - matrices_at) / head_bytes);
    product.w_kv_b = (const char *)memory.kv.k + matrices_at;
    if (!ops->device->caps.asynchronous || product.tokens < 1 || product.heads < 1) return CPA_OK;
    cpa_stream *stream;
    CPA_TRY(table->stream_create(ops->device, &stream, &ops->error));
    cpa_status status = ops->device->operators->latent_expand(&product, stream);
    if (status == CPA_OK) status = table->stream_sync(stream);
    status = cpa_context_check(ops, status, stream);
    table->stream_destroy(stream);
    return status;
}

/* Later keys of an item that none of its rows sees leave the states as they are. */
cpa_status cpa_expanded_keys_attend(const cpa_expanded_keys *keys, const cpa_context_ops *ops, const cpa_form *form,
                                    const cpa_form_layer *layer, const cpa_attend_args *args, cpa_stream *stream) {
    const expanded_memory memory = memory_of(ops, form);
    cpa_attend_args attend = *args;
    attend.kv = memory.kv;
    for (int64_t i = 0; i < keys->n_passes; i++) {
        const cpa_expanded_pass *pass = &keys->passes[i];
        const int64_t n_spans = list_spans(keys, ops, pass, args);
        attend.resume = args->resume || pass->resumes;
        if (n_spans == 0 && attend.resume) continue;
        if (n_spans > 0) CPA_TRY(expand(keys, ops, form, layer, pass, n_spans, &memory, &args->kv, stream));
        CPA_TRY(ops->device->operators->attend(pass->plan, &attend, NULL, stream));
    }
    return CPA_OK;
}
