#include "src/model/expert_weights.h"

#include <stdio.h>

#include "base/check.h"

/* The names of a family, without the layer's. */
typedef struct expert_names {
    const char *block;            /* what all begin with */
    const char *gate, *up, *down; /* of an expert, behind experts.E. */
} expert_names;
static const expert_names of_families[] = {
    [CPA_MOE_MIXTRAL] = {"block_sparse_moe", "w1", "w3", "w2"},
    [CPA_MOE_QWEN3] = {"mlp", "gate_proj", "up_proj", "down_proj"},
    [CPA_MOE_DEEPSEEK_V2] = {"mlp", "gate_proj", "up_proj", "down_proj"},
    [CPA_MOE_DEEPSEEK_V3] = {"mlp", "gate_proj", "up_proj", "down_proj"},
};

#define JOINED_GATE_UP "mlp.experts.gate_up_proj" /* [experts, 2 * intermediate, hidden] */
#define JOINED_DOWN "mlp.experts.down_proj"       /* [experts, hidden, intermediate] */

static cpa_status load_router(const cpa_weight_loader *l, const cpa_model_config *c, const char *block, void *out) {
    char name[64];
    snprintf(name, sizeof name, "%s.gate", block);
    const cpa_weight_part router = {name, c->moe.experts};
    return cpa_load_whole(l, "weight", &router, c->hidden, out);
}

/* The matrix of one expert to its place in the layer's. */
static cpa_status load_expert(const cpa_weight_loader *l, const cpa_model_config *c, const expert_names *names,
                              int64_t expert, void *gate_up, void *down) {
    char text[3][96];
    const char *const parts[3] = {names->gate, names->up, names->down};
    for (int i = 0; i < 3; i++)
        snprintf(text[i], sizeof text[i], "%s.experts.%lld.%s", names->block, (long long)expert, parts[i]);
    const cpa_weight_part gates[2] = {{text[0], c->moe.intermediate}, {text[1], c->moe.intermediate}};
    const cpa_weight_part back = {text[2], c->hidden};
    CPA_TRY(cpa_load_rows(l, "weight", gates, 2, c->hidden, (cpa_slice){0, c->moe.intermediate}, gate_up));
    return cpa_load_whole(l, "weight", &back, c->moe.intermediate, down);
}

/* What is beside the experts that tokens choose. */
static cpa_status load_others(const cpa_weight_loader *l, const cpa_model_config *c,
                              const cpa_feed_forward_weights *w) {
    const int32_t inner = c->moe.shared;
    const cpa_weight_part gate_up[2] = {{"mlp.shared_experts.gate_proj", inner}, {"mlp.shared_experts.up_proj", inner}};
    const cpa_weight_part down = {"mlp.shared_experts.down_proj", c->hidden};
    if (w->router_bias) CPA_TRY(cpa_load_floats(l, "mlp.gate.e_score_correction_bias", c->moe.experts, w->router_bias));
    CPA_TRY(cpa_load_rows(l, "weight", gate_up, 2, c->hidden, (cpa_slice){0, inner}, w->shared_gate_up));
    return cpa_load_whole(l, "weight", &down, inner, w->shared_down);
}

cpa_status cpa_expert_weights_load(const cpa_weight_loader *loader, const cpa_model_config *config, cpa_slice own,
                                   const cpa_feed_forward_weights *weights) {
    const cpa_moe_config *moe = &config->moe;
    const expert_names *names = &of_families[moe->names];
    const int64_t down_bytes = (int64_t)config->hidden * moe->intermediate * cpa_dtype_bytes(loader->dtype);
    CPA_TRY(load_others(loader, config, weights));
    if (cpa_weight_loader_has(loader, JOINED_GATE_UP)) {
        CPA_TRY(load_router(loader, config, "mlp", weights->router));
        CPA_TRY(cpa_load_matrices(loader, JOINED_GATE_UP, moe->experts, 2 * (int64_t)moe->intermediate, config->hidden,
                                  own, weights->expert_gate_up));
        return cpa_load_matrices(loader, JOINED_DOWN, moe->experts, config->hidden, moe->intermediate, own,
                                 weights->expert_down);
    }
    CPA_TRY(load_router(loader, config, names->block, weights->router));
    for (int64_t i = 0; i < own.count; i++) {
        CPA_TRY(load_expert(loader, config, names, own.begin + i, (char *)weights->expert_gate_up + 2 * i * down_bytes,
                            (char *)weights->expert_down + i * down_bytes));
    }
    return CPA_OK;
}
