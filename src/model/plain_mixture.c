#include "src/model/plain_mixture.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "src/model/stored_weight.h"

/* The matrix [outputs, inputs] of an expert, to f->weight. Gates and what they scale are one tensor where a layer's
 * experts are. */
typedef enum expert_part { EXPERT_GATE, EXPERT_UP, EXPERT_DOWN } expert_part;
static cpa_status read_expert(cpa_plain *f, int32_t layer, int32_t expert, expert_part part, int64_t elements) {
    static const char *const mixtral[] = {"w1", "w3", "w2"}, *const others[] = {"gate_proj", "up_proj", "down_proj"};
    const cpa_moe_config *moe = &f->config->moe;
    const cpa_plain_name joined =
        cpa_plain_name_of(layer, "mlp.experts", part == EXPERT_DOWN ? "down_proj" : "gate_up_proj");
    char name[64];
    if (cpa_safetensors_find(f->files, joined.text)) {
        const int64_t parts = part == EXPERT_DOWN ? 1 : 2, first = parts * expert + (part == EXPERT_UP);
        return cpa_plain_read_part(f, joined.text, parts * moe->experts * elements, first * elements, elements,
                                   f->weight);
    }
    const int is_mixtral = moe->names == CPA_MOE_MIXTRAL;
    snprintf(name, sizeof name, "%s.experts.%d.%s", is_mixtral ? "block_sparse_moe" : "mlp", expert,
             (is_mixtral ? mixtral : others)[part]);
    return cpa_plain_read(f, cpa_plain_name_of(layer, name, "weight").text, elements, f->weight);
}

/* What an expert gives for the tokens that choose it in f->chosen, in their place. */
static cpa_status run_expert(cpa_plain *f, int32_t layer, int32_t expert, int64_t rows) {
    const int64_t hidden = f->config->hidden, inner = f->config->moe.intermediate;
    CPA_TRY(read_expert(f, layer, expert, EXPERT_GATE, inner * hidden));
    cpa_plain_multiply(f, rows, f->chosen, hidden, inner, f->gate);
    cpa_plain_round(f, f->gate, rows * inner);
    CPA_TRY(read_expert(f, layer, expert, EXPERT_UP, inner * hidden));
    cpa_plain_multiply(f, rows, f->chosen, hidden, inner, f->up);
    cpa_plain_round(f, f->up, rows * inner);
    cpa_plain_activate(f, rows * inner);
    CPA_TRY(read_expert(f, layer, expert, EXPERT_DOWN, hidden * inner));
    cpa_plain_multiply(f, rows, f->gate, inner, hidden, f->chosen);
    cpa_plain_round(f, f->chosen, rows * hidden);
    return CPA_OK;
}

/* The bias in fp32, whatever the dtype, as choices hang on it. */
static cpa_status read_bias(cpa_plain *f, const char *name) {
    const int32_t experts = f->config->moe.experts;
    cpa_stored_weight bias;
    CPA_TRY(cpa_stored_weight_find(f->files, name, &bias, f->err));
    if (bias.tensor->elements != experts)
        return cpa_fail(f->err, CPA_INVALID, "%s: found %lld elements, expected %d", name,
                        (long long)bias.tensor->elements, experts);
    cpa_stored_weight_read(&bias, 0, experts, f->bias);
    return CPA_OK;
}

/* Where the token is one of those that are wanted. */
static void tell_scores(const cpa_plain *f, int32_t layer, int64_t row, const double *biased) {
    const int32_t experts = f->config->moe.experts;
    for (int64_t i = 0; f->choices.biased && i < f->n_positions; i++)
        if (f->positions[i] == row)
            memcpy(f->choices.biased + (layer * f->n_positions + i) * experts, biased,
                   (size_t)experts * sizeof *biased);
}

static cpa_plain_turn turn_of(const cpa_plain *f, int32_t layer, int64_t row) {
    for (int32_t i = 0; i < f->choices.n_turned; i++) {
        const cpa_turned_choice *turned = &f->choices.turned[i];
        if (turned->layer == layer && turned->position == row) return turned->turn;
    }
    return CPA_TURN_NONE;
}

/* f->shares, from the logits that it has; tells the scores of tokens that are asked for. */
static cpa_status choose_all(cpa_plain *f, int32_t layer) {
    const cpa_moe_config *moe = &f->config->moe;
    const cpa_plain_name name = cpa_plain_name_of(layer, "mlp.gate", "e_score_correction_bias");
    if (moe->has_bias) CPA_TRY(read_bias(f, name.text));
    for (int64_t row = 0; row < f->count; row++) {
        double biased[CPA_MOST_EXPERTS];
        cpa_plain_choose(moe, moe->has_bias ? f->bias : NULL, turn_of(f, layer, row), f->shares + row * moe->experts,
                         biased);
        tell_scores(f, layer, row, biased);
    }
    return CPA_OK;
}

static cpa_status take_sum(cpa_plain *f) {
    const int64_t n = f->count * f->config->hidden;
    memcpy(f->x, f->summed, (size_t)n * sizeof *f->x);
    cpa_plain_round(f, f->x, n);
    return CPA_OK;
}

/* The sum, and what the experts give that every token has. */
static cpa_status add_shared(cpa_plain *f, int32_t layer) {
    const int64_t hidden = f->config->hidden, inner = f->config->moe.shared;
    CPA_TRY(cpa_plain_linear(f, layer, "mlp.shared_experts.gate_proj", 0, f->x, hidden, inner, f->gate));
    CPA_TRY(cpa_plain_linear(f, layer, "mlp.shared_experts.up_proj", 0, f->x, hidden, inner, f->up));
    cpa_plain_activate(f, f->count * inner);
    CPA_TRY(cpa_plain_linear(f, layer, "mlp.shared_experts.down_proj", 0, f->gate, inner, hidden, f->chosen));
    for (int64_t i = 0; i < f->count * hidden; i++) f->summed[i] += f->chosen[i];
    return take_sum(f);
}

cpa_status cpa_plain_mixture(cpa_plain *f, int32_t layer) {
    const cpa_moe_config *moe = &f->config->moe;
    const int64_t hidden = f->config->hidden;
    const int joined =
        cpa_safetensors_find(f->files, cpa_plain_name_of(layer, "mlp.experts", "down_proj").text) != NULL;
    const char *router = moe->names == CPA_MOE_MIXTRAL && !joined ? "block_sparse_moe.gate" : "mlp.gate";
    CPA_TRY(cpa_plain_read(f, cpa_plain_name_of(layer, router, "weight").text, moe->experts * hidden, f->weight));
    cpa_plain_multiply(f, f->count, f->x, hidden, moe->experts,
                       f->shares); /* in fp32 whatever the dtype, as choices hang on it */
    CPA_TRY(choose_all(f, layer));
    memset(f->summed, 0, (size_t)(f->count * hidden) * sizeof *f->summed);
    for (int32_t e = 0; e < moe->experts; e++) {
        int64_t rows = 0, taken = 0;
        for (int64_t row = 0; row < f->count; row++) {
            if (f->shares[row * moe->experts + e] == 0) continue;
            memcpy(f->chosen + rows++ * hidden, f->x + row * hidden, (size_t)hidden * sizeof *f->x);
        }
        if (rows > 0) CPA_TRY(run_expert(f, layer, e, rows));
        for (int64_t row = 0; row < f->count; row++) {
            const float share = f->shares[row * moe->experts + e];
            if (share == 0) continue;
            for (int64_t i = 0; i < hidden; i++) f->summed[row * hidden + i] += share * f->chosen[taken * hidden + i];
            taken++;
        }
    }
    return moe->shared ? add_shared(f, layer) : take_sum(f);
}
