/* Context attention: attention of one batch over a paged KV cache that is sharded over the ranks of a communicator.
 *
 * Every rank holds the tokens that cpa_owner_map gives it. A step is a list of chunks, the same on every rank; a rank's
 * rows are the tokens of the chunks that it owns, or all of them (cpa_row_placement), chunk after chunk, each
 * ascending. The keys and values of those tokens must be in the cache (cpa_kv_write) before cpa_context_attend. A
 * sequence may lie on one rank (see cpa_placement), which then exchanges nothing for it.
 *
 * pass-KV (queries stay): keys and values travel, in segments of bounded size, peer by peer in rounds or (on devices)
 * from all peers at once (Liu et al., Ring Attention, arXiv:2310.01889; Yang et al., Context Parallelism for Scalable
 * Million-Token Inference, arXiv:2411.01783).
 * pass-Q (keys stay): queries travel, and partial states come back. Both give the same result; on the host the same
 * bits, but for rows of a form with a matrix or one that absorbs (cpa_row_form), and states that are rounded
 * (state_dtype). */
#ifndef CPATTN_CONTEXT_H
#define CPATTN_CONTEXT_H

#include <cpattn/comm.h>
#include <cpattn/indexer.h>
#include <cpattn/offload.h>
#include <cpattn/ops.h>
#include <cpattn/topk.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cpa_algorithm { CPA_AUTO = 0, CPA_PASS_KV, CPA_PASS_Q } cpa_algorithm;

/* "auto", "pass-kv" or "pass-q". Thread-safe. */
CPA_API const char *cpa_algorithm_name(cpa_algorithm algorithm);

/* A chunk, and what is known of the ranks that attend it. */
typedef struct cpa_algorithm_question {
    size_t size;
    cpa_attention_shape shape;
    int32_t ranks;
    int64_t new_tokens;    /* new tokens of the chunk */
    int64_t cached_tokens; /* tokens of its sequence that are in the cache before it */
    double flops;     /* FLOP/s of attention on one rank; 0 with bandwidth 0: not known, the bytes to move decide */
    double bandwidth; /* bytes/s that one rank exchanges; 0 with flops 0: not known */
} cpa_algorithm_question;

/* The algorithm that the engine's planner would give the chunk (see docs/ARCHITECTURE.md): pass-Q for one token.
 * CPA_AUTO if the question is not valid. A chunk of a step has to have the same algorithm on every rank. Pure;
 * thread-safe. */
CPA_API cpa_algorithm cpa_algorithm_choose(const cpa_algorithm_question *question);

/* Who has the rows of a step. Owned: each rank the tokens that it owns, all heads. Replicated: every rank gives the
 * queries of all rows, all heads, and ends with the results of its slice of the heads of every row, as tensor parallel
 * layers take them: heads [cpa_slice_begin(q_heads, N, rank), cpa_slice_begin(q_heads, N, rank + 1)), which need not be
 * whole groups of a KV head, and none where there are fewer heads than ranks. Keys stay where they are, whatever the
 * algorithm of a chunk says; what travels are partial states. */
typedef enum cpa_row_placement { CPA_ROWS_OWNED = 0, CPA_ROWS_REPLICATED } cpa_row_placement;

/* Which rows of an expanded form attend latents as they lie: none; those that are attended together, where that is less
 * work than to expand their keys, by its products and bytes; or all. */
typedef enum cpa_absorb { CPA_ABSORB_NEVER = 0, CPA_ABSORB_COUNTED, CPA_ABSORB_ALWAYS } cpa_absorb;

/* A form of rows. The rows of a step may have several, of which each chunk names its own: rows of decode that attend
 * latent keys as they lie, say, beside rows of prefill that attend narrower ones. All attend the same cache, with the
 * heads of its shape. */
typedef struct cpa_row_form {
    int32_t k_dim; /* width of a query head, which attends the first k_dim columns of a key; 0: k_dim of the shape */
    int32_t v_dim; /* width of a partial state, over the first v_dim columns of a value; 0: v_dim of the shape */
    /* Width of a head of the result, and of the partial states that travel between ranks; 0: v_dim. If it is not 0,
     * each layer has a matrix for each head, which partial states are multiplied by before they travel:
     * cpa_form_rows.matrix. */
    int32_t out_dim;
    /* 1: the cache holds latents (v_in_k of the shape, one KV head), and each query head has a key and a value of its
     * own, which are expanded from them (DeepSeek-AI, arXiv:2405.04434): of a latent [c | r], c of v_dim and r of
     * k_dim - v_dim columns of the shape, head h has the key [W_h c | r] and the value V_h c, rounded to dtype. k_dim
     * and v_dim here are the widths of those, neither 0, and W_h and V_h the matrix of a layer,
     * cpa_form_rows.expansion. What travels by pass-KV are latents. Not for rows of a reserved step. */
    int32_t expanded;
    /* Of an expanded form: its rows may attend latents as these lie instead, each query times W_h and each result times
     * V_h, at the rank that has the keys. Not CPA_ABSORB_NEVER, which is zero: each layer has cpa_form_rows.fold and
     * unfold. By pass-Q queries and partial states travel as narrow as with expanded keys. On the host too, results
     * then depend on the step, the algorithm and the size of staging by rounding. */
    cpa_absorb absorbs;
    int32_t reserved[3]; /* zero */
} cpa_row_form;
enum { CPA_MOST_ROW_FORMS = 3 };

/* An indexer, by which cpa_context_select chooses the keys that the rows of a step attend (cpattn/indexer.h). An entry
 * of what it chooses stands for `unit` index keys, and an index key for `tokens_per_key` tokens; with several ranks
 * runs of tokens are whole entries: the interleave is a multiple of both together. */
typedef struct cpa_index_form {
    /* Bound on the memory of this rank for scores, and for candidates of all ranks, of so many rows at once; those of
     * one row always have room. 0: 256 MiB. */
    int64_t scores_bytes;
    int32_t heads;          /* of its queries; 0: there is no indexer */
    int32_t dim;            /* width of its queries and keys */
    cpa_dtype dtype;        /* of both: CPA_FP8_E4M3, CPA_BF16 or CPA_F32 */
    int32_t has_weights;    /* 1: each query head has a weight, as codes need it */
    int32_t k;              /* entries that are chosen for a row, 1 to CPA_MOST_TOPK */
    int32_t unit;           /* 0: 1 */
    int32_t tokens_per_key; /* 0: 1 */
    int32_t forced_first,
        forced_last; /* entries of a row's sequence that are always chosen (cpattn/topk.h): the last is that
                                          of the row itself */
    /* 1: with tokens_per_key above 1 and unit 1, tokens of a row's sequence behind its last whole key, of which the row
     * itself may be one, are an entry that is listed beside the k. Lists have up to k + 1 entries. */
    int32_t open_tail;
    int32_t reserved[4]; /* zero */
} cpa_index_form;

typedef struct cpa_context cpa_context;

typedef struct cpa_context_options {
    size_t size;
    /* Each layer's view has its strides; the layout tells a CUDA device alone of CPA_VLLM_X, which its tensor cores do
     * not read unless it is said here. Keys and values travel as rows, whatever the layout. */
    cpa_attention_shape shape;
    int32_t block_size;
    int32_t interleave; /* 0 = block_size; a multiple or a divisor of block_size */
    /* Bound on the memory of this rank for keys and values on their way: the buffers of pass-KV, and on a CUDA device
     * whose caches are quantised or CPA_VLLM_X up to 1 GiB and half of it where prefill widens them (cpattn/ops.h), as on
     * any device where a form expands latents. 0 = 64 MiB, on a device with memory of its own 2 GiB, or the least if that
     * is more; at most 1 TiB. */
    int64_t staging_bytes;
    int64_t max_rows; /* most new tokens in one step, over all ranks */
    cpa_row_placement rows;
    cpa_cascade_attention cascade_attention; /* for chunks of a few tokens over this rank's shard */
    /* [n_forms], copied; NULL and 0: there is one form, that of the shape. Forms that attend fewer columns than a row has
     * take a cache whose rows lie in one piece, without scales of their own. */
    const cpa_row_form *forms;
    int32_t n_forms; /* at most CPA_MOST_ROW_FORMS */
    /* Dtype of O of the partial states that travel between ranks; their LSE is fp32. CPA_F32, which is zero: nothing is
     * rounded before the last merge. CPA_BF16 or CPA_F16: half the bytes, each state of another rank rounded once (of
     * replicated rows the own one too), so that results depend on the number of ranks, and on the algorithm, by as much. */
    cpa_dtype state_dtype;
    cpa_index_form index; /* what cpa_context_select chooses by; the same on every rank */
    /* Not 0: the caches of layers lie in memory of the host, page-locked where the device is to copy while it computes,
     * and each rank attends its shard through a ring of segments of so many bytes together (cpattn/offload.h), at least
     * cpa_kv_ring_least_bytes. The tokens before the chunks of a step are in the caches of all layers before the first
     * one attends. What pass-KV sends is read from the host as it lies. Not with forms, an indexer or has_unquantised, and
     * no step can be reserved. */
    int64_t ring_bytes;
    int32_t ring_segments; /* segments of the ring; 0: as many as a ring has by default */
    /* 1: the cache of a layer may also be one of shape.dtype, beside quantised ones of others; which layers, is the same
     * on every rank. Segments of staging are then as large as such keys and values are. Not over latents (v_in_k). */
    int32_t has_unquantised;
    /* As that of cpa_attend_args, in all layers; the largest score of a row is the one among the keys that are attended at
     * once, those of a rank or of a segment on its way. */
    float skip_tiles;
} cpa_context_options;

/* A shape over a cache of its dtype, without scales. */
CPA_INLINE cpa_attention_shape cpa_shape_unquantised(const cpa_attention_shape *shape) {
    cpa_attention_shape plain = *shape;
    plain.kv_dtype = shape->dtype;
    plain.k_scale = plain.v_scale = 0;
    plain.k_scales = plain.v_scales = NULL;
    plain.n_scales = 0;
    return plain;
}

/* One chunk: the new tokens [start, start + count) of one sequence, over the keys up to their end. The same on every
 * rank but for the block table. A sequence may have several chunks in a step, one behind the other, so that part of
 * what is new goes by pass-KV and part by pass-Q. */
typedef struct cpa_context_chunk {
    int64_t start;
    int64_t count;
    cpa_placement placement;    /* placement of the sequence */
    cpa_algorithm algorithm;    /* CPA_PASS_KV or CPA_PASS_Q; means nothing where one rank owns all */
    const int32_t *block_table; /* this rank's blocks of the sequence; ceil(len / block_size) entries for its
                                   len = cpa_tokens_before(map, cpa_tokens_on(map, placement, rank),
                                   start + count) tokens */
    /* Index among the forms of the options of the form that the chunk's rows have; 0 where they name none. */
    int64_t form;
    int64_t reserved[2]; /* zero */
} cpa_context_chunk;

/* The tensors of the rows of one form in a layer: those of its chunks, one behind the other. A form without rows on
 * this rank may leave q, out and lse NULL; its mask, scale and matrix are the same on every rank that attends the step. A
 * form that no chunk of the step names is not looked at. */
typedef struct cpa_form_rows {
    const void *q;          /* [rows, q_heads, k_dim], dtype */
    void *out;              /* [rows, q_heads, out_dim], dtype or fp8; with replicated rows only the own heads */
    float *lse;             /* [rows, q_heads], or NULL; with replicated rows only the own heads */
    const float *out_scale; /* device [1]: `out` holds CPA_FP8_E4M3, as that of cpa_attend */
    cpa_mask mask;
    float scale; /* 0 = 1 / sqrt(k_dim) */
    const void
        *matrix; /* [q_heads, v_dim, out_dim], dtype: a result is O of its head times this, summed in fp32 over v_dim
                           in ascending order; NULL for a form without out_dim */
    /* [q_heads, k_dim - r columns + v_dim, c columns], dtype, 16-byte aligned: for each head the rows of W_h, then those
     * of V_h (cpa_row_form.expanded); NULL for a form that is not expanded. */
    const void *expansion;
    /* dtype, 16-byte aligned: of each head W_h turned, [q_heads, c columns, k_dim - r columns], and V_h turned, [q_heads,
     * c columns, v_dim]; NULL for a form that absorbs nothing. */
    const void *fold, *unfold;
    int64_t reserved[1]; /* zero */
} cpa_form_rows;

/* The tensors of one layer. */
typedef struct cpa_context_args {
    size_t size;
    const void *q; /* [rows, q_heads, k_dim], dtype */
    cpa_kv_view kv;
    cpa_mask mask;
    float scale; /* 0 = 1 / sqrt(k_dim) */
    void *out;   /* [rows, q_heads, v_dim], dtype or fp8; with replicated rows only the own heads */
    float *lse;  /* [rows, q_heads], or NULL; with replicated rows only the own heads */
    /* What else is done to scores (cpattn/score.h), and which keys are attended (cpattn/selection.h); NULL: nothing,
     * and all keys. Equal on every rank. Rows of `selection` and `bias` are all those of the step, chunk after chunk,
     * whoever owns them, and their row_map is NULL: every rank has what it needs for the rows that come to it, so
     * nothing of it travels. Sink logits are applied once, on the rank that has the result of the row. Rows of a
     * reserved step are those that its limits allow: row s * rows + j is the j-th of the new tokens of sequence s. */
    const cpa_score_rules *rules;
    const cpa_key_selection *selection;
    const cpa_score_bias *bias;
    const float *out_scale; /* device [1]: `out` holds CPA_FP8_E4M3, as that of cpa_attend */
    /* [n_forms] in the place of q, mask, scale, out, lse and out_scale; NULL: those are of form 0, and no other form has
     * rows in the step. Rules, custom mask and bias are those of all forms. */
    const cpa_form_rows *rows;
} cpa_context_args;

enum { CPA_KERNEL_NAMES = 96 };

/* What has happened since the context was created, on this rank. */
typedef struct cpa_context_stats {
    int64_t bytes_sent;
    int64_t staging_bytes;  /* most bytes in use at once of what cpa_context_options.staging_bytes bounds */
    int64_t staging_bound;  /* bytes that staging_bytes may come to */
    double exposed_comm_s;  /* time that attention waited for messages, on the clock of the device, s */
    double attend_s;        /* time in attend and merge on the clock of the device, s */
    int64_t chunks_pass_kv; /* chunks times layers by pass-KV, without sequences that lie on one of several ranks */
    int64_t chunks_pass_q;  /* chunks times layers by pass-Q, without sequences that lie on one of several ranks */
    /* Keys in all layers' caches that chunks attended, each once for all tokens of its chunk; and how many of these
     * were read, since sequences that share blocks read them together. */
    int64_t keys_attended, keys_read;
    /* Rows left to the plain kernel of a device (cpa_attend_plan_kernel), once for each attend of each layer, and once
     * for each range of keys of a row of several; a graph counts the rows of the step that it was captured of. */
    int64_t plain_rows;
    int64_t row_bytes_sent; /* of bytes_sent, those of cpa_row_exchange (cpattn/model.h) */
    /* Kernels that attended (cpa_attend_kernel.name), each once, ", " between them: single rows of a sequence, as decode
     * has them, and several at once. On the host they are instruction sets. Of a step those of its first layer count; of
     * steps launched as a graph, those of the step that it was captured of. */
    char decode_kernels[CPA_KERNEL_NAMES], prefill_kernels[CPA_KERNEL_NAMES];
    int64_t index_bytes_sent; /* of bytes_sent, those of cpa_context_select: queries of indexers, and candidates */
    cpa_kv_ring_stats ring;   /* of the ring, if the context has one */
    int64_t tiles_seen, tiles_skipped; /* with skip_tiles: the tile_counts of all attends that are done */
} cpa_context_stats;

/* Collective over `comm`, which must outlive the context, as must `device`. Options that are not the same on every rank
 * are CPA_INVALID on all. A context is used by one thread at a time, the one that uses its communicator. staging_bytes
 * must hold, on the host, four segments of cpa_attend_split_tokens tokens, with N ranks on devices 2 N of 1024 tokens,
 * rounded up to the interleave, or four where the interleave is less than a block, and what keys are widened in, or
 * expanded, as many tokens of a segment: cpa_context_least_staging. *out is set only on success. */
CPA_API cpa_status cpa_context_create(cpa_comm *comm, cpa_device *device, const cpa_context_options *options,
                                      cpa_context **out, cpa_error *err);
/* Collective. NULL does nothing. */
CPA_API void cpa_context_destroy(cpa_context *context);

/* The least staging_bytes that these options can have on `size` ranks of such devices; 0 if they are not valid. Pure;
 * thread-safe. */
CPA_API int64_t cpa_context_least_staging(const cpa_device *device, const cpa_context_options *options, int32_t size);

/* How many rows of the chunks this rank owns, or that there are if they are replicated; chunks that cpa_context_plan
 * refuses have none. Pure; thread-safe. */
CPA_API int64_t cpa_context_rows(const cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks);
/* The same of the rows of one form. */
CPA_API int64_t cpa_context_rows_of(const cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks,
                                    int64_t form);

/* Plans a step: every rank derives the same exchanges from the same chunks. That all ranks have planned the same
 * chunks is found out by the first layer, which otherwise is CPA_INVALID on all of them, as are the others of the
 * step. The block tables are copied. The layers of the step before may still be under way; those of earlier ones are
 * waited for, and that the other ranks have taken what this one told them of the plan before. */
CPA_API cpa_status cpa_context_plan(cpa_context *context, const cpa_context_chunk *chunks, int64_t n_chunks);

/* Attends one layer of the planned step. Collective: every rank calls it for the same layers in the same order, with
 * the same mask, scale and score rules, and for all layers of a step with one stream. Where these differed, the first
 * layer of the next plan is CPA_INVALID on all ranks, and says so. On the host what rules, selections and biases
 * point to is compared too, of a bias of more than 4096 values and of a selection of more than 4096 words as many,
 * evenly spaced; on devices, where it would have to be waited for, only which of them there are, and the keys and the
 * dtype of a bias. Masks that differ may also make ranks wait for each other: on the host that is CPA_COMM after
 * timeout_s of the communicator, and says so, on devices it ends as any wait does. On a stream in capture only a
 * reserved step (cpa_context_reserve) is attended: a graph would hold what the plan of another says, which is
 * CPA_UNSUPPORTED before anything is enqueued.
 *
 * A rank that refuses its arguments in a step with exchanges (several ranks, a chunk that is sharded) refuses the rest
 * of the step too. Those that wait for it return its status, with its line, and can only destroy the context, as the
 * next plan says on all ranks; if all ranks refused the same layers, it goes on with that plan. In a step without
 * exchanges each rank returns its own status, and may call again. On devices the call only enqueues, and may have
 * returned CPA_OK before another rank refuses: then cpa_stream_sync of the same thread returns what that rank says, or,
 * after 60 s, which rank was waited for. Work that the caller waits for by other means, such as a call of CUDA, ends
 * with that, cpa_context_plan or cpa_context_destroy. A process that starts CUDA before it opens a device sets
 * CUDA_MODULE_LOADING=EAGER first: the first launch of a kernel waits for what runs, rank or not, without a limit. */
CPA_API cpa_status cpa_context_attend(cpa_context *context, const cpa_context_args *args, cpa_stream *stream);

/* What an indexer has of one layer. */
typedef struct cpa_context_select_args {
    size_t size;
    /* [rows, heads, dim], dtype of the indexer, as cpa_index_q leaves them: of the rows of this rank (of all with
     * replicated rows), in the order of the queries of their forms, one form behind the other. NULL without rows. */
    const void *q;
    const float *weights;  /* [rows, heads]; NULL where the indexer has none */
    cpa_index_cache cache; /* this rank's shard, by the block tables of the step */
} cpa_context_select_args;

/* Chooses for each row of the planned step the k keys, or entries, that its indexer scores best, in one layer: those
 * that cpa_index_logits and cpa_topk would choose over the whole sequence on one rank, exactly, whatever the number of
 * ranks, the chunks and the blocks. *out has lists for all rows of the step, as cpa_context_args.selection wants them;
 * it lies in memory of the context until the next call. For rows of sequences that lie on one rank, lists on the other
 * ranks are empty (nobody reads them there); all others are the same on every rank.
 *
 * Of rows of sharded sequences queries travel to all ranks, which score their own keys, and then of each row the k best
 * of each rank, 8 bytes each: rows * (heads * (dim * bytes of dtype + 4 with weights), filled up to 16 bytes) from each
 * rank to each other, and of all ranks' rows k * 8 bytes. With replicated rows no queries travel.
 *
 * Collective, before the attend of its layer, in the same order on all ranks; allocates nothing, and on devices only
 * enqueues. The step is one of cpa_context_plan; its own graphs cannot be captured. A rank that refuses its arguments
 * in a step with exchanges refuses the rest of it, as in cpa_context_attend. */
CPA_API cpa_status cpa_context_select(cpa_context *context, const cpa_context_select_args *args, cpa_key_indices *out,
                                      cpa_stream *stream);

/* Decode in graphs of the caller's: the new tokens of each sequence, one or a few with drafts among them, by pass-Q, over
 * lengths and tables that lie on the device. All sequences are sharded. Reserving allocates for these limits once; from
 * then on what an update or an attend of the reserved step enqueues does not depend on the lengths and the tables, and
 * nothing that it uses moves.
 *
 * Rows [s * rows, (s + 1) * rows) of q, out and lse belong to sequence s on every rank; each rank has sequences * rows of
 * them. The new tokens are the last `rows` of a sequence, or as many as an update says. A rank puts the queries of those
 * that it owns in the first of its rows of the sequence, in their order, and gets the results there: with one row it is
 * the rank that owns the token at position length - 1. Of rows beyond these the queries mean nothing, and the results are
 * the empty state, O = 0 and LSE = -inf, as all are for a length of 0; on a single rank they mean nothing, and neither do
 * rows past those of the update anywhere. A length that is negative, below its new tokens or above `tokens`, more new
 * tokens than `rows`, and a first rank that is none, make the first rows of a sequence NaN on all ranks, as many as it
 * says, at most `rows`; a used table entry that is no block below num_blocks makes those NaN that it would have had,
 * where they are owned. cpa_context_refused tells of it.
 *
 * Masks by bits go by the new tokens (cpa_context_args.selection), so that chains and trees of drafts are replayed: each
 * draft lies at a position of its own behind the last verified token, and bits say which of these it sees. */
typedef struct cpa_context_limits {
    size_t size;
    int64_t sequences;  /* at least 1; times rows at most max_rows of the options */
    int64_t tokens;     /* most tokens of a sequence, on all ranks together */
    int64_t num_blocks; /* blocks that the caches that are attended have at least */
    int64_t form;       /* form of all rows */
    int32_t rows;       /* most new tokens of a sequence in a step; 0 = 1 */
} cpa_context_limits;

/* Collective, once a context; waits for the device. The limits are the same on every rank but for num_blocks. Steps of
 * cpa_context_plan go on as before, beside the reserved one. */
CPA_API cpa_status cpa_context_reserve(cpa_context *context, const cpa_context_limits *limits);

/* Makes the reserved step that of these arrays, and the step that cpa_context_attend attends, until the next plan.
 * Enqueues only, also on a stream in capture (cpa_stream_wrap), together with attends or by itself. Before a capture of
 * attends, attend outside of one with the same tensors, on all ranks: transports learn of their addresses then. All
 * ranks launch such graphs in the same order, one at a time. Statistics know nothing of reserved steps but what is sent
 * as they are enqueued.
 *
 * Arguments are those of cpa_attend_plan_update: lengths count the tokens of a sequence on all ranks, its
 * new one included; table s holds this rank's blocks of its tokens; first_ranks [sequences], on the device, tells which
 * rank owns position 0, NULL: rank 0; qo_indptr [sequences + 1] counts the new tokens of sequence s as qo_indptr[s + 1] -
 * qo_indptr[s], NULL: `rows` of the limits each. Lengths, first ranks and counts are the same on every rank, which is not compared; every
 * rank makes the same updates. */
CPA_API cpa_status cpa_context_update(cpa_context *context, const cpa_attend_update_args *args, cpa_stream *stream);

/* As cpa_attend_plan_refused, of the reserved step on this rank; cpa_context_error has the line. */
CPA_API cpa_status cpa_context_refused(cpa_context *context);

/* On a device the times are those of the steps that were done when the next was planned, or when this is called: the
 * stream of a step must be idle by then for its times to count. `size` is that of *out, sizeof *out: as much of the
 * statistics is written, and zeros where the library knows less. */
CPA_API cpa_status cpa_context_get_stats(cpa_context *context, cpa_context_stats *out, size_t size);

/* The message of the last call that failed on this context; empty if none did, or for NULL. Owned by the context. */
CPA_API const char *cpa_context_error(const cpa_context *context);

#ifdef __cplusplus
}
#endif
#endif
