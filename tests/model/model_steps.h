/* A tiny model over context attention, step by step, without an engine: what is to be computed in which step is the
 * test's choice. Every rank makes the same calls. */
#ifndef CPA_TESTS_MODEL_STEPS_H
#define CPA_TESTS_MODEL_STEPS_H

#include <cpattn/context.h>

#include "src/model/transformer.h"
#include "tests/model/expected.h"

enum {
    CPA_TEST_SEQUENCES = 4,
    CPA_TEST_BLOCK = 16,
    CPA_TEST_SEQUENCE_BLOCKS = 14,
    CPA_TEST_MAX_TOKENS = CPA_TEST_BLOCK * CPA_TEST_SEQUENCE_BLOCKS
};

typedef struct cpa_test_answer {
    int64_t known;    /* tokens */
    int64_t computed; /* of these, with keys and values in the cache */
    int64_t prompt;
    uint32_t tokens[CPA_TEST_MAX_TOKENS];
    cpa_placement placement;
    const uint32_t *given; /* output tokens that are imposed; NULL: they are drawn */
    float temperature;
    uint64_t seed;
    /* What its emissions gave, output after output. */
    float logits[CPA_TEST_OUTPUTS][CPA_TEST_MAX_VOCABULARY];
    float logprobs[CPA_TEST_OUTPUTS];
} cpa_test_answer;

/* The next tokens of an answer; the step emits if these are all that are known. */
typedef struct cpa_test_part {
    int answer;
    int64_t count;
    cpa_algorithm algorithm;
} cpa_test_part;

typedef struct cpa_test_model {
    cpa_model_config config;
    cpa_model_shape shape;
    cpa_mask masks[CPA_CONFIG_MAX_LAYERS];
    cpa_owner_map map;
    int32_t rank;
    cpa_device *device;
    cpa_stream *stream;
    cpa_context *context;
    cpa_slices slices; /* of the context */
    cpa_row_exchange row_exchange;
    cpa_transformer *transformer;
    cpa_model model;
    cpa_kv_view *views;       /* [layers] */
    cpa_kv_view *index_views; /* [layers], of models with an indexer */
    void *q, *out;
    int n_answers;
    cpa_test_answer answers[CPA_TEST_SEQUENCES];
    cpa_logits_fn also_observe; /* NULL: nobody */
    void *also_ctx;
    float *seen; /* logits of the emissions of the last step on this rank */
} cpa_test_model;

void cpa_test_model_open(cpa_test_model *model, const char *name, cpa_dtype dtype);
void cpa_test_model_open_folder(cpa_test_model *model, const char *folder, cpa_dtype dtype);
/* The same for steps with slices, where all parts are of one token and there are several ranks. */
void cpa_test_model_open_sliced(cpa_test_model *model, const char *name, cpa_dtype dtype);
/* The same with experts over the ranks. */
void cpa_test_model_open_spread(cpa_test_model *model, const char *name, cpa_dtype dtype,
                                cpa_experts_over_ranks experts);
void cpa_test_model_close(cpa_test_model *model);

/* A sequence of the prompt; its index. */
int cpa_test_model_add(cpa_test_model *model, const uint32_t *prompt, int64_t tokens, cpa_placement placement);
void cpa_test_model_clear(cpa_test_model *model);

void cpa_test_model_step(cpa_test_model *model, const cpa_test_part *parts, int n);

#endif
