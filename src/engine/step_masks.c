#include "src/engine/step_masks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash_table.h"
#include "src/worker/token_masks.h"

/* What a slot holds. */
typedef struct mask_slot {
    uint64_t key;  /* key of the mask; 0: nobody finds it */
    uint64_t used; /* step that used the mask last, counted over steps with masks; 0: none */
    UT_hash_handle hh;
} mask_slot;

struct cpa_step_masks {
    cpa_engine *engine;
    uint64_t step;
    mask_slot *slots;  /* rank 0: [slots] */
    mask_slot *by_key; /* rank 0 */
    int32_t *list;     /* of a step with n masks: how many are fresh, the n slots, and room for n fresh slots */
    int64_t cap_list;
    uint32_t *words; /* words of the fresh masks, on their way */
    int64_t cap_words;
};

cpa_status cpa_step_masks_create(cpa_engine *engine, cpa_step_masks **out, cpa_error *err) {
    cpa_step_masks *masks = calloc(1, sizeof *masks);
    const size_t slots = (size_t)engine->worker->token_masks.slots;
    if (masks) masks->slots = calloc(slots + 1, sizeof *masks->slots);
    if (!masks || !masks->slots) {
        free(masks);
        return cpa_fail(err, CPA_NO_MEMORY, "engine: no memory for masks");
    }
    masks->engine = engine;
    *out = masks;
    return CPA_OK;
}

void cpa_step_masks_destroy(cpa_step_masks *masks) {
    if (!masks) return;
    HASH_CLEAR(hh, masks->by_key);
    free(masks->words);
    free(masks->list);
    free(masks->slots);
    free(masks);
}

/* ---- rank 0 ---- */

static void forget(cpa_step_masks *masks, mask_slot *slot) {
    if (slot->key) HASH_DEL(masks->by_key, slot);
    slot->key = slot->used = 0;
}

/* The one that was not used for the longest time, and by none of this step: there are more than a step may need. */
static mask_slot *take_slot(cpa_step_masks *masks) {
    mask_slot *oldest = &masks->slots[0];
    for (int64_t i = 1; i < masks->engine->worker->token_masks.slots && oldest->used > 0; i++)
        if (masks->slots[i].used < oldest->used) oldest = &masks->slots[i];
    forget(masks, oldest);
    return oldest;
}

/* Whether some token is left that is none of the ends. */
static int has_more(const uint32_t *words, int64_t n_words, const cpa_plan_bias *ends, int64_t n_ends) {
    for (int64_t i = 0; i < n_words; i++) {
        uint32_t left = words[i];
        for (int64_t e = 0; left && e < n_ends; e++)
            if (ends[e].token / 32 == i) left &= ~(1u << ends[e].token % 32);
        if (left) return 1;
    }
    return 0;
}

/* The mask of a request's next token in a slot of its own. */
static cpa_status make_mask(cpa_step_masks *masks, const cpa_engine_request *request, uint64_t key, mask_slot **out,
                            cpa_error *err) {
    const cpa_worker *worker = masks->engine->worker;
    const int64_t words = worker->token_masks.words, odd = worker->network->vocabulary % 32;
    mask_slot *slot = take_slot(masks);
    uint32_t *to = cpa_token_masks_words(worker, slot - masks->slots);
    memset(to, 0, (size_t)words * sizeof *to);
    CPA_TRY(request->constraint.mask(request->constraint_ctx, to, err));
    if (odd) to[words - 1] &= (1u << odd) - 1;
    if (!has_more(to, words, NULL, 0)) return cpa_fail(err, CPA_INVALID, "the constraint lets no token through");
    slot->key = key;
    slot->used = masks->step;
    if (key) HASH_ADD(hh, masks->by_key, key, sizeof slot->key, slot);
    if (key && !slot->hh.tbl) slot->key = 0;
    masks->list[1 + cpa_token_masks_wanted(worker) + masks->list[0]++] = (int32_t)(slot - masks->slots);
    *out = slot;
    return CPA_OK;
}

/* Tells the constraint of the tokens that have come, and finds the slot of the mask that follows. */
static cpa_status next_mask(cpa_step_masks *masks, cpa_engine_request *request, const cpa_worker_emission *e,
                            int32_t *out, cpa_error *err) {
    const cpa_constraint_ops *ops = &request->constraint;
    const cpa_worker *worker = masks->engine->worker;
    const int64_t index = e->position - request->scheduled.prompt_tokens, words = worker->token_masks.words;
    if (index != request->emitted)
        return cpa_fail(err, CPA_INTERNAL, "output token %lld is drawn when there are %lld", (long long)index,
                        (long long)request->emitted);
    for (; request->accepted < request->emitted; request->accepted++)
        CPA_TRY(ops->accept(request->constraint_ctx, request->tokens[request->accepted], err));
    const uint64_t key = ops->key ? ops->key(request->constraint_ctx) : 0;
    mask_slot *slot = NULL;
    if (key) HASH_FIND(hh, masks->by_key, &key, sizeof key, slot);
    if (!slot) CPA_TRY(make_mask(masks, request, key, &slot, err));
    slot->used = masks->step;
    *out = (int32_t)(slot - masks->slots);
    const cpa_plan_sampling *s = &request->scheduled.sampling;
    if (index >= s->min_tokens ||
        has_more(cpa_token_masks_words(worker, *out), words, request->biases + s->n_biases, s->n_ends))
        return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "the constraint lets only an end through, after %lld tokens of min_tokens %lld",
                    (long long)index, (long long)s->min_tokens);
}

/* Fills the list. A request that has ended may still have a row. */
static void list_masks(cpa_step_masks *masks) {
    cpa_inbox *inbox = masks->engine->inbox;
    const cpa_worker_rows *rows = masks->engine->worker->rows;
    int32_t *slot = masks->list + 1;
    masks->list[0] = 0;
    masks->step++;
    for (int64_t i = 0; i < rows->n_emissions; i++) {
        cpa_error why = {CPA_OK, ""};
        if (!rows->emissions[i].is_constrained) continue;
        *slot = -1;
        cpa_engine_request *request = cpa_inbox_find_live(inbox, rows->emissions[i].request);
        if (request && !request->is_broken && next_mask(masks, request, &rows->emissions[i], slot, &why) != CPA_OK) {
            *slot = -1;
            request->is_broken = 1;
            cpa_inbox_fail(inbox, request->scheduled.id, why.message[0] ? why.message : "its constraint failed");
        }
        slot++;
    }
}

/* ---- all ranks ---- */

/* The list, and the words of fresh masks, from rank 0 to the others. */
static cpa_status share(cpa_step_masks *masks, int64_t n, cpa_error *err) {
    cpa_control *control = &masks->engine->control;
    const cpa_worker *worker = masks->engine->worker;
    const int64_t words = worker->token_masks.words, bytes = words * (int64_t)sizeof *masks->words;
    if (control->size == 1) return CPA_OK;
    CPA_TRY(cpa_control_bcast(control, masks->list, (1 + 2 * n) * (int64_t)sizeof *masks->list, 0, err));
    const int64_t fresh = masks->list[0];
    if (fresh < 0 || fresh > n)
        return cpa_fail(err, CPA_COMM, "%lld of %lld masks are new", (long long)fresh, (long long)n);
    if (fresh == 0) return CPA_OK;
    if (!cpa_array_reserve(&masks->words, &masks->cap_words, fresh * words, sizeof *masks->words))
        return cpa_fail(err, CPA_NO_MEMORY, "engine: no memory for %lld masks", (long long)fresh);
    const int32_t *slots = masks->list + 1 + n;
    for (int64_t i = 0; i < fresh; i++)
        if (slots[i] < 0 || slots[i] >= worker->token_masks.slots)
            return cpa_fail(err, CPA_COMM, "a mask has slot %d, of %lld", slots[i],
                            (long long)worker->token_masks.slots);
    for (int64_t i = 0; control->rank == 0 && i < fresh; i++)
        memcpy(masks->words + i * words, cpa_token_masks_words(worker, slots[i]), (size_t)bytes);
    CPA_TRY(cpa_control_bcast(control, masks->words, fresh * bytes, 0, err));
    for (int64_t i = 0; control->rank > 0 && i < fresh; i++)
        memcpy(cpa_token_masks_words(worker, slots[i]), masks->words + i * words, (size_t)bytes);
    return CPA_OK;
}

cpa_status cpa_step_masks_give(void *ctx, cpa_error *err) {
    cpa_step_masks *masks = ctx;
    cpa_worker *worker = masks->engine->worker;
    const int64_t n = cpa_token_masks_wanted(worker);
    if (!cpa_array_reserve(&masks->list, &masks->cap_list, 1 + 2 * n, sizeof *masks->list))
        return cpa_fail(err, CPA_NO_MEMORY, "engine: no memory for %lld masks", (long long)n);
    if (masks->engine->inbox) list_masks(masks);
    CPA_TRY(share(masks, n, err));
    return cpa_token_masks_take(worker, masks->list + 1, masks->list + 1 + n, masks->list[0], err);
}
