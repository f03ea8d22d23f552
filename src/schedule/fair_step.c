#include "src/schedule/fair_step.h"

#include <math.h>

#include "base/min_max.h"

/* A step takes at most so many times as long as one of few sequences. */
static const double MOST_TIMES = 1.5;
/* Every so many steps one has few, so that it is seen what these cost. */
enum { LOOK_STEPS = 32 };
/* So long a tenant is about after its last request. */
static const double ABOUT_S = 10;

int cpa_fair_has_many(const cpa_tenant *tenant) {
    return tenant->running + tenant->waiting > CPA_FAIR_FEW;
}

/* Whether there are, or were some seconds ago, at least two tenants. */
static int are_several_about(const cpa_scheduler *s, double now) {
    int about = 0;
    for (const cpa_tenant *t = s->tenants.by_name; t && about < 2; t = t->hh.next) about += t->seen >= now - ABOUT_S;
    for (const cpa_absent_tenant *t = s->tenants.absent; t && about < 2; t = t->hh.next)
        about += t->seen >= now - ABOUT_S;
    return about >= 2;
}

static int64_t count_decoding(const cpa_scheduler *s, const cpa_tenant *tenant) {
    int64_t n = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        n += s->running[i]->tenant == tenant && s->running[i]->ready <= s->step && cpa_sequence_decodes(s->running[i]);
    return n;
}

/* `is_short`: one sequence, with which the plan has something in any case. */
static void bound(cpa_scheduler *s, cpa_tenant *tenant, int is_short) {
    const double fixed = s->step_cost.seconds[CPA_STEP_ITSELF], sequence = s->step_cost.seconds[CPA_STEP_DECODE];
    const double few = CPA_FAIR_FEW * sequence;
    const int64_t decoding = count_decoding(s, tenant);
    tenant->room_s = (MOST_TIMES - 1) * fixed + MOST_TIMES * few;
    if (s->step % LOOK_STEPS == 0) tenant->room_s = few;
    if (is_short) tenant->room_s = sequence;
    tenant->decoding = tenant->turns = decoding;
    if (tenant->room_s < sequence * (double)decoding) tenant->turns = llround(tenant->room_s / sequence);
    tenant->next_turn = decoding > 0 ? tenant->next_turn % decoding : 0;
}

void cpa_fair_step_begin(cpa_scheduler *s, double now, const cpa_tenant *newcomer) {
    for (cpa_tenant *tenant = s->tenants.by_name; tenant; tenant = tenant->hh.next) {
        tenant->room_s = INFINITY;
        tenant->taken = tenant->met = tenant->decoding = tenant->turns = 0;
        if (cpa_tenant_is_active(tenant)) tenant->seen = now;
    }
    if (!s->waiting.is_fair || !cpa_step_cost_is_known(&s->step_cost) || !are_several_about(s, now)) return;
    for (cpa_tenant *tenant = s->tenants.by_name; tenant; tenant = tenant->hh.next)
        if (cpa_fair_has_many(tenant)) bound(s, tenant, newcomer && newcomer->service <= tenant->service);
}

int cpa_fair_step_has_turn(const cpa_scheduler *s, const cpa_sequence *sequence) {
    cpa_tenant *tenant = sequence->tenant;
    if (tenant->turns == tenant->decoding) return 1;
    const int64_t order = (tenant->met++ + tenant->decoding - tenant->next_turn) % tenant->decoding;
    return order < tenant->turns || sequence == s->running[0];
}

int64_t cpa_fair_step_prompt_tokens(const cpa_scheduler *s, const cpa_tenant *tenant) {
    const double token_s = s->step_cost.seconds[CPA_STEP_PROMPT];
    const int64_t least = tenant->taken == 0 ? s->options.block_size : 0;
    if (!(tenant->room_s < INT32_MAX * token_s)) return INT64_MAX;
    return cpa_max64((int64_t)(tenant->room_s / token_s), least);
}

void cpa_fair_step_take(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    const cpa_step_part part = cpa_sequence_decodes(sequence) ? CPA_STEP_DECODE : CPA_STEP_PROMPT;
    cpa_tenant *tenant = sequence->tenant;
    tenant->taken += tokens;
    tenant->room_s = fmax(tenant->room_s - s->step_cost.seconds[part] * (double)tokens, 0);
}

void cpa_fair_step_end(cpa_scheduler *s, double now) {
    cpa_step_load load = {0};
    for (int64_t i = 0; i < s->plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &s->plan->chunks[i];
        *(chunk->flags & CPA_CHUNK_DECODE ? &load.decoding : &load.prompt_tokens) += chunk->count;
    }
    cpa_step_cost_note(&s->step_cost, now, load);
    for (cpa_tenant *tenant = s->tenants.by_name; tenant; tenant = tenant->hh.next) tenant->next_turn += tenant->turns;
}
