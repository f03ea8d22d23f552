/* What a step needs on the device beside the plans of its attention: one block of memory, so that one copy brings it.
 * Where an array lies follows from how many entries there are of each, so that steps of one shape have the same
 * addresses. */
#ifndef CPA_STEP_ARRAYS_H
#define CPA_STEP_ARRAYS_H

#include <stdint.h>

#include "src/schedule/drawing.h"

typedef struct cpa_step_sizes {
    int64_t rows, emissions, history, restarts;
    int64_t groups;                  /* groups of layers, each with slots of its own for the rows */
    int64_t yields;                  /* leading emissions that are output tokens; the others are of prompts */
    int64_t masked_rows, mask_words; /* 0: no chunk has a tree of drafts */
    int64_t selected_rows;           /* 0: the model does not select keys */
    int64_t forms;                   /* forms of rows; 0: all rows have one */
    int64_t biases;                  /* biases of logits; 0: no emission has any */
    int64_t next_tokens;             /* rows of a model with layers that draft; 0: it has none */
} cpa_step_sizes;

typedef struct cpa_step_arrays {
    int64_t *positions; /* [rows] */
    int64_t *slots;     /* [groups, rows] */
    /* [emissions] */
    uint64_t *salts; /* what a row adds to the digest begins with */
    uint64_t *sums;  /* what each row adds to the digest; 0 before the step */
    uint64_t *seeds;
    int64_t *given, *drawn_at; /* token that is given, or -1; position of the token that is drawn */
    int32_t *rows, *seqs, *top_logprobs;
    CPA_DRAWING_FIELDS(CPA_DRAWING_ARRAY)
    int32_t *path_ends; /* entry of the history with the row's own token, if that is a draft; -1: it is none */
    int32_t *form_rows; /* [forms, emissions] row of the emission among those of a form; -1: it has another form */
    int32_t *bias_first, *bias_count; /* entries of bias_tokens and bias_values, as cpa_draw_limits has them */
    /* [rows + history] the tokens of both, and which of the tokens that the step before has drawn takes their place */
    uint32_t *tokens;
    int32_t *sources; /* index of the drawn token of the step before that takes the entry's place; -1: none */
    /* [history] */
    int32_t *history_seqs, *history_outputs;
    int32_t *history_parents; /* entry of the draft before; -1: none */
    int32_t *restarts;        /* [restarts] */
    /* [masked_rows] of the step on all ranks, chunk after chunk: as cpa_key_bits has them */
    int64_t *mask_row_word, *mask_first;
    int32_t *mask_width;
    uint32_t *mask_bits;     /* [mask_words] */
    int64_t *selected_index; /* [selected_rows] index in its sequence of each row of the step on all ranks */
    /* [biases] */
    uint32_t *bias_tokens;
    float *bias_values;
    /* [next_tokens] */
    uint32_t *next_tokens; /* the token that follows a row */
    int32_t *next_sources; /* the emission of this rank that draws it; -1: none, it is known */
} cpa_step_arrays;

/* Lays the arrays out from `base` on, which may be NULL, and returns the bytes that they take. */
int64_t cpa_step_arrays_lay_out(const cpa_step_sizes *sizes, void *base, cpa_step_arrays *out);

#endif
