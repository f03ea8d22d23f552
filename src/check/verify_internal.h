/* What choosing samples (verify.c) and checking them (verify_step.c) share. */
#ifndef CPA_VERIFY_INTERNAL_H
#define CPA_VERIFY_INTERNAL_H

#include "base/threads.h"
#include "src/check/reference.h"
#include "src/check/verify.h"
#include "src/check/verify_budget.h"
#include "src/check/verify_matrix.h"

/* Every so many steps one row is checked, however small the rate. */
enum { VERIFY_FORCED_STEPS = 64 };
/* How often ranks agree on the time that the run and the check took, beside every step with samples. */
enum { VERIFY_AGREE_STEPS = 16 };

typedef struct cpa_verify_sample {
    int64_t chunk;
    int64_t position;
    int32_t layer;
    int32_t head;
    int32_t form;   /* form of the row */
    int32_t judges; /* not 0: what an indexer chose for the row is checked here, and in no other head */
    int64_t data;   /* index into cpa_verify.data */
} cpa_verify_sample;

/* What a sample's row attends, as its list has it; the entries follow, and behind cpa_verify.list_bytes the query and the
 * weights by which an indexer chose them. */
typedef struct cpa_verify_list {
    int32_t unit, count; /* count negative: all keys */
    int32_t width;       /* entries that there are at most */
    int32_t is_chosen;   /* by an indexer */
    int32_t is_bits;     /* the entries are the words of bits, `width` of them, each for `unit` keys */
} cpa_verify_list;

/* Host memory that the device copies to. */
typedef struct cpa_verify_memory {
    char *bytes;
    int64_t capacity;
} cpa_verify_memory;

struct cpa_verify {
    cpa_control *control;
    cpa_worker *worker;
    cpa_threads *threads;
    int32_t n_threads;
    uint64_t seed;
    cpa_verify_budget budget;
    double start_s; /* when the first step began, later by the time since then without work; 0: not yet */
    uint64_t steps; /* steps begun, without plans that have no chunks, with which a server begins */
    cpa_verify_stats stats;
    /* The samples of the step, the same list on every rank; data [n][query | result | list | query and
     * weights of the indexer] is set on the
     * rank that keeps it. */
    cpa_verify_sample *samples;
    cpa_verify_memory data;
    int64_t n_samples, cap_samples, sample_bytes;
    int64_t result_at;            /* bytes from a query to its result, whatever their form */
    int64_t list_at, list_bytes;  /* of a list with its most entries; 0 bytes: the model does not select keys */
    int64_t index_bytes;          /* of what an indexer chose by; 0: there is none */
    float *scales;                /* scales of the cache's keys, then values, of each KV head; 0: rows have their own */
    int replicated;               /* not 0: the rows of the step are replicated */
    int64_t next;                 /* index of the first sample of the layers to come */
    cpa_verify_memory send, recv; /* memory for the exchange of keys and values */
    cpa_verify_matrix matrix;     /* matrix of the row that was checked last, if its form has one */
    char *dump_folder;            /* folder for dumps of wrong rows; "": none, which is told; NULL: none */
};

/* The form of a sample's row, and its mask in the layer. */
static inline const cpa_form *cpa_verify_form(const cpa_verify *verify, const cpa_verify_sample *sample) {
    return &verify->worker->forms.list[sample->form];
}
static inline cpa_mask cpa_verify_mask(const cpa_verify *verify, const cpa_verify_sample *sample) {
    return cpa_model_form_mask(&verify->worker->options.model, sample->form, sample->layer);
}

/* The shape of the layer of a sample. */
static inline cpa_attention_shape cpa_verify_shape(const cpa_verify *verify, const cpa_verify_sample *sample) {
    return cpa_model_layer_shape(&verify->worker->options.model, sample->layer);
}

/* In a layer whose cache is quantised. */
static inline float cpa_verify_scale(const cpa_verify *verify, cpa_kv_part part, int32_t kv_head) {
    return verify->scales[part * verify->worker->options.model.attention.kv_heads + kv_head];
}

/* Makes room for `need` bytes; keeps the first `used`. */
cpa_status cpa_verify_reserve(cpa_verify *verify, cpa_verify_memory *memory, int64_t need, int64_t used,
                              cpa_error *err);

/* The rank that keeps the query and the result of a sample: the owner of the row, or where rows are replicated the one
 * with its head. */
int32_t cpa_verify_keeper(const cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_sample *sample);

/* Begins a reference row from what was kept of a sample: its query, and its result, which goes to row->got. The row has
 * the rules of its layer and head. */
void cpa_verify_begin_row(const cpa_verify *verify, const cpa_verify_sample *sample, cpa_reference_row *row,
                          const char *data);

/* Whether a row of the chunk sees a key, both told by where they lie in the cache: by the mask of its form, and drafts
 * of a tree by what they come behind. */
static inline int cpa_verify_sees(const cpa_step_plan *plan, const cpa_plan_chunk *chunk, cpa_mask mask, int64_t query,
                                  int64_t key) {
    const int64_t first = cpa_plan_first_draft(chunk);
    if (chunk->parents >= 0 && query >= first && key >= first) return cpa_plan_draft_sees(plan, chunk, query, key);
    return cpa_reference_sees(mask, query, key);
}

static inline const int32_t *cpa_verify_entries(const cpa_verify_list *list) {
    return (const int32_t *)(list + 1);
}

/* Whether a list, which ascends, has a key. */
static inline int cpa_verify_selects(const cpa_verify_list *list, int64_t key) {
    const int32_t *entries = cpa_verify_entries(list), count = list->count < list->width ? list->count : list->width;
    int32_t low = 0, high = count;
    if (list->count < 0) return 1;
    if (list->is_bits) {
        const int64_t bit = key / list->unit;
        return bit < list->width && ((uint32_t)entries[bit / 32] >> bit % 32 & 1);
    }
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (entries[middle] >= 0 && entries[middle] < key / list->unit)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && entries[low] == key / list->unit;
}

/* The last key that the row of a sample can see, which is of this chunk. */
static inline int64_t cpa_verify_last_key(const cpa_verify *verify, const cpa_plan_chunk *chunk,
                                          const cpa_verify_sample *sample) {
    return cpa_verify_mask(verify, sample).causal ? sample->position : chunk->start + chunk->count - 1;
}

#endif
