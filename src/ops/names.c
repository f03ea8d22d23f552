/* Names of dtypes and layouts, and what others call them. */
#include <cpattn/names.h>

#include <string.h>

#include "src/ops/check_args.h"

typedef struct alias {
    const char *name;
    int value;
} alias;

static const alias dtypes[] = {
    {"float32", CPA_F32},
    {"float", CPA_F32},
    {"bfloat16", CPA_BF16},
    {"float16", CPA_F16},
    {"half", CPA_F16},
    {"fp8", CPA_FP8_E4M3},
    {"fp8_e4m3fn", CPA_FP8_E4M3},
    {"float8_e4m3fn", CPA_FP8_E4M3},
    {"float8_e5m2", CPA_FP8_E5M2},
    {"turboquant_int8", CPA_INT8},
    {"fp8_ds_mla", CPA_FP8_T128},
    {"turboquant_k8v4", CPA_TQ_K8V4},
    {"turboquant_4bit_nc", CPA_TQ_4BIT},
    {"turboquant_k3v4_nc", CPA_TQ_K3V4},
    {"turboquant_3bit_nc", CPA_TQ_3BIT},
};

static const alias layouts[] = {
    {"token-major", CPA_TOKEN_MAJOR}, {"head-major", CPA_HEAD_MAJOR}, {"vllm-x", CPA_VLLM_X},
    {"NHD", CPA_TOKEN_MAJOR},         {"HND", CPA_HEAD_MAJOR},
};

/* The value of a name, or -1. */
static int value_of(const alias *aliases, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(aliases[i].name, name) == 0) return aliases[i].value;
    return -1;
}

cpa_status cpa_dtype_of_name(const char *name, cpa_dtype *out, cpa_error *err) {
    REQUIRE(err, name && out, "dtype: %s is NULL", name ? "out" : "the name");
    int dtype = value_of(dtypes, sizeof dtypes / sizeof *dtypes, name);
    for (int i = 0; dtype < 0 && i < CPA_KV_DTYPE_COUNT; i++)
        if (strcmp(cpa_dtype_name((cpa_dtype)i), name) == 0) dtype = i;
    REQUIRE(
        err, dtype >= 0,
        "dtype: found '%s', expected fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8, fp8_t128, fp8_t64, tq_k8v4, tq_4bit, "
        "tq_k3v4, tq_3bit or another name of one of these",
        name);
    *out = (cpa_dtype)dtype;
    return CPA_OK;
}

cpa_status cpa_kv_layout_of_name(const char *name, cpa_kv_layout *out, cpa_error *err) {
    REQUIRE(err, name && out, "layout: %s is NULL", name ? "out" : "the name");
    const int layout = value_of(layouts, sizeof layouts / sizeof *layouts, name);
    REQUIRE(err, layout >= 0, "layout: found '%s', expected token-major (NHD), head-major (HND) or vllm-x", name);
    *out = (cpa_kv_layout)layout;
    return CPA_OK;
}

const char *cpa_kv_layout_name(cpa_kv_layout layout) {
    return (uint32_t)layout <= CPA_VLLM_X ? layouts[layout].name : "none";
}
