#include "src/check/verify_dump.h"

#include <string.h>

void cpa_verify_dump_begin(cpa_verify_dump *dump, const cpa_verify *verify, const cpa_step_plan *plan,
                           const cpa_verify_wrong_row *wrong, const cpa_reference_row *row, int64_t keys) {
    const cpa_verify_sample *sample = &verify->samples[wrong->sample];
    const cpa_attention_shape cache = cpa_verify_shape(verify, sample), *shape = &cache;
    const cpa_plan_chunk *chunk = &plan->chunks[sample->chunk];
    cpa_error err;
    if (!verify->dump_folder || !verify->dump_folder[0]) return;
    dump->row = (cpa_row_file){.request = chunk->request,
                               .token = sample->position,
                               .layer = sample->layer,
                               .head = sample->head,
                               .kv_head = sample->head / (shape->q_heads / shape->kv_heads),
                               .ranks = verify->control->size,
                               .algorithm = verify->control->size == 1 ? 0 : (int32_t)chunk->algorithm,
                               .dtype = shape->dtype,
                               .kv_dtype = shape->kv_dtype,
                               .k_dim = row->k_dim,
                               .v_dim = row->v_dim,
                               .out_dim = verify->matrix.out_dim,
                               .matrix = verify->matrix.out_dim > 0 ? verify->matrix.tensor.values : NULL,
                               .scale = row->scale,
                               .softcap = row->rules.softcap,
                               .temperature_len = row->rules.temperature_len,
                               .slope = row->rules.slope,
                               .sink = row->rules.sink,
                               .has_sink = row->rules.has_sink,
                               .error = wrong->error,
                               .tolerance = wrong->tolerance,
                               .other_choice = wrong->is_choice,
                               .listed_key = wrong->choice.listed.key,
                               .listed_score = wrong->choice.listed.score,
                               .missing_key = wrong->choice.others.key,
                               .missing_score = wrong->choice.others.score,
                               .keys = keys};
    memcpy(dump->row.q, row->q, sizeof row->q);
    memcpy(dump->row.result, row->got, sizeof row->got);
    memcpy(dump->row.reference, wrong->reference, sizeof wrong->reference);
    const int length =
        snprintf(dump->path, sizeof dump->path, "%s/row-%llu-%lld-%d-%d", verify->dump_folder,
                 (unsigned long long)chunk->request, (long long)sample->position, sample->layer, sample->head);
    if (length >= (int)sizeof dump->path)
        snprintf(dump->said, sizeof dump->said, "; violation_dump: its path is too long");
    else if (cpa_row_file_create(dump->path, &dump->row, &dump->file, &err) != CPA_OK)
        snprintf(dump->said, sizeof dump->said, "; %.300s", err.message);
}

void cpa_verify_dump_key(cpa_verify_dump *dump, cpa_row_file_key key, const float *k, const float *v) {
    if (dump->file) cpa_row_file_put(dump->file, &dump->row, key, k, v);
}

void cpa_verify_dump_end(cpa_verify_dump *dump, const cpa_verify *verify) {
    cpa_error err;
    if (verify->dump_folder && !verify->dump_folder[0])
        snprintf(dump->said, sizeof dump->said, "; with violation_dump what the row had would be kept");
    if (!dump->file) return;
    if (cpa_row_file_close(dump->file, dump->path, &err) == CPA_OK)
        snprintf(dump->said, sizeof dump->said, "; to compute it again: cp_attn check %s", dump->path);
    else
        snprintf(dump->said, sizeof dump->said, "; %.300s", err.message);
    dump->file = NULL;
}
