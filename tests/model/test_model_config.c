/* config.json and generation_config.json: what the tiny models' files say, in both forms of rotary positions, and a
 * line for whatever is missing, out of range or unsupported. */
#include "src/model/model_config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_model_config load(const char *name) {
    cpa_model_config config = {.layers = 0};
    cpa_error err = {CPA_OK, ""};
    char path[512];
    snprintf(path, sizeof path, CPA_TEST_DATA "/%s", name);
    CU_ASSERT_EQUAL(cpa_model_config_load(path, &config, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    return config;
}

static void test_families(void) {
    static const struct {
        const char *folder, *family;
        int32_t kv_heads, head_dim;
        cpa_dtype dtype;
        int qkv_bias, o_bias, mlp_bias, qk_norm, tied;
        int64_t windows[2];
        cpa_rope_scaling scaling;
        uint32_t end_id;
    } expected[] = {
        {"tiny-llama", "llama", 2, 16, CPA_BF16, 0, 0, 0, 0, 0, {0, 0}, CPA_ROPE_LLAMA3, 126},
        {"tiny-llama2", "llama", 4, 8, CPA_F16, 0, 0, 0, 0, 0, {0, 0}, CPA_ROPE_PLAIN, 31},
        {"tiny-mistral", "mistral", 2, 16, CPA_BF16, 0, 0, 0, 0, 0, {24, 24}, CPA_ROPE_PLAIN, 127},
        {"tiny-qwen2", "qwen2", 2, 8, CPA_BF16, 1, 0, 0, 0, 1, {0, 32}, CPA_ROPE_PLAIN, 127},
        {"tiny-qwen3", "qwen3", 2, 16, CPA_BF16, 0, 0, 0, 1, 0, {0, 0}, CPA_ROPE_PLAIN, 127},
        {"tiny-yarn", "qwen2", 2, 8, CPA_F32, 1, 0, 0, 0, 0, {0, 0}, CPA_ROPE_YARN, 127},
        {"tiny-sharded", "llama", 2, 16, CPA_BF16, 1, 1, 1, 0, 0, {0, 0}, CPA_ROPE_YARN, 127},
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        cpa_model_config c = load(expected[i].folder);
        CU_ASSERT_STRING_EQUAL(c.family, expected[i].family);
        CU_ASSERT(c.layers == 2 && c.hidden == 32 && c.intermediate == 64 && c.q_heads == 4);
        CU_ASSERT_EQUAL(c.vocabulary, i == 0 ? 320 : 128);
        CU_ASSERT(c.max_position == 4096 && c.rope.max_position == 4096 && c.norm_eps == 1e-5f);
        CU_ASSERT(c.kv_heads == expected[i].kv_heads && c.head_dim == expected[i].head_dim);
        CU_ASSERT(c.has_dtype && c.dtype == expected[i].dtype);
        CU_ASSERT(c.qkv_bias == expected[i].qkv_bias && c.o_bias == expected[i].o_bias);
        CU_ASSERT(c.mlp_bias == expected[i].mlp_bias && c.qk_norm == expected[i].qk_norm);
        CU_ASSERT_EQUAL(c.tied, expected[i].tied);
        CU_ASSERT_EQUAL(memcmp(c.windows, expected[i].windows, sizeof expected[i].windows), 0);
        CU_ASSERT(c.rope.scaling == expected[i].scaling && c.rope.dim == c.head_dim && c.rope.theta == 10000);
        CU_ASSERT(c.n_end_ids == (i == 0 ? 2 : 1) && c.end_ids[0] == expected[i].end_id);
    }
}

static void test_rope_parameters(void) {
    cpa_rope_config llama3 = load("tiny-llama").rope, yarn4 = load("tiny-yarn").rope, yarn5 = load("tiny-sharded").rope;
    CU_ASSERT(llama3.factor == 8 && llama3.low_freq_factor == 1 && llama3.high_freq_factor == 4);
    CU_ASSERT_EQUAL(llama3.original_max_position, 64);
    CU_ASSERT(yarn4.factor == 4 && yarn4.beta_fast == 0 && yarn4.beta_slow == 0 && yarn4.original_max_position == 64);
    CU_ASSERT_DOUBLE_EQUAL(yarn4.attention_factor, 0.1 * log(4.0) + 1, 1e-12);
    CU_ASSERT(yarn5.factor == 8 && yarn5.beta_fast == 16 && yarn5.beta_slow == 2 && yarn5.attention_factor == 1.1);
}

/* A folder with the config of a tiny model, changed. */
typedef struct changed {
    cpa_test_folder folder;
    json_t *config;
} changed;

static changed change(const char *name) {
    char path[512];
    snprintf(path, sizeof path, CPA_TEST_DATA "/%s/config.json", name);
    changed c = {cpa_test_folder_make(), json_load_file(path, 0, NULL)};
    CU_ASSERT_PTR_NOT_NULL(c.config);
    return c;
}

/* Sets a key to a JSON text; NULL removes it. */
static void set(const changed *c, const char *key, const char *text) {
    if (text) {
        json_object_set_new(c->config, key, json_loads(text, JSON_DECODE_ANY, NULL));
    } else {
        json_object_del(c->config, key);
    }
}

static cpa_status load_changed(const changed *c, cpa_model_config *out, cpa_error *err) {
    char *text = json_dumps(c->config, 0);
    cpa_test_folder_write(&c->folder, "config.json", text, strlen(text));
    free(text);
    return cpa_model_config_load(c->folder.path, out, err);
}

static void end_change(changed *c) {
    cpa_test_folder_remove(&c->folder);
    json_decref(c->config);
}

static void test_defaults(void) {
    cpa_model_config config;
    changed c = change("tiny-llama2");
    set(&c, "num_key_value_heads", NULL);
    set(&c, "rms_norm_eps", NULL);
    set(&c, "torch_dtype", NULL);
    set(&c, "rope_theta", NULL);
    set(&c, "eos_token_id", "7");
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(config.kv_heads == 4 && config.norm_eps == 1e-6f && !config.has_dtype && config.rope.theta == 10000);
    CU_ASSERT(config.n_end_ids == 1 && config.end_ids[0] == 7);
    const char *ids = "{\"eos_token_id\": [3, 4, 5]}";
    cpa_test_folder_write(&c.folder, "generation_config.json", ids, strlen(ids));
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(config.n_end_ids == 3 && config.end_ids[2] == 5);
    end_change(&c);
    c = change("tiny-qwen3"); /* which has heads of 128 whatever hidden_size is */
    set(&c, "head_dim", NULL);
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(config.head_dim == 128 && config.rope.dim == 128);
    end_change(&c);
}

static void test_windows(void) {
    static const char *const types = "[\"sliding_attention\", \"full_attention\"]";
    cpa_model_config config;
    changed c = change("tiny-mistral");
    set(&c, "sliding_window", "null");
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT_EQUAL(config.windows[0], 0);
    set(&c, "sliding_window", NULL);
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT_EQUAL(config.windows[0], 4096);
    end_change(&c);
    c = change("tiny-qwen2");
    set(&c, "layer_types", types);
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(config.windows[0] == 32 && config.windows[1] == 0);
    end_change(&c);
}

static void test_experts(void) {
    cpa_model_config config = load("tiny-mixtral"), llama = load("tiny-llama");
    const cpa_moe_config *moe = &config.moe;
    CU_ASSERT(llama.moe.experts == 0 && llama.moe.sparse[0] == 0);
    CU_ASSERT(moe->experts == 8 && moe->top_k == 2 && moe->intermediate == 32 && moe->renormalise);
    CU_ASSERT(moe->sparse[0] && moe->sparse[1] && config.windows[0] == 40 && config.windows[1] == 40);
    changed c = change("tiny-mixtral"); /* whose family has other defaults than the dense ones */
    set(&c, "sliding_window", NULL);
    set(&c, "rms_norm_eps", NULL);
    set(&c, "rope_theta", NULL);
    set(&c, "num_experts_per_tok", NULL);
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(config.windows[0] == 0 && config.norm_eps == 1e-5f && config.rope.theta == 1e6 && moe->top_k == 2);
    end_change(&c);
    c = change("tiny-joined-moe");
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(moe->experts == 5 && moe->top_k == 3 && moe->intermediate == 12 && !moe->renormalise);
    CU_ASSERT(moe->sparse[0] && !moe->sparse[1] && moe->sparse[2] && config.qkv_bias && config.head_dim == 8);
    set(&c, "decoder_sparse_step", "2");
    set(&c, "mlp_only_layers", "[]");
    set(&c, "use_sliding_window", "true");
    set(&c, "max_window_layers", "2");
    set(&c, "moe_intermediate_size", NULL);
    CU_ASSERT_EQUAL(load_changed(&c, &config, NULL), CPA_OK);
    CU_ASSERT(!moe->sparse[0] && moe->sparse[1] && !moe->sparse[2] && moe->intermediate == 768);
    CU_ASSERT(config.windows[0] == 4096 && config.windows[2] == 4096); /* of all layers */
    end_change(&c);
}

static void test_latents(void) {
    const double m = 0.1 * log(8.0) + 1;
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_model_config v2 = load("tiny-deepseek-v2"), v3 = load("tiny-deepseek-v3"), fp8 = load("tiny-deepseek-fp8");
    CU_ASSERT(v2.latent.latent == 32 && v2.latent.rope == 16 && v2.latent.nope == 16 && v2.latent.value == 24);
    CU_ASSERT(v2.latent.q_latent == 0 && v2.latent.interleaved && v2.rope.dim == 16 && v2.kv_heads == 0);
    CU_ASSERT_DOUBLE_EQUAL(v2.latent.scale, 1 / sqrt(32), 1e-7);
    CU_ASSERT(v3.latent.q_latent == 24 && v3.latent.nope == 24 && v3.latent.value == 16 &&
              v3.rope.attention_factor == 1);
    CU_ASSERT_DOUBLE_EQUAL(v3.latent.scale, m * m / sqrt(40), 1e-7);
    CU_ASSERT(v2.moe.scores == CPA_SCORES_SOFTMAX && v2.moe.group_scores == CPA_GROUP_BEST && !v2.moe.has_bias);
    CU_ASSERT(v2.moe.n_group == 4 && v2.moe.topk_group == 2 && v2.moe.scale == 2 && !v2.moe.renormalise);
    CU_ASSERT(v3.moe.scores == CPA_SCORES_SIGMOID && v3.moe.group_scores == CPA_GROUP_BEST_TWO && v3.moe.has_bias);
    CU_ASSERT(v3.moe.top_k == 3 && v3.moe.scale == 2.5f && v3.moe.renormalise && v3.moe.shared == 16);
    CU_ASSERT(!v3.moe.sparse[0] && v3.moe.sparse[1] && v3.moe.sparse[2] && fp8.latent.scale == v3.latent.scale);
    const cpa_attention_shape shape = cpa_model_config_shape(&v3, CPA_BF16, masks).attention;
    CU_ASSERT(shape.q_heads == 4 && shape.kv_heads == 1 && shape.k_dim == 48 && shape.v_dim == 32 && shape.v_in_k);
    changed c = change("tiny-deepseek-v2");
    set(&c, "topk_method", "\"greedy\"");
    set(&c, "n_group", "null");
    CU_ASSERT_EQUAL(load_changed(&c, &v2, NULL), CPA_OK);
    CU_ASSERT(v2.moe.n_group == 0 && v2.moe.topk_group == 0);
    end_change(&c);
    c = change("tiny-deepseek-v3");
    set(&c, "model_type", "\"kimi_k2\"");
    set(&c, "rope_interleave", "false");
    set(&c, "rope_scaling", "null");
    CU_ASSERT_EQUAL(load_changed(&c, &v3, NULL), CPA_OK);
    CU_ASSERT(!v3.latent.interleaved && v3.moe.has_bias && v3.next_modules == 0);
    CU_ASSERT_DOUBLE_EQUAL(v3.latent.scale, 1 / sqrt(40), 1e-7);
    end_change(&c);
    const cpa_model_config v32 = load("tiny-deepseek-v32");
    CU_ASSERT(v32.index.heads == 16 && v32.index.dim == 32 && v32.index.k == 24 && v32.index.has_weights &&
              v3.index.heads == 0);
    CU_ASSERT(v32.moe.has_bias && v32.latent.q_latent == 24 && v32.windows[0] == 0);
}

/* A layer that drafts is one more, with the feed-forward of the last ones. */
static void test_next_modules(void) {
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_model_config config = load("tiny-deepseek-mtp");
    CU_ASSERT(config.layers == 2 && config.next_modules == 1 && config.draft_layers == 0 && config.moe.sparse[2]);
    CU_ASSERT_EQUAL(cpa_model_config_shape(&config, CPA_F32, masks).layers, 2);
    config.draft_layers = 1;
    const cpa_model_shape shape = cpa_model_config_shape(&config, CPA_F32, masks);
    CU_ASSERT(shape.layers == 3 && shape.draft_layers == 1);
    changed c = change("tiny-deepseek-mtp");
    cpa_error err;
    set(&c, "num_nextn_predict_layers", "-1");
    CU_ASSERT_EQUAL(load_changed(&c, &config, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "num_nextn_predict_layers"));
    end_change(&c);
}

static void test_shape(void) {
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_model_config config = load("tiny-qwen2");
    cpa_model_shape shape = cpa_model_config_shape(&config, CPA_F32, masks);
    CU_ASSERT(shape.layers == 2 && shape.attention.q_heads == 4 && shape.attention.k_dim == 8);
    CU_ASSERT(cpa_model_mask(&shape, 0).window == 0 && cpa_model_mask(&shape, 1).window == 32);
    CU_ASSERT(cpa_model_mask(&shape, 0).causal && cpa_model_mask(&shape, 1).causal);
    config = load("tiny-mistral");
    shape = cpa_model_config_shape(&config, CPA_BF16, masks);
    CU_ASSERT(!shape.layer_masks && shape.mask.window == 24 && shape.attention.dtype == CPA_BF16);
}

static void test_pipe(void) {
    cpa_model_config config;
    cpa_error err = {CPA_OK, ""};
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_test_folder_pipe(&folder, "config.json");
    CU_ASSERT_EQUAL(cpa_model_config_load(folder.path, &config, &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "config.json: found no regular file, expected one"));
    cpa_test_folder_remove(&folder);
}

static void test_refusals(void) {
    static const struct {
        const char *model, *key, *value; /* NULL: the key is removed */
        cpa_status status;
        const char *says;
    } refused[] = {
        {"tiny-llama", "model_type", "\"gpt2\"", CPA_UNSUPPORTED, "model_type: found gpt2, supported are llama, "},
        {"tiny-llama", "model_type", NULL, CPA_INVALID, "model_type: found nothing, expected a text"},
        {"tiny-llama", "hidden_act", "\"gelu\"", CPA_UNSUPPORTED, "hidden_act: found gelu"},
        {"tiny-llama", "quantization_config", "{\"bits\": 4}", CPA_UNSUPPORTED, "quantization_config"},
        {"tiny-llama", "num_hidden_layers", NULL, CPA_INVALID, "num_hidden_layers: found nothing, expected an integer"},
        {"tiny-llama", "num_hidden_layers", "1025", CPA_INVALID, "found 1025, expected an integer from 1 to 1024"},
        {"tiny-llama", "num_hidden_layers", "2.5", CPA_INVALID, "found 2.5"},
        {"tiny-llama", "hidden_size", "-32", CPA_INVALID, "hidden_size: found -32"},
        {"tiny-llama", "vocab_size", "99999999999999", CPA_INVALID, "vocab_size"},
        {"tiny-llama", "vocab_size", "\"128\"", CPA_INVALID, "vocab_size: found \"128\""},
        {"tiny-llama", "num_attention_heads", "3", CPA_INVALID, "num_attention_heads: found 3, expected a multiple"},
        {"tiny-llama", "num_key_value_heads", "0", CPA_INVALID, "num_key_value_heads"},
        {"tiny-qwen2", "num_key_value_heads", NULL, CPA_INVALID, "num_key_value_heads: found nothing"},
        {"tiny-llama", "head_dim", "578", CPA_INVALID, "head_dim: found 578"},
        {"tiny-llama", "head_dim", "15", CPA_UNSUPPORTED, "head_dim: found 15"},
        {"tiny-llama2", "num_attention_heads", "12", CPA_INVALID, "hidden_size: found 32, expected a multiple"},
        {"tiny-llama", "max_position_embeddings", NULL, CPA_INVALID, "max_position_embeddings"},
        {"tiny-llama", "rms_norm_eps", "true", CPA_INVALID, "rms_norm_eps: found true"},
        {"tiny-llama", "dtype", "\"float8_e4m3fn\"", CPA_INVALID, "dtype: found \"float8_e4m3fn\", expected float32"},
        {"tiny-llama", "tie_word_embeddings", "1", CPA_INVALID, "tie_word_embeddings: found 1, expected true or false"},
        {"tiny-llama", "rope_parameters", "[]", CPA_INVALID, "rope_parameters: found [], expected an object"},
        {"tiny-llama", "rope_parameters", "{\"rope_type\": \"longrope\"}", CPA_UNSUPPORTED,
         "rope_parameters.rope_type: found longrope"},
        {"tiny-llama", "rope_parameters", "{\"rope_type\": \"llama3\"}", CPA_INVALID,
         "rope_parameters.factor: found nothing"},
        {"tiny-llama", "rope_parameters",
         "{\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, \"high_freq_factor\": 4}", CPA_INVALID,
         "high_freq_factor: found 4, expected more"},
        {"tiny-llama", "rope_parameters", "{\"rope_type\": \"yarn\", \"factor\": 8, \"truncate\": false}",
         CPA_UNSUPPORTED, "truncate"},
        {"tiny-llama", "rope_parameters", "{\"full_attention\": {}, \"sliding_attention\": {}}", CPA_UNSUPPORTED,
         "rope_parameters.full_attention: found rotary positions of one type of layer"},
        {"tiny-llama2", "rope_scaling", "{\"type\": \"linear\", \"factor\": 0.5}", CPA_INVALID,
         "rope_scaling.factor: found 0.5"},
        {"tiny-llama2", "rope_theta", "1", CPA_INVALID, "rope_theta: found 1,"},
        {"tiny-qwen2", "layer_types", "[\"full_attention\"]", CPA_INVALID, "layer_types"},
        {"tiny-qwen2", "layer_types", "[\"full_attention\", \"chunked_attention\"]", CPA_UNSUPPORTED,
         "layer 1 is chunked_attention"},
        {"tiny-qwen2", "max_window_layers", "-1", CPA_INVALID, "max_window_layers: found -1"},
        {"tiny-deepseek-v3", "model_type", "\"deepseek_v32\"", CPA_INVALID, "index_n_heads: found nothing"},
        {"tiny-deepseek-v32", "index_topk", "4097", CPA_INVALID, "index_topk: found 4097"},
        {"tiny-deepseek-v32", "index_head_dim", "24", CPA_INVALID, "index_head_dim: found 24, expected a power of two"},
        {"tiny-deepseek-v32", "index_head_dim", "8", CPA_INVALID, "index_head_dim: found 8, expected at least qk_rope"},
        {"tiny-deepseek-v32", "q_lora_rank", "null", CPA_INVALID, "q_lora_rank: found nothing, expected a number"},
        {"tiny-deepseek-v32", "layer_types", "[\"indexed_attention\", \"full_attention\"]", CPA_UNSUPPORTED,
         "layer_types: layer 1 is full_attention, supported is indexed_attention"},
        {"tiny-deepseek-v3", "model_type", "\"deepseek_v4\"", CPA_UNSUPPORTED, "found deepseek_v4, which is not"},
        {"tiny-deepseek-v3", "index_topk", "2048", CPA_UNSUPPORTED, "index_topk: not a key"},
        {"tiny-deepseek-v3", "kv_lora_rank", NULL, CPA_INVALID, "kv_lora_rank: found nothing"},
        {"tiny-deepseek-v3", "kv_lora_rank", "570", CPA_UNSUPPORTED,
         "kv_lora_rank: found 570 with qk_rope_head_dim 16"},
        {"tiny-deepseek-v3", "q_lora_rank", NULL, CPA_INVALID, "q_lora_rank: found nothing"},
        {"tiny-deepseek-v3", "qk_rope_head_dim", "15", CPA_INVALID, "qk_rope_head_dim: found 15, expected an even"},
        {"tiny-deepseek-v3", "num_key_value_heads", "2", CPA_INVALID, "num_key_value_heads: found 2"},
        {"tiny-deepseek-v3", "head_dim", "40", CPA_INVALID, "head_dim: found 40, expected qk_rope_head_dim"},
        {"tiny-deepseek-v3", "qk_head_dim", "41", CPA_INVALID, "qk_head_dim: found 41"},
        {"tiny-deepseek-v3", "attention_bias", "true", CPA_UNSUPPORTED, "attention_bias: found true"},
        {"tiny-deepseek-v2", "mlp_bias", "true", CPA_UNSUPPORTED, "mlp_bias: found true"},
        {"tiny-deepseek-v3", "n_group", "3", CPA_INVALID, "n_group: found 3, expected a number that divides"},
        {"tiny-deepseek-v3", "topk_group", "5", CPA_INVALID, "topk_group: found 5"},
        {"tiny-deepseek-v3", "topk_group", "1", CPA_INVALID, "topk_group: found 1, expected groups with at least"},
        {"tiny-deepseek-v3", "num_experts_per_tok", "9", CPA_INVALID, "num_experts_per_tok: found 9"},
        {"tiny-deepseek-v3", "moe_layer_freq", "2", CPA_INVALID, "moe_layer_freq: found 2"},
        {"tiny-deepseek-v3", "scoring_func", "\"softmax\"", CPA_UNSUPPORTED, "scoring_func: found softmax"},
        {"tiny-deepseek-v2", "topk_method", "\"noaux_tc\"", CPA_UNSUPPORTED, "topk_method: found noaux_tc"},
        {"tiny-deepseek-v2", "norm_topk_prob", "true", CPA_UNSUPPORTED, "norm_topk_prob: found true"},
        {"tiny-deepseek-v2", "rope_interleave", "true", CPA_UNSUPPORTED, "rope_interleave: not a key"},
        {"tiny-deepseek-fp8", "quantization_config", "{\"quant_method\": \"fp8\"}", CPA_INVALID,
         "quantization_config.weight_block_size: found nothing, expected [128, 128]"},
        {"tiny-deepseek-fp8", "quantization_config", "{\"quant_method\": \"fp8\", \"activation_scheme\": \"static\"}",
         CPA_UNSUPPORTED, "quantization_config.activation_scheme: found static"},
        {"tiny-mistral", "sliding_window", "0", CPA_INVALID, "sliding_window: found 0"},
        {"tiny-llama", "num_experts", "8", CPA_UNSUPPORTED, "num_experts: not a key that this family has"},
        {"tiny-mixtral", "num_local_experts", "1025", CPA_INVALID, "num_local_experts: found 1025"},
        {"tiny-mixtral", "num_experts_per_tok", "9", CPA_INVALID,
         "num_experts_per_tok: found 9, expected at most num_local_experts, 8"},
        {"tiny-mixtral", "norm_topk_prob", "true", CPA_UNSUPPORTED, "norm_topk_prob: not a key"},
        {"tiny-qwen3-moe", "num_experts", NULL, CPA_INVALID, "num_local_experts: found nothing"},
        {"tiny-qwen3-moe", "num_experts_per_tok", "33", CPA_INVALID, "num_experts_per_tok: found 33"},
        {"tiny-qwen3-moe", "decoder_sparse_step", "0", CPA_INVALID, "decoder_sparse_step: found 0"},
        {"tiny-qwen3-moe", "mlp_only_layers", "[2]", CPA_INVALID, "mlp_only_layers: found [2]"},
        {"tiny-qwen3-moe", "mlp_only_layers", "1", CPA_INVALID, "mlp_only_layers: found 1, expected a list"},
        {"tiny-qwen3-moe", "n_shared_experts", "1", CPA_UNSUPPORTED, "n_shared_experts: not a key"},
        {"tiny-qwen3-moe", "routed_scaling_factor", "2.5", CPA_UNSUPPORTED, "routed_scaling_factor: not a key"},
        {"tiny-llama", "eos_token_id", "[1, \"x\"]", CPA_INVALID, "eos_token_id"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        cpa_model_config config = {.layers = -7};
        cpa_error err = {CPA_OK, ""};
        changed c = change(refused[i].model);
        set(&c, refused[i].key, refused[i].value);
        CU_ASSERT_EQUAL(load_changed(&c, &config, &err), refused[i].status);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "/config.json: "));
        if (!strstr(err.message, refused[i].says)) CU_FAIL(refused[i].says);
        if (!strstr(err.message, refused[i].says)) printf("\n%s, not '%s'\n", err.message, refused[i].says);
        CU_ASSERT_EQUAL(config.layers, -7);
        end_change(&c);
    }
}

static void test_no_files(void) {
    cpa_model_config config;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_model_config_load(CPA_TEST_DATA "/none", &config, &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "none/config.json: No such file"));
    cpa_test_folder folder = cpa_test_folder_make();
    const char *const texts[] = {"", "[]", "{", "{\"model_type\": \"llama\"", "{\"a\": 1, \"a\": 2}", "\xff\xfe"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        cpa_test_folder_write(&folder, "config.json", texts[i], strlen(texts[i]));
        CU_ASSERT_EQUAL(cpa_model_config_load(folder.path, &config, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "config.json:"));
    }
    cpa_test_folder_remove(&folder);
}

static const cpa_test tests[] = {
    {"the tiny models are what their files say", test_families},
    {"rotary positions are read in the forms of versions 4 and 5", test_rope_parameters},
    {"what a file need not say has its family's default", test_defaults},
    {"windows are those of the layers that have them", test_windows},
    {"layers with experts, and how these are chosen", test_experts},
    {"latent attention and experts in groups are read", test_latents},
    {"a module for the token after next is one more layer", test_next_modules},
    {"the shape has a mask for each layer where they differ", test_shape},
    {"what is missing, out of range or unsupported is named", test_refusals},
    {"a pipe is refused, and not waited for", test_pipe},
    {"files that are missing or no JSON are named", test_no_files},
};
CPA_TEST_MAIN("model config", tests)
