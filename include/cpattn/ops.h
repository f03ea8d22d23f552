/* Operators on the caller's tensors: write keys and values into pages, attend over pages, merge partial states.
 *
 * All pointers in argument structs lie on the stream's device unless a comment says host, and are aligned to their
 * elements. Every struct begins with its size; zero means default. Operations are enqueued on the stream; a status
 * other than CPA_OK means that nothing was enqueued, and cpa_stream_error tells why. Nothing here allocates, except
 * cpa_attend_plan_set when a plan grows, cpa_attend_plan_reserve, and host memory for a moment where arrays on the host
 * are checked. Sequences and rows are counted to 2^44, heads to 2^16, ranks to 2^14, and a tensor reaches over at most
 * 2^60 bytes. */
#ifndef CPATTN_OPS_H
#define CPATTN_OPS_H

#include <cpattn/device.h>
#include <cpattn/owner_map.h>
#include <cpattn/score.h>
#include <cpattn/selection.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* kv_write (known elsewhere as reshape_and_cache): stores the keys and values of new tokens in their pages.
 * Token i goes to slot slot_mapping[i] = block * block_size + offset; -1 skips the token. Two tokens must not share a
 * slot, which is checked on a device with debug_checks. Values are converted from `dtype` to the view's dtype, rounding
 * to nearest even; a quantised cache gets codes and scales as shape.h says, where NaN is 0: `nonfinite` tells of it. A
 * cache with v_in_k gets keys, those of latents and rotated elements, and no values: v is not looked at. */
typedef struct cpa_kv_write_args {
    size_t size;
    int64_t tokens;
    cpa_dtype dtype;
    const void *k;               /* [tokens, kv_heads, k_dim], k_row_stride elements from token to token */
    const void *v;               /* [tokens, kv_heads, v_dim], v_row_stride elements from token to token; see v_in_k */
    const int64_t *slot_mapping; /* [tokens] */
    cpa_kv_view kv;
    /* [tokens], or NULL: becomes 1 where the key or the value of a token that is written has a NaN or an infinity, in
     * whatever dtype of the cache; is left as it was elsewhere. May be page-locked host memory. */
    uint8_t *nonfinite;
    int64_t k_row_stride; /* 0 = kv_heads * k_dim; more where k is a slice of a wider tensor, of queries, keys and
                             values as one product leaves them, say */
    int64_t v_row_stride; /* 0 = kv_heads * v_dim */
    int64_t k_head_stride, v_head_stride; /* from head to head; 0 = k_dim and v_dim; rows may lie within heads */
} cpa_kv_write_args;
CPA_API cpa_status cpa_kv_write(const cpa_kv_write_args *args, cpa_stream *stream);

/* kv_copy: copies whole blocks, pairs[i] = (source block of `src`, destination block of `dst`). Both views have the
 * same shape and dtype; they may be the same pool as long as no block is both a source and a destination. No block is
 * the destination of two pairs. Elements keep their bits, and the scales of their rows go with them; scales of heads
 * are not read. */
typedef struct cpa_kv_copy_args {
    size_t size;
    cpa_kv_view src;
    cpa_kv_view dst;
    const int64_t (*pairs)[2]; /* [n_pairs], host */
    int64_t n_pairs;
} cpa_kv_copy_args;
CPA_API cpa_status cpa_kv_copy(const cpa_kv_copy_args *args, cpa_stream *stream);

/* kv_swap (known elsewhere as swap_blocks): copies whole blocks between a pool in memory of the stream's device and one
 * in host memory, either way: pairs[i] = (source block of `src`, destination block of `dst`). Copy engines do it, block
 * by block, neighbours together: bytes as they are, with the scales of their rows. Host memory that is page-locked is
 * read and written as the work of the stream comes to it, and must stay until then; of other memory the call may wait.
 * Both views have one shape, dtype and strides of tokens and heads, and blocks in one piece, or CPA_UNSUPPORTED:
 * cpa_kv_copy takes any strides, and page-locked host memory too. No block is the destination of two pairs. */
typedef struct cpa_kv_swap_args {
    size_t size;
    cpa_kv_view src;
    cpa_kv_view dst;
    const int64_t (*pairs)[2]; /* [n_pairs], host */
    int64_t n_pairs;
} cpa_kv_swap_args;
CPA_API cpa_status cpa_kv_swap(const cpa_kv_swap_args *args, cpa_stream *stream);

/* kv_move: moves tokens from slot to slot, as a tree of drafts needs when the path that was accepted becomes the next
 * tokens of its sequence: slots[i] = (source slot of `src`, target slot of `dst`), slots as in kv_write. All sources of
 * a call are read before a target is written, so that they may be the same slots. Keys and values keep their bits, and
 * the scales of their rows go with them. A pair with a slot that is negative or past the end of its pool moves nothing;
 * no two that move have one target, which is checked on a device with debug_checks. */
#define CPA_KV_MOVE_MOST 2048
typedef struct cpa_kv_move_args {
    size_t size;
    cpa_kv_view src;
    cpa_kv_view dst;           /* shape and dtype of src; may be the same pool */
    const int64_t (*slots)[2]; /* [n] */
    int64_t n;                 /* at most CPA_KV_MOVE_MOST */
} cpa_kv_move_args;
CPA_API cpa_status cpa_kv_move(const cpa_kv_move_args *args, cpa_stream *stream);

/* kv_convert: brings whole blocks from one form of cache to another, pairs[i] = (source block of `src`, destination
 * block of `dst`). The views agree in block_size, kv_heads, k_dim and v_dim, and may differ in layout, dtype and
 * scales; their pools do not overlap. Where dtype and scales are the same the bits are kept, with those of the scales
 * of rows; else each element becomes the fp32 that it stands for, and that what cpa_kv_write makes of it. No block is
 * the destination of two pairs. */
typedef struct cpa_kv_convert_args {
    size_t size;
    cpa_kv_view src;
    cpa_kv_view dst;
    const int64_t (*pairs)[2]; /* [n_pairs], host */
    int64_t n_pairs;
} cpa_kv_convert_args;
CPA_API cpa_status cpa_kv_convert(const cpa_kv_convert_args *args, cpa_stream *stream);

/* kv_pack: gathers tokens of paged sequences into consecutive blocks of a staging view. Tokens past `count` in the last
 * block of a range are left as they were. There is no operation that unpacks: attend reads a staging view through a
 * block table, as it reads a cache, and kv_copy moves its blocks into one. */
typedef struct cpa_kv_range {
    int64_t table;       /* index into block_tables of the entry that holds local token 0 of the sequence */
    int64_t first;       /* first local token, a multiple of block_size */
    int64_t count;       /* tokens */
    int64_t dst_block;   /* staging block that receives the first one; no block is filled twice */
    int64_t reserved[4]; /* zero */
} cpa_kv_range;
typedef struct cpa_kv_pack_args {
    size_t size;
    cpa_kv_view src;
    cpa_kv_view dst;             /* shape and dtype of src; does not overlap it */
    const int32_t *block_tables; /* [n_table_entries], host */
    int64_t n_table_entries;
    const cpa_kv_range *ranges; /* [n_ranges], host */
    int64_t n_ranges;
} cpa_kv_pack_args;
CPA_API cpa_status cpa_kv_pack(const cpa_kv_pack_args *args, cpa_stream *stream);

/* kv_gather: tokens of paged sequences, from any first one on, into rows of tensors of keys and of values: each element,
 * or what a code stands for, is rounded once to dst_dtype; where that is the dtype of the cache the bits are kept. Rows
 * that no span names are left as they were. (Latents: cpa_latent_gather of cpattn/latent.h.) */
typedef struct cpa_kv_gather_args {
    size_t size;
    cpa_kv_view src;             /* v_in_k is 0 */
    const int32_t *block_tables; /* [n_table_entries], host */
    int64_t n_table_entries;
    const cpa_kv_span *spans; /* [n_spans], host */
    int64_t n_spans;
    void *k;             /* [dst_rows, kv_heads, k_dim]; overlaps nothing of src */
    void *v;             /* [dst_rows, kv_heads, v_dim]; overlaps nothing of src, nor k */
    int64_t dst_rows;    /* at most 2^31 - 1 */
    cpa_dtype dst_dtype; /* fp32, bf16 or fp16 */
    /* Elements from row to row and from head to head; 0: dense. Rows may lie within heads. */
    int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
} cpa_kv_gather_args;
CPA_API cpa_status cpa_kv_gather(const cpa_kv_gather_args *args, cpa_stream *stream);

/* A slice of queries of one sequence against a slice of its keys. Each side is a range of local indices of a set of the
 * sequence's tokens (see owner_map.h), which gives every row and key its global position. */
typedef struct cpa_attend_item {
    int64_t q_row;       /* first row in q and in the state */
    int64_t q_count;     /* rows, one a token */
    int64_t q_first;     /* local index of the first query in q_set */
    int64_t k_first;     /* local index of the key in token 0 of the first table entry; a multiple of block_size */
    int64_t k_count;     /* keys; nothing past them is read into a result, whatever the memory holds */
    int64_t table;       /* index into block_tables of the first entry; ceil(k_count / block_size) entries are used */
    cpa_token_set q_set; /* one shard, or all tokens: a sequence that lies on one rank */
    cpa_token_set k_set; /* one shard, all shards but one, or all tokens */
    int64_t reserved[4]; /* zero */
} cpa_attend_item;

/* What one step's attention looks like; the same for every layer. Rows of different items must not overlap. The
 * interleave of the map need not be a multiple of the block size. */
typedef struct cpa_attend_batch {
    size_t size;
    cpa_owner_map map;
    /* Heads and widths bind; kv_dtype lets a device reserve what a quantised cache takes. Those, dtypes and scales of
     * an attend are said in its own arguments, and may be left out here. */
    cpa_attention_shape shape;
    int32_t block_size;
    const cpa_attend_item *items; /* host */
    int64_t n_items;
    const int32_t *block_tables; /* host, or on the device */
    int64_t n_table_entries;
    /* Items of a few rows whose first entries are equal, at the same k_first of the same k_set, may be attended
     * together over these blocks; on the host with the same bits. */
    cpa_cascade_attention cascade_attention;
    /* 1: block_tables lie on the device. Nothing of them is copied from the host, and they are read as the work of a
     * stream comes to its first attend of this setting, not again for the others: until then they have to hold. An
     * item's table is any place in them, so [requests, table_stride] is item.table = request * table_stride. An entry
     * that is no block below num_blocks is read as the nearest one that is. Which entries are equal is not looked at.
     * On a host device they are read, and checked, as the plan is set. */
    int32_t block_tables_on_device;
    int64_t num_blocks; /* with block_tables_on_device: blocks that caches that are attended have at least */
} cpa_attend_batch;

/* Work split once a step and used for every layer (plan once, run many). Setting a plan copies the items and the block
 * tables of the batch, which the caller may free then. A plan may be set again; it keeps its memory. It must not be set
 * while an attend that uses it is in flight. Its attends share a work space: enqueue them on one stream, or order them.
 * Used by one thread at a time. */
typedef struct cpa_attend_plan cpa_attend_plan;
CPA_API cpa_status cpa_attend_plan_create(cpa_device *device, cpa_attend_plan **out, cpa_error *err);
CPA_API cpa_status cpa_attend_plan_set(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_error *err);

/* The same from the arrays that FlashInfer and SGLang plan with, for sequences that lie on one rank: sequence s has the
 * rows [qo_indptr[s], qo_indptr[s + 1]), which are its last tokens, and the pages kv_indices[kv_indptr[s]] to
 * kv_indices[kv_indptr[s + 1]], the last of which holds last_page_len[s] tokens. Where pages are single tokens these
 * are slots of the cache, as the rows of req_to_token have them. The keys of the rows themselves are among the pages:
 * they are written (cpa_kv_write) before the attend. A row is at the index that it has in its sequence, so causal and
 * windowed masks count from its end, as there. Errors and the reading of kv_indices are those of a batch. */
typedef struct cpa_attend_indices {
    size_t size;
    cpa_attention_shape shape; /* as in a batch */
    int32_t block_size;        /* tokens of a page */
    int32_t indices_on_device; /* 1: kv_indices lie there, as block_tables of a batch may */
    int64_t sequences;
    const int32_t *qo_indptr;     /* host [sequences + 1], ascending; NULL: one row each */
    const int32_t *kv_indptr;     /* host [sequences + 1], ascending */
    const int32_t *last_page_len; /* host [sequences], 1 to block_size; NULL: all pages are full */
    const int32_t *kv_indices;    /* [kv_indptr[sequences]] */
    int64_t num_blocks;           /* with indices_on_device, as in a batch */
    /* host [sequences]: index in its sequence of the first token of a sequence's first page, a multiple of block_size,
     * where the pages before it are gone, as those are that a window has left; masks and rules count from the true
     * beginning. NULL: 0 */
    const int64_t *k_first;
} cpa_attend_indices;
CPA_API cpa_status cpa_attend_plan_set_indices(cpa_attend_plan *plan, const cpa_attend_indices *indices,
                                               cpa_error *err);
CPA_API void cpa_attend_plan_destroy(cpa_attend_plan *plan);

/* Plans for graphs of the caller's: decode, prefill and batches of both over lengths, rows and block tables that lie on
 * the device. cpa_attend_plan_reserve allocates for all that the limits allow, once; from then on nothing of the plan
 * moves or grows, and what an update or an attend enqueues does not depend on the lengths, the rows and the tables. So
 * both may be enqueued on a stream that the caller captures (cpa_stream_wrap), together or each by itself, and a graph of
 * them can be launched again for whatever the arrays hold by then. Attend once with the same arguments outside of a
 * capture before: kernels are loaded then.
 *
 * Sequence s has the rows [s * rows, (s + 1) * rows) of q, of the state and of out, or those that an update says, the
 * queries of its last tokens, and the keys of all its tokens. A length of 0 fills a batch up: its rows see no key, and
 * become O = 0, LSE = -inf (with resume = 1 they stay as they are). A length that is negative, above `tokens` or below
 * its rows, more rows than the limits allow, and a used table entry that is negative or not below num_blocks, are
 * refused: nothing is read by them, and the rows of that sequence become NaN in O, LSE and out; cpa_attend_plan_refused
 * tells of it.
 *
 * On the host results have the bits of a plan that is set. A CUDA device cuts keys by the lengths, as for a plan that is
 * set, but
 *   - with rows * q_heads / kv_heads up to 512 all rows are those of decode, for CTAs whose number follows from the
 *     limits;
 *   - beyond that, items of few rows are, and those of more become prefill tiles, cut as those of a plan that is set
 *     where they fill the device fewer than three times, with the same bits by the same kernel if all sequences of many
 *     rows have keys; where there are more tiles, the last are not cut, and the order of pieces may differ. A CTA for each tile that the limits allow is
 *     there in every attend, and leaves at once where it has none: limits of several times the usual rows cost some
 *     microseconds for each 1,000 tiles and KV heads. CTAs that stay ("persistent") do not take such plans, and keys are
 *     not widened: quantised caches go to the portable kernel, and rows of CPA_VLLM_X are all those of decode. */
typedef struct cpa_attend_limits {
    size_t size;
    cpa_attention_shape shape; /* as in a batch */
    int32_t block_size;
    int32_t rows;      /* most rows of each sequence */
    int64_t sequences; /* most sequences of an update, at least 1 */
    /* Most tokens of a sequence, those of its rows included; at least 1, on a CUDA device at most 2^30. */
    int64_t tokens;
    int64_t num_blocks; /* blocks that the caches that are attended have at least */
    /* Most rows of all sequences of an update together; 0: sequences * rows. What q, state and out have room for. On a
     * CUDA device times q_heads / kv_heads at most 2^30. */
    int64_t total_rows;
} cpa_attend_limits;

/* Reserves a plan that has been neither set nor reserved; it cannot be set any more. Until the first update every
 * sequence has length 0. Memory on a device: 4 bytes for each block of `tokens` tokens, for each sequence, and less
 * than 1 KiB for each CTA, for each 16 rows that share a KV head, and for each prefill tile; and work space for the
 * states of keys that are cut. Waits for the device; not in a capture. */
CPA_API cpa_status cpa_attend_plan_reserve(cpa_attend_plan *plan, const cpa_attend_limits *limits, cpa_error *err);

/* The arrays are read when the work of the stream comes to it; what a graph holds is their addresses, `sequences` and
 * table_stride. */
typedef struct cpa_attend_update_args {
    size_t size;
    int64_t sequences;           /* sequences, 0 to the limit; attends leave alone rows that belong to none of them */
    const void *lengths;         /* [sequences], int32_t or int64_t: tokens of each, those of its rows included */
    int32_t length_bytes;        /* bytes of an element of lengths: 4 or 8; 0 = 4 */
    const int32_t *block_tables; /* [sequences, table_stride]: entry j holds the tokens from j * block_size on */
    int64_t table_stride;        /* entries; at least ceil(tokens / block_size) of the limits, which 0 stands for */
    const int32_t *first_ranks;  /* NULL; of cpa_context_update, see there */
    /* In place of lengths and a stride, both NULL and 0 then: the pages of all sequences one behind the other, sequence
     * s having block_tables[kv_indptr[s]] to block_tables[kv_indptr[s + 1]], the last of which holds last_page_len[s]
     * tokens. A sequence whose pages do not lie among the n_indices of block_tables is refused as those above are. */
    const int32_t *kv_indptr;     /* [sequences + 1] */
    const int32_t *last_page_len; /* [sequences], 1 to block_size; NULL: all pages are full */
    int64_t n_indices;
    /* NULL: each sequence has as many rows as the limits say. Otherwise sequence s has the rows [qo_indptr[s],
     * qo_indptr[s + 1]), none or up to those of the limits, which lie below `sequences` times the rows of the limits,
     * and below total_rows. A sequence of more is refused as well, its first rows becoming NaN; one whose rows descend,
     * begin nowhere or before the end of those in front has none. */
    const int32_t *qo_indptr; /* [sequences + 1], ascending */
} cpa_attend_update_args;

/* Enqueues what makes the plan that of these arrays, for the attends behind it; on the host they are read before the
 * call returns. Attends of the plan and its updates are ordered as they are enqueued on one stream. Used by one thread
 * at a time. On a device it allocates nothing. */
CPA_API cpa_status cpa_attend_plan_update(cpa_attend_plan *plan, const cpa_attend_update_args *args,
                                          cpa_stream *stream);

/* Whether the last update of a reserved plan that is done, replayed or not, refused a sequence that has rows: CPA_INVALID,
 * with a line that names the first one and what of it did not fit. CPA_OK where it refused none. Reads memory of the host
 * that the update wrote: wait for the stream before. */
CPA_API cpa_status cpa_attend_plan_refused(const cpa_attend_plan *plan, cpa_error *err);

/* The range in which attend takes scores for what they are, as score * log2(e): scores of -1.16e7 and 9.3e7. So a key
 * weighs beside others of its piece. Keys lie in several pieces where an attend has more than cpa_attend_split_tokens
 * of them on the host, where the plan of a device cuts, and where states are resumed or merged. Pieces are joined by
 * their LSEs, which are fp32: each join may cost O up to |LSE| 2^-24 of its largest value. Over 4,097 equal keys with
 * values of -1 and 1, five pieces of the host, that was up to 4.5e-4 at scores of 1.6e4, 0.035 at 1e6 and 0.6 at 1.7e7;
 * on an H200 1e-3 at 1e6 and 0.025 at 1.7e7. */
enum { CPA_LOWEST_EXPONENT = -(1 << 24), CPA_HIGHEST_EXPONENT = 1 << 27 };

/* attend: softmax(scale * Q K^T + mask) V for every row of every item of the plan, with its LSE; cpattn/score.h says
 * what else may be done to scores. resume = 0 starts from the empty state and writes every row of every item; resume =
 * 1 continues from the state that is there, as if the earlier keys had been attended in the same call. Rows of no item
 * are left alone. A row that sees no key becomes (or stays) O = 0, LSE = -inf.
 *
 * Not finite: scores count as they are computed and rounded in fp32, and as the rules of cpattn/score.h leave them: a
 * softcap makes one of +inf finite. A row that sees a key whose score is NaN or +inf, be it by overflow, becomes NaN
 * in O and LSE, and stays NaN when it is resumed or merged. A score of -inf weighs nothing, as a key does that the row
 * does not see; and one far below CPA_LOWEST_EXPONENT (by 150 and more) weighs 0, so that a bias like -FLT_MAX may
 * hide keys whose values are finite. Tensor cores make NaN of a row with a score from CPA_HIGHEST_EXPONENT on, where
 * exponents are off by several powers of two; over caches of 8 bits O may overflow from a quarter of that on. A value
 * of NaN or infinity makes the columns of O that it reaches what arithmetic makes of it; the LSE follows from the
 * scores alone (but on tensor cores over caches of codes, a value whose scale is not finite makes it NaN). Keys and
 * values that a row does not see weigh exactly nothing, whatever they hold, on the host and in the plain kernels of a
 * device. Tensor cores multiply values by weights of 0, and 0 * NaN is NaN: there all values of an item's k_count keys
 * have to be finite that lie within 256 keys of one that some row of the item, or of one that begins with the same
 * blocks, sees, or rows of that item may become NaN. Tokens past k_count, blocks that the item does not name and the
 * sequences of other items are exactly out. cpa_kv_write tells what is not finite as it is written.
 *
 * With `out`, the result is also rounded to q_dtype and stored there; or with out_scale to fp8, code = e4m3(x * (1 /
 * *out_scale)), both in fp32, saturating, NaN as 0, as of a merge. `state.o` and `state.lse` may then be NULL if resume
 * = 0; if resume = 1, `state.lse` is that of the result, and what `state.o` holds afterwards is unspecified.
 *
 * Keys in two places: attend those of the first with resume = 0, and those of the other with resume = 1, each by a plan
 * and a view of its own. So the first tokens of a sequence may be kept in the model's dtype before a quantised cache,
 * and the keys of the chunk itself be read from the tensors of the model (a view with blocks of one token) rather than
 * as the cache holds them; results then depend on where chunks begin.
 *
 * On a CUDA device bf16 and fp16 run on tensor cores where q, k, v, out and state.o are aligned to 16 bytes, dims and
 * strides are multiples of 8 elements (16 of a quantised cache and its queries; 4 of state.o), the cache is quantised or of q_dtype,
 * and scale is positive. Score rules, biases and masks of bits do so over every cache on compute capability 9.0, but for
 * an fp8 cache of CPA_VLLM_X in prefill, with a bias or heads above 128, and for a bias over keys that rows share; before
 * 9.0 over rows of q_dtype in blocks of 16 tokens and more. Keys selected by lists have kernels of their own
 * (cpattn/selection.h), and so have those by blocks on 9.0; left to the plain one are latents (v_in_k), heads above 256, and CPA_FP8_E5M2 but for prefill on 9.0 without a bias over rows of one
 * run, of a batch of which no item is one of few rows. All else is computed by plain kernels, often 100 to 1,000 times slower, which is told once for each reason at
 * CPA_LOG_WARN; cpa_attend_plan_kernel tells which kernels run.
 * Prefill over a quantised cache or one of CPA_VLLM_X widens keys and values first, in memory of the plan that grows with
 * its items up to 1 GiB, however long they are; where memory is short in less, which is told at CPA_LOG_WARN.
 *
 * Latents: over a cache with v_in_k the value of a key is its first v_dim elements, and scale is not 0, since it is that
 * of the heads that were folded together. All query heads share its rows.
 *
 * On the host back end the result of a row has the same bits however the rows are grouped into items, calls and steps,
 * and whether its keys come in one call or in several resumed ones cut at multiples of cpa_attend_split_tokens. */
typedef struct cpa_attend_args {
    size_t size;
    const void *q; /* [rows, q_heads, k_dim] */
    cpa_dtype q_dtype;
    int64_t q_row_stride; /* elements; 0 = q_heads * k_dim */
    cpa_kv_view kv;
    cpa_mask mask;
    float scale; /* 0 = 1 / sqrt(k_dim); not over latents */
    int32_t resume;
    cpa_partial state;
    void *out; /* [rows, q_heads, v_dim], in q_dtype or fp8; or NULL. No two of its heads overlap, of whatever rows. */
    /* What else is done to scores, see cpattn/score.h, and which keys are attended, see cpattn/selection.h; NULL:
     * nothing, and all. Rows are those of q. Sink logits count in `out` alone: a state stays one that can be resumed
     * and merged. */
    const cpa_score_rules *rules;
    const cpa_key_selection *selection;
    const cpa_score_bias *bias;
    const float *out_scale; /* device [1]: `out` holds CPA_FP8_E4M3; or NULL */
    /* Elements from head to head, and from row to row of out; rows may lie within heads. So a contiguous tensor
     * [sequences, heads, tokens, dim] has a row stride of dim and a head stride of tokens * dim, and the rows of its
     * sequence s begin at q_row = s * heads * tokens; other rows are not touched. */
    int64_t q_head_stride;   /* 0 = k_dim */
    int64_t out_row_stride;  /* 0 = q_heads * v_dim */
    int64_t out_head_stride; /* 0 = v_dim */
    /* Not 0: state.lse is [q_heads, rows], so many elements from head to head; its lse_row_stride is 0 or 1 then. */
    int64_t lse_head_stride;
    /* Above 0: tiles of keys that cannot matter are left out. A tile of keys is left out for rows that go through it
     * together where for each of these its largest score lies more than skip_tiles, in the unit of scores, below the
     * largest one that the row has met so far in its piece (BLASST, arXiv:2512.12087): then neither exponentials are made
     * of it nor values read. With m the largest score of a row, n keys that were left out weigh less than n exp(m -
     * skip_tiles) together, and those that were not at least exp(m): of the weight of a row at most the share
     *
     *     w = n exp(-skip_tiles) / (1 + n exp(-skip_tiles))
     *
     * is missing. So O is off by at most w times the distance between values, and LSE by at most -ln(1 - w). Which tiles
     * there are, and so the result, depends on the device, on how rows are grouped and on how keys are cut; what is not
     * finite in a tile that is left out may not show. 0: all keys count.
     *
     * The host leaves out tiles of 256 keys, over any cache and with any rules. On CUDA devices decode leaves out 16 keys,
     * with heads of 65 to 128 columns in bf16 or fp16 over a cache of q_dtype in blocks of 16 tokens and more, up to 16
     * rows of a KV head, and on compute capability 9.0 prefill 128 for 16 packed rows, counted as left out where 64 do,
     * from 97 columns and blocks of 8 on; both without rules, biases, selections (cpa_attend_plan_kernel tells). */
    float skip_tiles;
    /* NULL; or device [2], each added to: how many tiles were looked at, once for each group of rows and KV head, by
     * kernels that leave some out; and how many of these were left out. Without skip_tiles neither grows. */
    int64_t *tile_counts;
} cpa_attend_args;
CPA_API cpa_status cpa_attend(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_stream *stream);

/* A kernel of attend, by names that live as long as the library. */
typedef struct cpa_attend_kernel {
    const char *name;    /* NULL: the plan has no work of this kind */
    const char *fastest; /* the fastest kernel for this work and the layout and kind of dtype of the cache */
    const char *why;     /* what `fastest` does not take; NULL: it is the one that runs */
} cpa_attend_kernel;
typedef struct cpa_attend_kernels {
    cpa_attend_kernel decode;  /* items of few rows */
    cpa_attend_kernel prefill; /* items of more */
    cpa_attend_kernel shared;  /* rows of several items over the keys that these share */
} cpa_attend_kernels;

/* Which kernels an attend of the plan with these arguments runs, and why no faster ones; with NULL, an attend that asks
 * for nothing beside what the plan was told: no score rules, its dtypes, results in `out` alone, all of it aligned. On
 * the host the names are those of the instruction set; "simple" is the plain kernel of a device. Fills the `size` bytes
 * at `out`. Addresses count by their alignment and are not read, and nothing is enqueued. CPA_INVALID for a plan that is
 * not set, and for arguments that cpa_attend refuses; err says why. */
CPA_API cpa_status cpa_attend_plan_kernel(const cpa_attend_plan *plan, const cpa_attend_args *args,
                                          cpa_attend_kernels *out, size_t size, cpa_error *err);

/* Local key indices at which a range of keys may be cut into resumed calls without changing a bit: multiples of this.
 */
CPA_API int64_t cpa_attend_split_tokens(const cpa_device *device);

/* Whether attend on this device takes a shape (its dtypes, widths and layout) under the rules of a mask, NULL for any:
 * CPA_OK, CPA_UNSUPPORTED where it has no kernel for them, and CPA_INVALID for what is no shape or no mask; err says
 * why. Plans, contexts and engines ask the same when they are set or created. Enqueues nothing; any threads at once. */
CPA_API cpa_status cpa_attend_supported(const cpa_device *device, const cpa_attention_shape *shape,
                                        const cpa_mask *mask, cpa_error *err);

/* merge (merge_attn_states): joins the partial states of the same rows over disjoint keys, exactly. For two states
 *     m = max(lse_a, lse_b), w = exp(lse - m), O = (w_a O_a + w_b O_b) / (w_a + w_b), lse = m + ln(w_a + w_b)
 * and for n states the left fold of that, in one pass; the order of `states` is the order of the fold, so merging one
 * by one gives the same bits. An LSE of +inf counts as -inf; a state of zero weight contributes exactly 0, whatever its
 * O holds; if every LSE is -inf the result is O = 0, LSE = -inf. An LSE of NaN, that of a row with a score that was no
 * number (see attend), makes O and LSE of the result NaN; with foreign_lse it counts as -inf too.
 * out and out_lse may be the memory of states[0] when that has no row map (in-place accumulation).
 *
 * Options for the states of other libraries, and for what takes the result; zero is as above. O of the result in fp8:
 * code = e4m3(x * (1 / *out_scale)), both in fp32, saturating, NaN as 0; attention over one set of keys gets such codes
 * by a merge of its one state. */
typedef struct cpa_merge_args {
    size_t size;
    int64_t rows;
    int32_t heads;
    int32_t v_dim;
    const cpa_partial *states;      /* [n_states], host; their pointers are on the device */
    const int32_t *const *row_maps; /* host [n_states] of device [rows]: the row of that state, or -1 for an empty one;
                                       NULL, or NULL for a state: the identity */
    int32_t n_states;               /* at most CPA_MERGE_MAX_STATES */
    cpa_dtype out_dtype;            /* fp32, bf16, fp16 or CPA_FP8_E4M3 */
    void *out;                      /* [rows, heads, v_dim], out_row_stride elements from row to row */
    int64_t out_row_stride;         /* 0 = heads * v_dim */
    float *out_lse;                 /* [rows, heads], or NULL */
    int64_t out_lse_row_stride;     /* 0 = heads */
    int32_t foreign_lse;            /* 1: NaN counts as an empty state too, as some other libraries leave it */
    cpa_dtype state_dtype;          /* dtype of O of the states: `o` points to its elements, and strides count them */
    const float *out_scale;         /* [1]: if out_dtype is CPA_FP8_E4M3, else NULL */
    /* The last so many rows take states[n_states - 1] as it is: O in out_dtype, to the bit if that is state_dtype, and
     * the bits of its LSE, whatever it is. (vLLM says it the other way round: prefill_tokens_with_context of the rows
     * are merged.) The states before are not read there. */
    int64_t tail_rows;
    /* Not 0: LSEs of the states, or of the result, are [heads, rows], so many elements from head to head; the
     * lse_row_stride of the states, or out_lse_row_stride, is 0 or 1 then. */
    int64_t lse_head_stride, out_lse_head_stride;
    int32_t lse_base2; /* 1: LSEs of the states and of the result are logarithms to the base of 2 */
    /* [heads] or NULL: one more term of each row's denominator (cpattn/score.h), of `out` but not of out_lse; for the
     * last merge of a row. The tail rows stay as they are. */
    const float *sink_logits;
} cpa_merge_args;
#define CPA_MERGE_MAX_STATES 64
CPA_API cpa_status cpa_merge(const cpa_merge_args *args, cpa_stream *stream);

/* Heads scattered over ranks: ranks that have attended the same rows over different keys end with a slice of the heads
 * of each row. Each packs its states, a slice for each rank, sends them, and merges the slices of its own heads.
 *
 * Slice r of n has the heads [cpa_slice_begin(heads, n, r), cpa_slice_begin(heads, n, r + 1)), whether n divides them
 * or not; it may have none. A row of a packed slice is, head after head, O [v_dim] in the dtype of the slice, then the
 * LSE in fp32: one element where that is fp32, else two, its low half first. So rows have cpa_packed_width(v_dim,
 * dtype) elements a head, and lie one behind the other. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_slice_begin(int64_t count, int32_t slices, int32_t slice) {
    return count / slices * slice + count % slices * slice / slices;
}
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_packed_width(int32_t v_dim, cpa_dtype dtype) {
    return v_dim + (dtype == CPA_F32 ? 1 : 2);
}

/* state_pack: cuts partial states into slices. O is rounded to the dtype of the slices, or keeps its bits where it has
 * that dtype; the LSE keeps its bits. An empty row becomes O = 0, LSE = -inf. */
typedef struct cpa_state_pack_args {
    size_t size;
    int64_t rows; /* rows of each slice */
    int32_t heads;
    int32_t v_dim;
    const void *o;          /* [rows, heads, v_dim] */
    cpa_dtype o_dtype;      /* fp32, or `dtype` */
    int64_t o_row_stride;   /* elements; 0 = heads * v_dim */
    const float *lse;       /* [rows, heads] */
    int64_t lse_row_stride; /* 0 = heads */
    /* [rows]: the row of o and lse, or -1 for an empty one: of a rank that has none of its keys, or that fills up a
     * batch of fixed shape; NULL: the identity */
    const int32_t *row_map;
    int32_t n_slices; /* at most CPA_MERGE_MAX_STATES */
    cpa_dtype dtype;
    /* host [n_slices] of device [rows, heads of the slice, cpa_packed_width]; NULL for a slice that is left out */
    void *const *slices;
} cpa_state_pack_args;
CPA_API cpa_status cpa_state_pack(const cpa_state_pack_args *args, cpa_stream *stream);

/* state_merge_packed: cpa_merge of packed slices of the same heads and rows. The order of the fold is that of `parts`,
 * or of its own for each row. */
typedef struct cpa_state_merge_packed_args {
    size_t size;
    int64_t rows;
    int32_t heads; /* heads of the slice; 0: nothing is done */
    int32_t v_dim;
    cpa_dtype dtype;            /* dtype of the slices */
    int32_t n_parts;            /* at most CPA_MERGE_MAX_STATES */
    const void *const *parts;   /* host [n_parts] of device [rows, heads, cpa_packed_width] */
    cpa_dtype out_dtype;        /* fp32, bf16, fp16 or CPA_FP8_E4M3 */
    void *out;                  /* [rows, heads, v_dim], out_row_stride elements from row to row; overlaps no part */
    int64_t out_row_stride;     /* 0 = heads * v_dim */
    float *out_lse;             /* [rows, heads], or NULL */
    int64_t out_lse_row_stride; /* 0 = heads */
    /* [rows, n_parts]: the order in which parts of each row are folded, none twice; -1, or a number that no part has:
     * none. NULL: all, in the order of `parts`. */
    const int32_t *order;
    int32_t foreign_lse;      /* as for cpa_merge */
    const float *sink_logits; /* [heads] of the slice; as for cpa_merge */
    const float *out_scale;   /* [1]: if out_dtype is CPA_FP8_E4M3, else NULL; as for cpa_merge */
} cpa_state_merge_packed_args;
CPA_API cpa_status cpa_state_merge_packed(const cpa_state_merge_packed_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
