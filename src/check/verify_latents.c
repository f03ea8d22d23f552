#include "src/check/verify_latents.h"

#include <stdio.h>
#include <string.h>

#include "src/check/reference_rows.h"

enum { SWAPPED_HALVES = 0, LATE_VALUES, FIRST_TILE };

/* Tiles that have a scale, of a row of latents. */
static int32_t tiles_of(const cpa_attention_shape *cache) {
    const cpa_row_traits *row = &cpa_dtype_traits_of(cache->kv_dtype)->rows[CPA_KEYS];
    return row->tile > 0 ? (cache->k_dim - row->tail) / row->tile : 1;
}

void cpa_verify_latents_begin(cpa_verify_latents *latents, const cpa_verify *verify, const cpa_reference_row *row) {
    const cpa_attention_shape *cache = &verify->worker->options.model.attention;
    const int32_t tiles = tiles_of(cache) < CPA_VERIFY_MOST_TILES ? tiles_of(cache) : CPA_VERIFY_MOST_TILES;
    latents->count = cache->v_in_k ? FIRST_TILE + tiles - 1 : 0;
    for (int32_t i = 0; i < latents->count; i++) {
        cpa_reference_begin(&latents->rows[i], row->q, row->k_dim, row->v_dim, row->dtype, row->scale);
        cpa_reference_set_rules(&latents->rows[i], &row->rules);
    }
}

/* A row of the cache, read with the scale of tile `before` for the tile after it too. */
static void take_scale(const cpa_attention_shape *cache, const cpa_verify_piece *piece, int64_t index, int32_t before,
                       float *row) {
    const cpa_row_traits *traits = &cpa_dtype_traits_of(cache->kv_dtype)->rows[CPA_KEYS];
    const int64_t bytes = cpa_shape_row_bytes(cache, CPA_KEYS);
    const int64_t behind = cpa_kv_scale_bytes(cache->kv_dtype, CPA_KEYS, 0);
    const int64_t scale_bytes = behind ? 1 : traits->scale_bytes; /* of a tile */
    char raw[CPA_MAX_HEAD_DIM * sizeof(float)], words[sizeof(int64_t)];
    char *scale = (behind ? words : raw + cache->k_dim - traits->tail) + before * scale_bytes;
    memcpy(raw, piece->k + index * bytes, (size_t)bytes);
    memcpy(words, piece->k + piece->tokens * bytes + index * behind, (size_t)behind);
    memcpy(scale + scale_bytes, scale, (size_t)scale_bytes);
    cpa_reference_read_rows(raw, words, cache->kv_dtype, CPA_KEYS, 0, 1, cache->k_dim, row);
}

/* The columns [from, from + count) of a row and those behind them change places. */
static void swap_columns(float *row, int32_t from, int32_t count) {
    float kept[CPA_MAX_HEAD_DIM];
    memcpy(kept, row + from, (size_t)count * sizeof *kept);
    memcpy(row + from, row + from + count, (size_t)count * sizeof *kept);
    memcpy(row + from + count, kept, (size_t)count * sizeof *kept);
}

void cpa_verify_latents_add(cpa_verify_latents *latents, const cpa_verify *verify, const cpa_form *form,
                            const float *expansion, const cpa_verify_piece *piece, int64_t index, int64_t position,
                            cpa_verify_keys *keys) {
    const cpa_attention_shape *cache = &verify->worker->options.model.attention;
    const int32_t rope = cache->k_dim - cache->v_dim;
    float *raw = keys->k_raw, as_is[CPA_MAX_HEAD_DIM];
    memcpy(as_is, raw, (size_t)cache->k_dim * sizeof *raw);
    for (int32_t i = 0; i < latents->count; i++) {
        memcpy(raw, as_is, (size_t)cache->k_dim * sizeof *raw);
        if (i == SWAPPED_HALVES) swap_columns(raw, cache->v_dim, rope / 2);
        if (i >= FIRST_TILE) take_scale(cache, piece, index, i - FIRST_TILE, raw);
        cpa_verify_shape_keys(verify, form, expansion, 1, keys);
        if (i == LATE_VALUES && !form->is_expanded)
            memcpy(keys->v, raw + rope, (size_t)form->shape.v_dim * sizeof *raw);
        cpa_reference_add_ruled(&latents->rows[i], 1, keys->k, keys->v, &position, NULL);
    }
}

void cpa_verify_latents_name(int32_t mistake, char *out, size_t bytes) {
    if (mistake == SWAPPED_HALVES) {
        snprintf(out, bytes, "the halves of the rotated elements of its keys are swapped");
    } else if (mistake == LATE_VALUES) {
        snprintf(out, bytes, "its values begin in the wrong column of the latents");
    } else {
        snprintf(out, bytes, "tile %d of the latents has the scale of tile %d", mistake - FIRST_TILE + 1,
                 mistake - FIRST_TILE);
    }
}
