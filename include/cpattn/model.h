/* A model behind the engine: where queries, keys and values come from, where attention results go, and how the next
 * tokens are drawn.
 *
 * The engine calls a cpa_model on every rank, step after step, from the thread that runs the engine:
 *
 *     begin_step    embeds the tokens of the step's rows
 *     layer_in      queries, keys and values of a layer       \  the engine writes the cache
 *     select        which keys each row attends, if not all    |  and attends
 *     layer_out     the attention results of that layer       /  in between
 *     end_step      draws a token for each row that yields one
 *     layer_in ...  of the layers that draft, with the tokens that follow the rows, and
 *     end_draft     guesses what follows those; of models that have such layers
 *
 * A rank's rows are the new tokens that it owns; a row's token is on the device alone where the step right before has
 * drawn it. All calls enqueue on the stream (cpa_stream_native) and do nothing else. */
#ifndef CPATTN_MODEL_H
#define CPATTN_MODEL_H

#include <cpattn/context.h>
#include <cpattn/indexer.h>
#include <cpattn/nn.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A form of a model's rows. Masks, scales and matrices are those of rows of this form, the same on every rank, and must
 * outlive the engine. */
typedef struct cpa_model_form {
    cpa_row_form widths;
    /* [layers]; NULL: those of the layers. The cache keeps what the mask of a layer shows: these show no more. */
    const cpa_mask *layer_masks;
    const float *layer_scales; /* [layers], of scores; NULL, or 0 for a layer: 1 / sqrt(k_dim) of the form */
    /* [layers], on the device: what cpa_form_rows.matrix is in each; NULL for a form without out_dim. The array is read
     * behind layer_in, which may have set it in the first step; from then on nothing of it changes. */
    const void *const *layer_matrices;
    const void *const *layer_expansions; /* the same of cpa_form_rows.expansion; NULL for a form that is not expanded */
    int64_t reserved[3];                 /* zero */
} cpa_model_form;

/* The attention of a model. */
typedef struct cpa_model_shape {
    int32_t layers;
    cpa_attention_shape attention; /* shape of every layer, its cache included; v_dim 0 = k_dim */
    cpa_mask mask;                 /* mask of every layer; unused with layer_masks */
    const cpa_mask *layer_masks;   /* [layers] mask of each layer; NULL: `mask` for all. Must outlive the engine */
    /* [layers], cpattn/score.h, with arrays of heads on the host: what each layer does to scores; NULL: nothing. Must
     * outlive the engine, arrays included. */
    const cpa_score_rules *layer_rules;
    /* [n_forms], at most CPA_MOST_ROW_FORMS, and which of them rows take: those of a chunk that decodes (the token that
     * was drawn last, and drafts behind it) and those of a chunk of a prompt, which takes the former too where that is the
     * same attention over latents for less work (cpa_short_prompts). A request that is preempted computes as a prompt what
     * it had decoded. NULL and 0: all rows have the form of `attention`. Must outlive the engine. Without a
     * network forms have no layer_matrices, and the synthetic model has layer_expansions of its own where the ones here
     * are NULL. Over latents (v_in_k) each form that is not expanded has layer_scales, none of them 0. */
    const cpa_model_form *forms;
    int32_t n_forms, prefill_form, decode_form;
    int32_t draft_layers; /* the last of `layers`, which draft (cpa_model.end_draft): fewer than all of them */
    /* The indexer of every layer, whose keys, one of each token, lie in the blocks of the cache and go wherever these go;
     * NULL: none. Its unit and tokens_per_key are 1. Must outlive the engine. */
    const cpa_index_form *index;
    /* [layers], not 0: the cache of that layer is of attention.dtype, beside a quantised one of the others; NULL: that of
     * none is. Of those that draft too. Not over latents (v_in_k). Must outlive the engine. */
    const uint8_t *unquantised_layers;
} cpa_model_shape;

/* The mask of a layer. */
CPA_INLINE cpa_mask cpa_model_mask(const cpa_model_shape *model, int32_t layer) {
    return model->layer_masks ? model->layer_masks[layer] : model->mask;
}

/* The shape of a layer: `attention`, its cache quantised or not. */
CPA_INLINE int cpa_model_leaves_layer(const cpa_model_shape *model, int32_t layer) {
    return model->unquantised_layers && model->unquantised_layers[layer];
}
CPA_INLINE cpa_attention_shape cpa_model_layer_shape(const cpa_model_shape *model, int32_t layer) {
    return cpa_model_leaves_layer(model, layer) ? cpa_shape_unquantised(&model->attention) : model->attention;
}

/* The mask, the scale (0 = 1 / sqrt(k_dim)), the matrix and the expansion of rows of a form in a layer; form 0 without
 * forms. */
CPA_INLINE cpa_mask cpa_model_form_mask(const cpa_model_shape *model, int32_t form, int32_t layer) {
    const cpa_mask *own = model->n_forms > 0 ? model->forms[form].layer_masks : NULL;
    return own ? own[layer] : cpa_model_mask(model, layer);
}
CPA_INLINE float cpa_model_form_scale(const cpa_model_shape *model, int32_t form, int32_t layer) {
    const float *own = model->n_forms > 0 ? model->forms[form].layer_scales : NULL;
    return own ? own[layer] : 0;
}
CPA_INLINE const void *cpa_model_form_matrix(const cpa_model_shape *model, int32_t form, int32_t layer) {
    const void *const *own = model->n_forms > 0 ? model->forms[form].layer_matrices : NULL;
    return own ? own[layer] : NULL;
}
CPA_INLINE const void *cpa_model_form_expansion(const cpa_model_shape *model, int32_t form, int32_t layer) {
    const void *const *own = model->n_forms > 0 ? model->forms[form].layer_expansions : NULL;
    return own ? own[layer] : NULL;
}

/* The rules of a layer; NULL: none. */
CPA_INLINE const cpa_score_rules *cpa_model_rules(const cpa_model_shape *model, int32_t layer) {
    return model->layer_rules ? &model->layer_rules[layer] : NULL;
}

/* What is added to the logit of a token. */
typedef struct cpa_logit_bias {
    uint32_t token;
    float bias;
} cpa_logit_bias;
enum { CPA_MOST_LOGIT_BIASES = 300 };

/* How the output tokens of a request are drawn. Zeros stand for the most probable token every time, without penalties.
 * The order: logit_bias, penalties, min_tokens and the request's constraint, temperature, top_k, top_p, min_p. What is
 * drawn depends on the logits, the seed and the position alone: samples of one prompt need seeds of their own. */
typedef struct cpa_sampling {
    size_t size;
    float temperature;        /* logits are divided by it; 0: the most probable token is taken */
    float top_p;              /* the most probable tokens that hold this much probability together; 0 or 1: all */
    float min_p;              /* tokens with at least this share of the most probable one's probability; 0: all */
    int32_t top_k;            /* how many of the most probable tokens may be drawn; 0: all */
    float repetition_penalty; /* of tokens of prompt and output: logits > 0 are divided by it, others multiplied
                                  (Keskar et al., arXiv:1909.05858); 0 or 1: none */
    float presence_penalty;   /* subtracted from the logits of tokens of the output; 0: none */
    uint64_t seed;
    int32_t logprobs;         /* the log-probability of each output token is wanted */
    int32_t ignore_eos;       /* the end tokens of the model do not end the request */
    const uint32_t *stop_ids; /* [n_stop_ids] tokens that end the request when they are drawn; copied */
    int64_t n_stop_ids;
    int64_t reserved[4];     /* zero */
    float frequency_penalty; /* subtracted from the logits of tokens of the output for each time that they are there, as
                                OpenAI has it; 0: none */
    int32_t top_logprobs;    /* with each output token so many of the most probable ones are told, up to
                                CPA_MOST_TOP_LOGPROBS, and its rank; where it is above 0, logprobs is 1, too */
    /* [n_logit_biases] added to the logits of their tokens, of which none comes twice; finite. Copied. For networks that
     * tell their vocabulary, as is the next. */
    const cpa_logit_bias *logit_biases;
    int64_t n_logit_biases; /* up to CPA_MOST_LOGIT_BIASES */
    int64_t min_tokens;     /* output tokens before which no token that ends the request is drawn */
    /* What the network says of each token of the prompt but the first is told: its log-probability and rank, and so many
     * of the most probable tokens, up to CPA_MOST_TOP_LOGPROBS. The whole prompt is computed then, also where its
     * beginning is in the cache. */
    int32_t prompt_logprobs, top_prompt_logprobs;
} cpa_sampling;

/* The rows of a step on one rank: its tokens, form after form (cpa_model_step.forms), and those of a form chunk after
 * chunk. Where a call is captured in a graph, that is launched again for steps of as many rows: what lies on the host is
 * of the step of the call, what lies on the device of the step that runs. A step may be filled up to a round number of
 * rows: those have slot -1, request, token and position 0, and whatever is computed for them must do no harm. */
typedef struct cpa_rows {
    int64_t count;
    const uint64_t *requests; /* host */
    const uint32_t *tokens;   /* host; 0 where the token is known on the device alone */
    const int64_t *positions; /* host */
    const uint32_t *tokens_device;
    const int64_t *positions_device;
    /* Device: slot of the token in the cache of the layer at hand (cpa_kv_write_args); -1: none. Layers of different
     * windows have different ones. */
    const int64_t *slots_device;
} cpa_rows;

/* What some row of a step, on whatever rank, wants of the drawing; a graph is launched for steps that want the same. */
enum {
    CPA_WANTS_LOGITS = 1,      /* not every token is given, or a log-probability is wanted */
    CPA_WANTS_TEMPERATURE = 2, /* above 0 */
    CPA_WANTS_FILTERS = 4,     /* top_k, top_p or min_p */
    CPA_WANTS_PENALTIES = 8,   /* repetition, presence or frequency */
    CPA_WANTS_LOGPROBS = 16,
    CPA_WANTS_BIASES = 32,
    CPA_WANTS_MASKS = 64,
    CPA_WANTS_RANKS = 128 /* top_logprobs */
};

/* How the token of each emission is drawn: device arrays of as many entries as there are emissions, with 1 for a top_p
 * or a repetition penalty that is none. */
typedef struct cpa_sample_rows {
    const float *temperature;
    const float *top_p;
    const float *min_p;
    const int32_t *top_k;
    const float *repetition_penalty;
    const float *presence_penalty;
    const uint64_t *seed;
    const int64_t *position; /* position of the token that is drawn */
    const int32_t *seq;      /* index of the sequence: below max_num_seqs, its own while it runs */
    const int64_t *given;    /* token that comes out whatever the logits; -1: the token is drawn */
} cpa_sample_rows;

/* The rows of a step on one rank that yield a token each; and behind these, rows of prompts whose log-probabilities are
 * wanted: the token that follows each in its prompt is given. */
typedef struct cpa_emissions {
    int64_t count;
    const int32_t *rows; /* device: the row; -1: none, the entry fills up */
    cpa_sample_rows sample;
    uint32_t wants; /* CPA_WANTS_..., of all ranks */
} cpa_emissions;

/* The tokens that the sequences of a step go on with, those of all ranks on every rank: what penalties follow from. A
 * sequence has each of its tokens here once, until it restarts; count and n_restarts are 0 unless some row of the step
 * wants penalties. */
typedef struct cpa_history {
    int64_t n_restarts;
    const int32_t *restarts; /* device: indices of sequences whose tokens of the steps before are forgotten first */
    int64_t count;
    const int32_t *seqs;    /* device: indices of sequences; -1: none, the entry fills up */
    const uint32_t *tokens; /* device */
    const int32_t *outputs; /* device: 1 for a token of the output, 0 for one of the prompt */
} cpa_history;

/* Products that are sliced over the ranks of an engine: each multiplies all rows by its part of a matrix. Of what
 * `width` counts, in units that `unit` of it make, rank r has
 *
 *     [unit * cpa_slice_begin(width / unit, ranks, r), unit * cpa_slice_begin(width / unit, ranks, r + 1))
 *
 * The calls enqueue on the stream of the step, which they are captured with. Every rank makes the same ones in the same
 * order; tensors are on the device and contiguous, and what a call reads may be overwritten once it has returned. A
 * status other than CPA_OK leaves its message on the stream. */
typedef struct cpa_slice_gather {
    size_t size;
    int64_t rows;
    int64_t width;
    int64_t unit; /* divides the width */
    cpa_dtype dtype;
    const void
        *part; /* [rows, width of this rank]: outputs of its slice of a matrix; one row may lie in its place in out */
    void *out; /* [rows, width]: those of all ranks, on every rank */
} cpa_slice_gather;
typedef struct cpa_slice_sum {
    size_t size;
    int64_t rows;
    int32_t width;
    cpa_dtype dtype;   /* dtype of bias and out */
    const float *part; /* [rows, width]: what this rank's slice of the inputs gives */
    const void *bias;  /* [width], or NULL; the same on every rank */
    void *out;         /* [rows, width]: the sum of all ranks in their order, then the bias; rounded once, and the same
                           bits on every rank */
} cpa_slice_sum;
typedef struct cpa_slices {
    size_t size;
    void *ctx;
    int32_t rank, ranks;
    cpa_status (*gather)(void *ctx, const cpa_slice_gather *args, cpa_stream *stream);
    cpa_status (*sum)(void *ctx, const cpa_slice_sum *args, cpa_stream *stream);
} cpa_slices;

/* Rows that ranks send each other, each as many to each as it likes: so a network has what lies on other ranks compute
 * for it. Every rank makes the same calls in the same order, also one without rows. The numbers of rows are known on the
 * host; what travels is on the device, contiguous. */
typedef struct cpa_row_exchange_args {
    size_t size;
    int64_t row_bytes;
    const int64_t *send_rows;    /* [ranks] how many go to each rank, this one too */
    const int64_t *receive_rows; /* [ranks] how many come from each: what that rank has for this one in send_rows */
    const void *send;            /* those for rank 0, then those for rank 1, ... */
    void *receive;               /* from rank 0, then from rank 1, ...; does not overlap `send` */
    int32_t to_all; /* 1: the same rows go to each rank that gets any, and `send` has them once; 0: as above */
} cpa_row_exchange_args;
typedef struct cpa_row_exchange {
    size_t size;
    void *ctx;
    int32_t rank, ranks;
    cpa_status (*exchange)(void *ctx, const cpa_row_exchange_args *args, cpa_stream *stream);
} cpa_row_exchange;

/* Drafts count as tokens of the output for what is drawn behind them, and for that alone, since they may be wrong:
 * those on the path of emission i, which are entry ends[i] of the history, then entry parents of that, and so on until
 * -1. They have entries in the history whose sequence is -1. Without penalties in the step there are none. */
typedef struct cpa_draft_paths {
    const int32_t *ends;    /* device [emissions]; NULL: no row has a path */
    const int32_t *parents; /* device [history.count] */
} cpa_draft_paths;

/* What may be drawn, as cpa_sample_args has it, with an entry of mask_index, bias_first and bias_count for each emission:
 * the masks of constraints, and biases, of which those of -infinity keep a token out. Where no row of the step wants
 * masks, or biases, theirs are not to be read. Masks come late: end_step alone finds them. */
typedef struct cpa_draw_limits {
    const uint32_t *masks;     /* device [n_masks, (vocabulary + 31) / 32] */
    const int32_t *mask_index; /* device; -1: any token */
    int64_t n_masks;
    const uint32_t *bias_tokens;            /* device [bias_entries] */
    const float *bias_values;               /* device [bias_entries] */
    const int32_t *bias_first, *bias_count; /* device */
    int64_t bias_entries;
} cpa_draw_limits;

/* The rows of a step that have one form: [first, first + rows) of all. Their queries, [rows, q_heads, k_dim] of the
 * form, begin so many bytes behind the first of all, and so do their results, [rows, q_heads, out_dim] (v_dim of the
 * form where that is 0; of a step with slices, of the own heads). */
typedef struct cpa_step_form {
    int64_t first, rows;
    int64_t q_bytes, out_bytes;
} cpa_step_form;

/* One step, as a rank's model sees it. */
typedef struct cpa_model_step {
    size_t size;
    cpa_rows rows;
    cpa_emissions emissions;
    cpa_history history;
    /* Set in the steps of several ranks that a model takes with slices (cpa_model.slices): the rows and emissions are
     * those of all ranks, the same on each, slots are -1 but for own rows, results have the heads
     * [cpa_slice_begin(q_heads, ranks, rank), ...) alone, and all ranks draw the same tokens. NULL: the rows are those
     * of this rank. */
    const cpa_slices *slices;
    cpa_draft_paths paths;
    const float
        *frequency_penalty;      /* device [emissions], of the rows that yield a token, as those of emissions.sample */
    const int32_t *top_logprobs; /* device [emissions]: how many of the most probable tokens are wanted */
    cpa_token_ranks *ranks;      /* device [emissions]: filled where top_logprobs wants it, as rank_tokens does */
    cpa_draw_limits limits;
    const cpa_step_form *forms; /* host [n_forms of cpa_model_shape]; NULL where the model has none */
    const cpa_row_exchange *row_exchange;
    /* Device [rows]: in the calls for layers that draft, the token behind each row: that of its chunk, or, of a row that
     * yields one, what end_step has drawn. NULL in the others. */
    const uint32_t *next_tokens;
    const int64_t *rank_rows; /* host [ranks of row_exchange]: rows.count of this step on each rank */
} cpa_model_step;

/* What layer_in fills, and where it may write keys and values itself. On the device of the engine. */
typedef struct cpa_layer_args {
    size_t size;
    void *q;            /* [rows, q_heads, k_dim], or the queries of each form (cpa_model_step.forms) */
    void *k;            /* [rows, kv_heads, k_dim]: the engine writes keys to the cache, unless the model does */
    void *v;            /* [rows, kv_heads, v_dim], none with v_in_k: as keys */
    cpa_kv_view kv;     /* the cache of the layer */
    uint8_t *nonfinite; /* [rows]: 1 where a model that writes the cache finds a NaN or an infinity in a key or value */
    cpa_kv_view index;  /* the keys of the layer's indexer, which the model writes, by the slots of the rows */
    /* The layer's keys and values of first tokens (cpa_engine_options.precise_tokens), and the slots of the rows there,
     * -1 of others: a model that writes the cache writes them too. k is NULL where none are kept. */
    cpa_kv_view precise;
    const int64_t *precise_slots; /* device [rows] */
} cpa_layer_args;

/* The keys of a layer that a model's indexer (cpa_model_shape.index) would choose over whole sequences:
 * cpa_context_select of the step. Rows of queries are the model's own, as those of layer_in; they and their weights stay
 * as they are until layer_out of the layer is called, as rows that are checked are so by them. Called by select, at most
 * once a layer, on every rank alike; the lists hold until the next call. A status other than CPA_OK leaves its message on
 * the stream. */
typedef struct cpa_key_chooser {
    size_t size;
    void *ctx;
    cpa_status (*choose)(void *ctx, const cpa_context_select_args *args, cpa_key_indices *out, cpa_stream *stream);
} cpa_key_chooser;

/* What select is told. Rows are those of the selection: of the whole step, on all ranks, chunk after chunk; behind them
 * there may be more that fill a step up, of index 0. */
typedef struct cpa_select_args {
    size_t size;
    const void *q;  /* the queries of the model's own rows, as layer_in left them, those of each form in their place */
    cpa_kv_view kv; /* the cache of the layer, with the keys of the step */
    int64_t rows;
    const int64_t *indices;         /* device [rows]: index of each row in its sequence, as for keys */
    cpa_kv_view index;              /* the keys of the layer's indexer, those of the step too */
    const cpa_key_chooser *chooser; /* NULL without an indexer */
} cpa_select_args;

/* A token that was drawn. */
typedef struct cpa_drawn {
    uint32_t id;
    float logprob; /* natural logarithm of its probability under the logits as they are; 0 where nobody wants it */
} cpa_drawn;

/* Which steps of several ranks a model takes with slices: none, those in which all chunks are of one token (and drafts
 * of those behind it), or all. */
typedef enum cpa_model_slices { CPA_SLICES_NONE = 0, CPA_SLICES_DECODE, CPA_SLICES_ALL } cpa_model_slices;

/* What a drafter is asked. */
typedef struct cpa_draft_args {
    size_t size;
    uint64_t request;
    const uint32_t *tokens; /* [n_tokens] all that the request has: its prompt, and its output so far */
    int64_t n_tokens;
    int64_t max_drafts; /* >= 1 */
    uint32_t
        *drafts; /* [max_drafts] to fill: tokens expected behind the last one, as a chain or, by `parents`, a tree */
    /* [max_drafts] parent of each draft: a lower draft; -1: the last of the tokens. Comes filled for a chain: -1, 0, 1,
     * ... Drafts end in front of one whose parent is none. With windows, ALiBi and temperature by length, which
     * count places in the cache, where the drafts of a tree lie side by side, and with an indexer, its first chain alone
     * is taken. */
    int32_t *parents;
} cpa_draft_args;

typedef struct cpa_model {
    size_t size;
    void *ctx;
    /* Takes the tokens of the rows in. May be NULL. */
    cpa_status (*begin_step)(void *ctx, const cpa_model_step *step, cpa_stream *stream);
    cpa_status (*layer_in)(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream);
    /* Takes the results of the layer, [rows, q_heads, v_dim], or those of each form (cpa_model_step.forms); of a step
     * with slices, of the own heads. May be NULL. */
    cpa_status (*layer_out)(void *ctx, int32_t layer, const cpa_model_step *step, const void *out, cpa_stream *stream);
    /* Fills drawn [emissions], on the device. NULL: nothing is drawn, all output tokens are given. */
    cpa_status (*end_step)(void *ctx, const cpa_model_step *step, cpa_drawn *drawn, cpa_stream *stream);
    /* Writes again, to host memory, what layer_in gave for one KV head of n tokens: keys [n, k_dim] and values
     * [n, v_dim], none with v_in_k; lets the sampled check tell a stale cache from a wrong attention. Called from
     * several threads at once. May be NULL, where keys and values depend on more than token and position. */
    void (*recall)(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v);
    /* Not 0: the calls enqueue the same for any steps of one shape (counts of rows and emissions, and what is wanted).
     * The engine may capture them in a graph, and launch that in place of later calls. 0: they are called for every
     * step. */
    int32_t capturable;
    int32_t writes_cache; /* layer_in writes keys and values to args->kv by the rows' slots; args->k and v are NULL */
    const uint32_t *end_ids; /* [n_end_ids] tokens that end a request; must outlive the engine */
    int64_t n_end_ids;
    cpa_model_slices slices; /* which steps of several ranks have slices; see cpa_model_slices */
    int32_t vocabulary;      /* how many tokens end_step draws from, by cpa_model_step.limits; 0: it does not, and no
                                request has a constraint, logit_biases or min_tokens */
    int32_t gives_ranks;     /* end_step fills cpa_model_step.ranks; 0: no request asks for them */
    int32_t select_width;    /* the most entries of the lists that select gives */
    int32_t reserved[4];     /* zero */
    /* Rank 0, from the thread that plans steps, where the options of the engine ask for a model's drafts: guesses the
     * tokens that a request goes on with, and returns how many (0: none). A step then has them as further tokens of the
     * sequence, and draws the token of each of these positions as it would without; a draft is accepted if it is what
     * was drawn in front of it, and so are those before it. A drafter like that puts all probability on one token:
     * accepting so is rejection sampling (Leviathan et al., arXiv:2211.17192), tokens are the same ones as without
     * drafts, and a wrong draft costs time alone. Of a tree those are accepted that each come behind the one before and
     * are what was drawn there; rows off its first chain are computed with another order of sums, so that of two tokens
     * that are equally probable but for rounding either may be drawn. Asked again and again, with what has come
     * since. */
    int64_t (*draft)(void *ctx, const cpa_draft_args *args);
    /* Nothing more is asked for that request. May be NULL. */
    void (*draft_end)(void *ctx, uint64_t request);
    /* Which keys the rows of a layer attend (cpattn/selection.h), between layer_in and its attention. The selection
     * comes with the bits of the trees of drafts that the step has, which stay as they are; select may add lists and
     * blocks. It is the same on every rank, and the arrays hold until layer_out of the layer is called, or what the
     * stream has then is done. Rows that are checked (cpa_engine_options.verify) are so by their lists; layers with
     * blocks are CPA_UNSUPPORTED there. NULL: all keys. */
    cpa_status (*select)(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_select_args *args,
                         cpa_key_selection *selection, cpa_stream *stream);
    /* Of a model with draft_layers, as the multi-token prediction of DeepSeek-V3 (arXiv:2412.19437, section 2.2). These
     * layers come behind end_step in every step, of the same rows: a row knows the token that follows it then, and its
     * key and value lie in the cache as those of other layers do. Fills guesses [emissions], on the device: of each row
     * that yields a token the one expected behind that, or CPA_NO_TOKEN. What the last token of a request came with is
     * its draft of the next step, if it is not wrong, as with `draft`, which is not called. What these layers attend
     * enters no digest. Of blocks that requests share, the last key of one may have been made with the token that
     * followed in another request: that costs drafts, never tokens. */
    cpa_status (*end_draft)(void *ctx, const cpa_model_step *step, uint32_t *guesses, cpa_stream *stream);
} cpa_model;

#ifdef __cplusplus
}
#endif
#endif
