/* Dtypes and layouts by their names: those of this library, and those by which PyTorch, vLLM, SGLang and FlashInfer know
 * the same formats.
 *
 * | here       | elsewhere                              |
 * | fp32       | float32, float                         |
 * | bf16       | bfloat16                               |
 * | fp16       | float16, half                          |
 * | fp8_e4m3   | fp8, fp8_e4m3fn, float8_e4m3fn         |
 * | fp8_e5m2   | float8_e5m2                            |
 * | int8       | turboquant_int8 (affine, a scale and a zero for each token and head) |
 * | fp8_t128   | fp8_ds_mla                             |
 * | tq_k8v4    | turboquant_k8v4                        |
 * | tq_4bit    | turboquant_4bit_nc                     |
 * | tq_k3v4    | turboquant_k3v4_nc                     |
 * | tq_3bit    | turboquant_3bit_nc                     |
 * | token-major, head-major | NHD, HND                  |
 * | vllm-x     |                                        |
 *
 * vLLM names the cache of DeepSeek-V4 fp8_ds_mla too, by its model: that is fp8_t64 here, and has no name but this.
 *
 * What a caller means by "auto" is the caller's: no format has that name. All is thread-safe. */
#ifndef CPATTN_NAMES_H
#define CPATTN_NAMES_H

#include <cpattn/shape.h>
#include <cpattn/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *out becomes the dtype of the name. Otherwise it is left alone, and CPA_INVALID returned: for the names of further
 * formats (nvfp4, int4, fp8_inc, fp8_e4m3fnuz) as well, and NULL. */
CPA_API cpa_status cpa_dtype_of_name(const char *name, cpa_dtype *out, cpa_error *err);

/* The same of a layout of caches. */
CPA_API cpa_status cpa_kv_layout_of_name(const char *name, cpa_kv_layout *out, cpa_error *err);

/* "token-major", "head-major" or "vllm-x"; "none" for a value that is no layout. Lives as long as the library. */
CPA_API const char *cpa_kv_layout_name(cpa_kv_layout layout);

#ifdef __cplusplus
}
#endif
#endif
