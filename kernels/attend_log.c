#include "kernels/attend_log.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "kernels/operators.h"

/* Whether a text has been told before; one that finds no room counts as told. */
static int is_told(const char *text) {
    enum { MOST_TEXTS = 256 };
    static _Atomic(uint64_t) told[MOST_TEXTS];
    const uint64_t hash = cpa_hash_bytes(CPA_HASH_START, text, strlen(text)) | 1;
    for (int i = 0; i < MOST_TEXTS; i++) {
        uint64_t other = 0;
        if (atomic_compare_exchange_strong(&told[i], &other, hash)) return 0;
        if (other == hash) return 1;
    }
    return 1;
}

void cpa_attend_log_plain(const char *why) {
    if (is_told(why)) return;
    cpa_log(CPA_LOG_WARN, "attend runs without tensor cores, often 100 to 1,000 times slower: they do not take %s",
            why);
}

static int append(char *line, size_t size, int used, const char *kind, const cpa_attend_kernel *kernel) {
    if (!kernel->name || used >= (int)size) return used;
    used += snprintf(line + used, size - (size_t)used, ", %s %s", kind, kernel->name);
    if (!kernel->why || used >= (int)size) return used;
    return used + snprintf(line + used, size - (size_t)used, " (%s does not take %s)", kernel->fastest, kernel->why);
}

void cpa_attend_log_kernels(const cpa_attend_plan *plan, const cpa_attend_args *args) {
    const cpa_attention_shape *shape = &plan->shape;
    const int of_tensors = plan->block_size == CPA_TENSOR_BLOCK;
    cpa_attend_kernels kernels;
    char line[1024];
    if (!cpa_log_enabled(CPA_LOG_DEBUG)) return;
    plan->device->operators->attend_kernels(plan, args, &kernels);
    int used = snprintf(line, sizeof line, "attend: heads %d/%d, head dim %d/%d, %s over %s, block size %d",
                        shape->q_heads, shape->kv_heads, shape->k_dim, shape->v_dim, cpa_dtype_name(args->q_dtype),
                        cpa_dtype_name(args->kv.dtype), of_tensors ? 0 : plan->block_size);
    used = append(line, sizeof line, used, "decode by", &kernels.decode);
    used = append(line, sizeof line, used, "prefill by", &kernels.prefill);
    (void)append(line, sizeof line, used, "shared keys by", &kernels.shared);
    if (!is_told(line)) cpa_log(CPA_LOG_DEBUG, "%s", line);
}
