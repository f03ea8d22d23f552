/* The mixtures of experts of a model, as its config.json describes them: which layers have one in the place of their
 * dense feed-forward, and how a token's experts are chosen and weighted (cpattn/experts.h). */
#ifndef CPA_MODEL_MOE_CONFIG_H
#define CPA_MODEL_MOE_CONFIG_H

#include <cpattn/experts.h>

#include "base/json_file.h"

enum { CPA_CONFIG_MAX_LAYERS = 1024 };

/* How families name the keys of their mixtures, and the tensors. */
typedef enum cpa_moe_names {
    CPA_MOE_NONE = 0, /* a family without experts */
    CPA_MOE_MIXTRAL,  /* block_sparse_moe.gate, .experts.E.w1 (gates), .w3 (what they scale), .w2 (down) */
    CPA_MOE_QWEN3,    /* mlp.gate, mlp.experts.E.gate_proj, .up_proj, .down_proj */
    /* The same tensors, and those of the shared experts, mlp.shared_experts.gate_proj, .up_proj, .down_proj. */
    CPA_MOE_DEEPSEEK_V2,
    CPA_MOE_DEEPSEEK_V3 /* with mlp.gate.e_score_correction_bias */
} cpa_moe_names;

/* Plain memory. */
typedef struct cpa_moe_config {
    cpa_moe_names names;
    int32_t experts; /* experts of a sparse layer; 0: all layers are dense */
    int32_t top_k;   /* experts of a token */
    int32_t intermediate;
    int renormalise;                       /* the weights of a token's experts are divided by their sum */
    cpa_expert_scores scores;              /* what the router makes of its logits */
    cpa_group_scores group_scores;         /* by what groups of experts are chosen */
    int32_t n_group, topk_group;           /* groups, and how many of them take part; 0: there are none */
    int has_bias;                          /* a bias is added to scores where experts are chosen */
    float scale;                           /* factor of the weights of a token's experts */
    int32_t shared;                        /* width of the experts that every token has; 0: there are none */
    uint8_t sparse[CPA_CONFIG_MAX_LAYERS]; /* 1: the layer has experts, 0: it is dense */
} cpa_moe_config;

/* Reads the keys of a family that has experts; `intermediate` is the file's intermediate_size. CPA_INVALID and
 * CPA_UNSUPPORTED come with a line that names file and key. *out is set only on success. */
cpa_status cpa_moe_config_read(const cpa_json *json, cpa_moe_names names, int32_t layers, int32_t intermediate,
                               cpa_moe_config *out, cpa_error *err);

#endif
