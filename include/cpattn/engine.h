/* The engine: a whole service. Rank 0 schedules requests (continuous batching, chunked prefill, preemption); all ranks
 * execute step after step, layer after layer, and check sampled results against a float64 reference while they run. */
#ifndef CPATTN_ENGINE_H
#define CPATTN_ENGINE_H

#include <cpattn/blocks.h>
#include <cpattn/comm.h>

#include <cpattn/constraint.h>
#include <cpattn/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The token at a position of a request: of the prompt, and of the output where that is given (outputs_given, or a
 * network that draws nothing); called on rank 0, also from a thread of the engine. */
typedef uint32_t (*cpa_token_at_fn)(void *ctx, uint64_t request, int64_t position);

/* Rank 0, from the thread that runs the engine: output token `index` (0, 1, ...) of a request, and, if its sampling
 * asks for that, its log-probability, otherwise 0. ctx is that of the run. It may submit and cancel requests. */
typedef void (*cpa_token_fn)(void *ctx, uint64_t request, int64_t index, uint32_t token, float logprob);

/* Rank 0, from the thread that runs the engine: what the logits say of the token at `position` of a request: of its
 * prompt, from position 1 on, in order and before the first on_token, where its sampling asks for prompt_logprobs; of
 * its output, right before on_token, where it asks for top_logprobs. *ranks is valid during the call. */
typedef void (*cpa_ranks_fn)(void *ctx, uint64_t request, int64_t position, const cpa_token_ranks *ranks);

/* Check as many rows, at most one in a thousand, as 2% of the run time pays for. */
#define CPA_VERIFY_AUTO (-1.0)

/* No sequence is placed on one of several ranks. */
#define CPA_LOCAL_CONTEXT_NONE (-1)

/* What becomes of the cache of a sequence that has to give way to others. */
typedef enum cpa_preemption_mode {
    CPA_PREEMPT_RECOMPUTE = 0, /* it is computed again */
    CPA_PREEMPT_SWAP,          /* it moves to host memory, as far as that lasts */
    CPA_PREEMPT_AUTO           /* it moves where that takes less time than computing it */
} cpa_preemption_mode;

/* Who goes first. */
typedef enum cpa_policy { CPA_POLICY_PRIORITY = 0, CPA_POLICY_FCFS } cpa_policy;

/* Who guesses the next tokens of a request, so that a step can draw several of them: see cpa_model.draft. */
typedef enum cpa_drafter {
    CPA_DRAFT_NONE = 0, /* nobody: a token a step */
    CPA_DRAFT_NGRAM,    /* what followed the last few tokens before (cpattn/ngram.h) */
    CPA_DRAFT_MODEL     /* the network: its layers that draft, one token; without such layers its `draft` */
} cpa_drafter;

/* What carries tensors between the devices of ranks. */
typedef enum cpa_transport_kind {
    CPA_TRANSPORT_AUTO = 0, /* the one that is faster in a measurement at start-up, or that works */
    CPA_TRANSPORT_NCCL,
    CPA_TRANSPORT_PEER, /* peer memory of the GPUs of one host */
    CPA_TRANSPORT_HOST  /* the communicator itself; for the host back end, whose only one it is */
} cpa_transport_kind;

/* What chunks of prompts do whose form expands latents (cpa_row_form), where few of their tokens meet many keys. */
typedef enum cpa_short_prompts {
    CPA_SHORT_PROMPTS_AUTO = 0, /* they absorb on back ends that promise no bits, as results then depend on the chunk */
    CPA_SHORT_PROMPTS_EXPAND,   /* as all others */
    CPA_SHORT_PROMPTS_ABSORB    /* they take decode_form of the model, where that is less work by count */
} cpa_short_prompts;

typedef struct cpa_engine_options {
    size_t size;
    cpa_device_options device;
    cpa_model_shape model;
    int32_t block_size;             /* a power of two up to 512; 0 = 16 */
    int64_t num_blocks;             /* blocks of one rank, for the layers that keep most; see window_seqs */
    int32_t interleave;             /* a multiple or a divisor of block_size; 0 = block_size */
    int64_t max_num_batched_tokens; /* 0 = 2048 */
    int32_t max_num_seqs;           /* 0 = 256 */
    cpa_algorithm algorithm;
    int64_t staging_bytes; /* 0 = the default of cpa_context_options */
    double verify;         /* share of (token, head, layer) rows that are checked; 0 = none; CPA_VERIFY_AUTO */
    int32_t skip_self_test;
    int64_t timeline_spans; /* spans that a rank keeps for cpa_engine_timeline, rank 0 as many of requests; 0 = none */
    int32_t enforce_eager;  /* decode steps are not captured in graphs */
    uint64_t seed;          /* seed of the synthetic model and of the choice of checked rows */
    const cpa_model *network; /* NULL = the synthetic model */
    cpa_token_at_fn token_at; /* rank 0; NULL = tokens derived from (seed, request, position) */
    void *token_ctx;
    int32_t no_prefix_caching; /* equal beginnings of prompts are computed again; samples of one prompt still share */
    cpa_preemption_mode preemption;
    /* Bytes of host memory on one rank for the cache of preempted sequences, and with keep_evicted for blocks; 0 = none */
    int64_t swap_bytes;
    cpa_policy policy;
    double ageing_s;                      /* waiting time, in s, that counts as one level of priority; 0 = never */
    int64_t long_prefill_token_threshold; /* most tokens of one prefill in a step; 0 = no bound of its own */
    /* Sequences of up to so many tokens are placed on one rank, where they decode without any exchange. 0: on
     * devices those that are sooner done like that by what was measured at start-up, on the host none. */
    int64_t local_context;
    /* Most blocks of one rank, of layers of one window, that the running requests of one tenant hold; 0 = no bound. */
    int64_t tenant_block_quota;
    cpa_transport_kind transport; /* one for the back end of the device */
    int32_t fail_on_nonfinite;    /* a row that is not finite (see the statistics) ends the run: CPA_CHECK_FAILED */
    /* Rank 0, of requests that have not begun to run: most of them, and most prompt tokens that they have together,
     * though any one may wait alone. Beyond that cpa_engine_submit answers CPA_BUSY. 0 = no bound. */
    int64_t max_queued_requests, max_queued_tokens;
    int32_t outputs_given; /* rank 0: token_at gives output tokens too where the network could draw them */
    cpa_token_fn on_token; /* rank 0; NULL = nothing is called */
    /* Rank 0. Requests get the tokens that they get without drafts. With them a step is planned when the one before is
     * done, if that yields tokens. A network that draws with penalties takes cpa_model_step.paths into account. */
    cpa_drafter drafter;
    int32_t draft_tokens;         /* most drafts of a sequence in a step; they count as its tokens; 0 = 4 */
    int32_t ngram_min, ngram_max; /* as cpa_ngram_options has them */
    /* Where blocks are short, prefill chunks are cut to what is free without anyone giving way, and the rest of what
     * others need is spared; 0: chunks are as long as tokens are allowed. Results are the same. */
    int32_t adaptive_chunks;
    cpa_cascade_attention cascade_attention; /* as of a context */
    int32_t ngram_branches;                  /* as cpa_ngram_options has them: drafts are a tree */
    cpa_ranks_fn on_ranks;                   /* rank 0; NULL = nothing is called */
    /* A folder: the rank that finds a checked row wrong keeps there, in a file that the error names, what the row had:
     * query, keys, values, result and reference. They tell of what was in the prompt. Copied; NULL = nothing is kept. */
    const char *violation_dump;
    /* Layers of different windows have blocks of their own and give back those that they no longer see. Those with the
     * widest window, or with none, have num_blocks of one rank; the others what so many sequences can need of theirs,
     * at most as many. 0 = max_num_seqs. */
    int32_t window_seqs;
    /* Dtype of O of the partial states that travel between ranks, as cpa_context_options.state_dtype has it: CPA_F32, or
     * the dtype of the model in 16 bits, so that what it rounds is within what checked rows may be off. */
    cpa_dtype state_dtype;
    cpa_short_prompts short_prompts;
    /* Where requests are exported to and imported from (cpa_request.transfer), on every rank or on none; copied, and
     * what it points to must outlive the engine. Calls take as long as they do: no rank computes meanwhile. */
    const cpa_block_store *block_store;
    cpa_block_event_fn on_block_event; /* rank 0; NULL = nothing is called */
    void *block_event_ctx;
    /* Prompts attend the blocks of 128 keys that XAttention selects (cpattn/xattn.h), in layers without a window: the
     * tokens of a group, 4, 8 or 16; and the share of the estimated attention that each row of blocks keeps, above 0 and
     * at most 1. Prompts of fewer than 128 sparse_stride tokens, and decode, attend all keys. With several ranks the
     * interleave is a multiple of 128, which 0 stands for then. On CUDA devices for compute capability 9.0; through a
     * ring (ring_bytes) over quantised caches there in steps whose requests have 128 tokens each. 0 = all attend all
     * keys. */
    int32_t sparse_stride;
    float sparse_tau;
    /* Blocks that can be found by their prefix and have to make room for others stay in the host memory of
     * swap_bytes, as far as no preempted request needs that, the least recently used ones the shortest, and come
     * back for a prompt that begins with them. 0: they are gone. */
    int32_t keep_evicted;
    /* With keep_evicted: a folder that they are also written to, by threads of each rank, and where the next engine
     * with as many ranks finds them: swap_folder_bytes of one rank, in files of its own. Blocks are found if the
     * model, its shape and dtypes, the layout of the cache, block_size, interleave and the back end are the same,
     * and the names swap_model and swap_salt of the model and of whoever may share them; otherwise the engine is not
     * created, CPA_INVALID. Each has a SHA-256: what is damaged is computed again. Where the folder takes no more,
     * that is logged and the engine goes on without. Texts are copied; NULL = none. */
    const char *swap_folder, *swap_model, *swap_salt;
    int64_t swap_folder_bytes;
    /* Not 0: the cache lies in page-locked memory of the host, and attention of each rank has so many bytes of the
     * device's for the ring of segments that it comes through (cpa_context_options.ring_bytes). Decode steps are not
     * captured in graphs then. */
    int64_t ring_bytes;
    int32_t ring_segments; /* as in cpa_context_options */
    /* Tiles of keys all of whose scores lie more than this below the largest one that their rows have met are left out,
     * as skip_tiles of cpa_attend_args has it; the tolerance of checked rows allows for what may be missing. 0: none */
    float skip_tiles;
    /* 1: k_scales and v_scales of model.attention lie on the host, above 0 all of them, and are copied to the device; the
     * same on every rank. What a store or another engine has of the cache is then found again by these numbers too. */
    int32_t scales_on_host;
    /* Keys and values of the first tokens of every sequence that are kept in attention.dtype too, in all layers, and
     * attended so, beside a quantised cache; 0: none are. A multiple of the block size; runs are not shorter than blocks.
     * Sharded prompts go by pass-Q. Not over latents (v_in_k), nor with an indexer, forms, sparse_stride, ring_bytes or a
     * block_store. */
    int64_t precise_tokens;
} cpa_engine_options;

/* What a request has to do with the engine's store of blocks. */
typedef enum cpa_transfer {
    /* Keys and values of its prompt come from the store, as far as that has more of them than the engine itself; of the
     * rest, and of what is damaged, the request computes its own. At least its last token is computed. Nothing comes
     * where prompt_logprobs are asked for. */
    CPA_TRANSFER_IMPORT = 1,
    /* Keys and values of its prompt are put into the store when it has got its first token, before that is told: what a
     * layer with a window sees no more is not among them, and nothing is of a request with a row that is not finite. An
     * engine that computes prompts for others gets requests of one output token. */
    CPA_TRANSFER_EXPORT = 2
} cpa_transfer;

typedef struct cpa_request {
    size_t size;
    uint64_t id; /* unique */
    int64_t prompt_tokens;
    int64_t output_tokens; /* >= 1 */
    double arrival_s;      /* seconds from now, if a run is under way, or after the start of the next one */
    int32_t priority;      /* lower runs first */
    const char *salt;      /* requests share cached prefixes only with requests of equal salt; NULL = ""; not kept */
    uint64_t group;        /* number that all samples of one prompt have, which then share its cache; 0 = none */
    double deadline_s;     /* seconds after its arrival: then it is ended, finished or not; 0 = none */
    const cpa_sampling *sampling; /* how output tokens are drawn; NULL = zeros; copied */
    /* For whom it is made: of one priority, the requests of the tenant that has been served least go first, except with
     * CPA_POLICY_FCFS. NULL = whom the salt tells apart; not kept. */
    const char *tenant;
    /* What its answer may be; NULL = anything. For networks that draw and tell their vocabulary. *constraint is copied;
     * constraint_ctx belongs to the engine once the request is taken, until it calls close. Nothing is drafted for such
     * a request. */
    const cpa_constraint_ops *constraint;
    void *constraint_ctx;
    uint32_t transfer; /* of cpa_transfer, or'ed; not 0: the engine has a block_store. Its salt is part of the keys */
} cpa_request;

/* Why a request has ended. */
typedef enum cpa_finish_reason {
    CPA_FINISH_LENGTH = 0, /* it has all its output tokens */
    CPA_FINISH_CANCELLED,  /* by cpa_engine_cancel, or it was to arrive after cpa_engine_drain */
    CPA_FINISH_EXPIRED,    /* its deadline has passed */
    CPA_FINISH_FAILED,     /* by a fault of its own, which `error` tells */
    CPA_FINISH_STOP        /* its last token is one that ends it: of its stop_ids, or of the network's end_ids */
} cpa_finish_reason;

/* What happened to one request; times in seconds after the start of the first run, without the pauses between runs. */
typedef struct cpa_request_result {
    uint64_t id;
    int64_t prompt_tokens;
    int64_t output_tokens; /* output tokens that the request has got */
    double arrival_s;
    double first_token_s; /* when the first token was there; as finish_s where the request ended without any */
    double finish_s;
    const double *token_s; /* [output_tokens], when each token was there; valid during the call */
    cpa_finish_reason reason;
    const char *error;      /* why it failed; "" for another reason; valid during the call */
    const uint32_t *tokens; /* [output_tokens]; valid during the call */
    /* [output_tokens]; 0 where the request's sampling does not ask for them; valid during the call. */
    const float *logprobs;
    /* When the request first ran, and its time in the queue ended; as finish_s where it never ran. */
    double scheduled_s;
    const cpa_token_ranks *ranks; /* [output_tokens]; valid during the call; NULL unless there are top_logprobs */
    /* [prompt_tokens], the first without meaning; valid during the call; NULL unless there are prompt_logprobs, all of
     * which have come. */
    const cpa_token_ranks *prompt_ranks;
} cpa_request_result;

/* Rank 0, from the thread that runs the engine, when a request has ended, for whatever reason; once for each. */
typedef void (*cpa_finish_fn)(void *ctx, const cpa_request_result *result);
/* Rank 0, after each step: tokens computed or found in the cache (prompt and output; again after a preemption) and
 * requests finished so far. */
typedef void (*cpa_progress_fn)(void *ctx, int64_t tokens, int64_t requests, double elapsed_s);

/* Groups of layers that have a cache together, those of one window and number of sinks; see cpa_engine_options. With
 * precise_tokens the last one is of all layers: these tokens, as sinks of a window of 1. */
enum { CPA_ENGINE_KV_GROUPS = 8 };
typedef struct cpa_engine_kv_group {
    int32_t layers;
    int64_t window, sinks;      /* 0: none */
    int64_t block_bytes;        /* bytes of one block in the group's layers */
    int64_t blocks, peak, used; /* as kv_blocks, kv_peak and kv_used */
} cpa_engine_kv_group;

/* Totals over all ranks since the engine was created, the same on every rank once a run has ended. */
typedef struct cpa_engine_stats {
    int64_t steps;
    int64_t graph_steps; /* steps launched as graphs */
    double graph_s; /* time of graph_steps on the clock of the device, all of their work, of the rank with the most */
    int64_t requests_finished; /* requests that got their length, or a token that ends them */
    int64_t prompt_tokens;     /* prompt tokens of finished requests */
    int64_t computed_tokens;   /* rows of all steps; more than the tokens of the requests after preemptions */
    int64_t output_tokens;     /* output tokens emitted */
    double duration_s;         /* time of all runs */
    int64_t chunks_pass_kv;
    int64_t chunks_pass_q;
    char choices[320];        /* chunks by algorithm and why, as "pass-q 120 (decode), pass-kv 3 (...)" */
    double planner_flops;     /* C, FLOP/s, as measured at start-up; 0: not measured */
    double planner_bandwidth; /* W, bytes/s, as measured at start-up; 0: not measured */
    /* R, bytes/s, and x, s, as measured at start-up; 0: not measured */
    double planner_memory_bandwidth, planner_exchange_s;
    double overlap_tokens;     /* new tokens from which pass-KV hides its exchange */
    double predicted_attend_s; /* attention time as planned, summed over steps that were no graphs */
    double actual_attend_s;    /* attention time as measured, summed over steps that were no graphs */
    int64_t bytes_sent;        /* sum over ranks */
    double exposed_comm_s;     /* waiting for messages in steps that were no graphs, of the rank with the most */
    double imbalance; /* attention time of the busiest rank in steps that were no graphs, over the mean; 1 = even */
    int64_t staging_bytes; /* most bytes of staging on any rank */
    int64_t staging_bound; /* most bytes that staging may have */
    int64_t kv_blocks;     /* blocks of one rank */
    int64_t kv_peak;       /* most blocks in use on any rank */
    int64_t preemptions;
    /* Full blocks of the prompts, and how many of them were in the cache already; where the interleave is less than a
     * block, those of full units, a block on each rank. */
    int64_t prefix_queries;
    int64_t prefix_hits;
    int64_t evictions;               /* cached blocks that made room */
    int64_t swapped_out, swapped_in; /* blocks, sum over ranks */
    int64_t swap_failures;           /* times that a request was computed again because its blocks came back damaged */
    int64_t rank_local;              /* times that a sequence was admitted to lie on one of several ranks */
    int64_t cow_copies;              /* shared blocks that were copied before they were written */
    int64_t verify_rows;
    int64_t verify_violations;
    /* Verified rows whose scores overflow in some orders of their sums, or are beyond CPA_HIGHEST_EXPONENT
     * (cpattn/ops.h). */
    int64_t verify_undecided;
    double verify_max_error;
    double verify_s; /* time of the check on the slowest rank */
    /* Hash of every row that yields an output token, in all layers; independent of the order of steps. */
    uint64_t output_digest;
    /* Rows that are not finite: tokens whose keys or values, or whose results where they yield output tokens, have a
     * NaN or an infinity in some layer; and the first of them, of the first step that had any and there of the first
     * layer. In a step with slices each rank counts what its own heads show: a token may count once on each. */
    int64_t nonfinite_rows;
    uint64_t nonfinite_request;
    int64_t nonfinite_position;
    int32_t nonfinite_layer;
    /* Requests that ended otherwise than by their last token, and now: those that wait, arrived or not, and those that
     * run. */
    int64_t requests_cancelled, requests_expired, requests_failed, requests_waiting, requests_running;
    int64_t kv_used;          /* blocks that requests have now, most on any rank; what is only cached does not count */
    int64_t prefilled_tokens; /* prompt tokens of requests that have got their first token */
    /* Chunks that were planned, by algorithm; the last: of sequences that lie on one rank and exchange nothing. */
    int64_t planned_pass_kv, planned_pass_q, planned_local;
    /* Chunks with drafts, the drafts in them, and those that were right. */
    int64_t drafted_chunks, draft_tokens, accepted_tokens;
    int64_t keys_attended, keys_read; /* keys as in cpa_context_stats; sum over ranks */
    int64_t tenants_active;           /* tenants that now have requests which have arrived and wait, or run */
    /* With adaptive_chunks: prefill chunks that were cut to the blocks that were free, and requests that were not begun
     * yet, once or more often, since the rest of their tokens did not fit. */
    int64_t cut_chunks, held_back;
    int64_t plain_rows; /* rows that plain kernels attended, as in cpa_context_stats; sum over ranks */
    /* The groups of layers, the one that keeps most first, whose blocks are also kv_blocks, kv_peak and kv_used. */
    int32_t kv_groups;
    cpa_engine_kv_group kv_group[CPA_ENGINE_KV_GROUPS];
    int64_t row_bytes_sent; /* of bytes_sent, rows that networks had other ranks compute (cpa_row_exchange) */
    /* As in cpa_context_stats; those of all ranks. */
    char decode_kernels[CPA_KERNEL_NAMES], prefill_kernels[CPA_KERNEL_NAMES];
    /* Prompt tokens that came from the block_store, and went there; and times that some of what was to come was not
     * there, or damaged. */
    int64_t imported_tokens, exported_tokens, import_failures;
    int64_t index_bytes_sent; /* of bytes_sent, what choosing keys by an indexer took (cpa_context_select) */
    /* Verified rows that attend a list of keys (cpattn/selection.h), as an indexer's, and the shares of their softmax that
     * lie on keys which the mask shows but the list lacks: their mean and the largest, 0 without such rows. */
    int64_t selection_rows;
    double selection_mass_left_out_mean, selection_mass_left_out_max;
    /* With sparse_stride: blocks of keys that rows of blocks of prompts attend, in all layers and heads, and those that
     * they would attend without; and the most bytes that the estimate took of the device so far, none of them by queries
     * times keys but for a block of each. */
    int64_t sparse_blocks_kept, sparse_blocks_seen;
    /* With keep_evicted, blocks, sum over ranks: those that moved to host memory, and of these to the folder; that
     * came back to a device, and from the folder to host memory; that were damaged then, or not there, and computed
     * again; that were in the folder when the engine was created; and those that are found in host memory and in the
     * folder now. */
    int64_t kept_blocks, stored_blocks, fetched_blocks, loaded_blocks, damaged_blocks, restored_blocks;
    int64_t host_blocks, folder_blocks;
    int64_t folder_bytes_written, folder_bytes_read;
    /* With ring_bytes, as in cpa_kv_ring_stats: sums over ranks, of the waiting that of the rank with the most. */
    int64_t ring_device_bytes, ring_bytes_read, ring_timed_bytes;
    double ring_copy_s, ring_waited_s;
    int64_t tiles_seen, tiles_skipped; /* with skip_tiles, as in cpa_context_stats; sum over ranks */
    int64_t sparse_bytes;
    /* Of those kept, in each layer those of the rank whose rows keep most: of n ranks, 1 / n at best. */
    int64_t sparse_blocks_busiest;
    double sparse_s; /* with sparse_stride: time of estimating blocks, exchanges included, of the rank with the most */
    /* With precise_tokens: bytes of a rank's cache for them, of all layers, which are the last kv_group. */
    int64_t precise_bytes;
    /* With ring_bytes: bytes of keys that the estimate reads from the host, on all ranks, beside ring_bytes_read. */
    int64_t sparse_host_bytes;
} cpa_engine_stats;

/* What one rank has measured since the engine was created; times in s. */
typedef struct cpa_rank_stats {
    int64_t steps;                   /* steps with tokens that it has run */
    double step_begin_s, step_end_s; /* the last of these, as begin_s of cpa_span; on the clock of its host */
    double attend_s;       /* in attend and merge, on the clock of its device; not in steps launched as graphs */
    double exposed_comm_s; /* attention waited for messages, as attend_s */
    double graph_s;        /* in steps launched as graphs, all of their work, on the clock of its device */
} cpa_rank_stats;

/* What one rank did at a time. Both texts live as long as the engine. */
typedef struct cpa_span {
    int32_t rank;
    const char *row;  /* line of the timeline: "compute", "host", ... */
    const char *name; /* what was done: "attend own", ... */
    int64_t step;
    int32_t layer;  /* -1: of no layer */
    int32_t round;  /* round of the all-to-all, from 1 on; 0: none */
    double begin_s; /* seconds after the start of the first run, without the pauses between runs */
    double seconds;
    /* What became of a request ("waiting", "prefill", "decode", "preempted") has the row "requests", rank 0, the step
     * in which it ended, and these; of others both are 0. */
    int32_t of_request;
    uint64_t request;
} cpa_span;
typedef void (*cpa_span_fn)(void *ctx, const cpa_span *span);

/* Requests through context attention on the ranks of a communicator. Its functions are called from one thread at a
 * time, the one that uses the communicator: the engine has threads of its own, which do not. Except these, which any
 * thread of rank 0 may call at any time, callbacks included: cpa_engine_submit, _cancel, _drain, _stop, _get_stats,
 * _get_rank_stats, _error. */
typedef struct cpa_engine cpa_engine;

/* Collective over `comm`, which must outlive the engine. Opens the device, allocates the cache, measures C
 * and W, and runs the self-test: every algorithm on small peaky inputs against float64. Fails on all ranks alike, but
 * for a fault that one rank meets alone within the self-test or the measurements: the others wait for it then until
 * it says so (cpa_comm_abort) or ends. */
CPA_API cpa_status cpa_engine_create(cpa_comm *comm, const cpa_engine_options *options, cpa_engine **out,
                                     cpa_error *err);
/* Collective; the device is closed. NULL does nothing. */
CPA_API void cpa_engine_destroy(cpa_engine *engine);

/* Queues a request; rank 0 only. CPA_INVALID, with the numbers, if it can never fit, or if an unfinished request has
 * its id. CPA_BUSY if the queue is full (max_queued_requests), CPA_STOPPED while the engine is drained. Nothing is kept
 * of *request. */
CPA_API cpa_status cpa_engine_submit(cpa_engine *engine, const cpa_request *request);

/* Ends a request, which gives its blocks back within two steps; rank 0 only. on_finish tells it, CPA_FINISH_CANCELLED,
 * or, where its last token was on its way, CPA_FINISH_LENGTH. CPA_INVALID if no unfinished request has the id. */
CPA_API cpa_status cpa_engine_cancel(cpa_engine *engine, uint64_t id);

/* Runs until every request has ended, or a check fails, or cpa_engine_stop. Collective. CPA_CHECK_FAILED names the
 * first violation: sequence, token, head, layer, algorithm and error. After CPA_OK or CPA_STOPPED it may be called
 * again: with what was left, and what has been submitted since. CPA_CHECK_FAILED comes on every rank: statistics,
 * timeline and cpa_engine_destroy follow as usual. After any other status, which the other ranks
 * are told (cpa_comm_abort), the communicator is of no use any more but to be destroyed, after the engine. CPA_INVALID
 * from a callback. */
CPA_API cpa_status cpa_engine_run(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress, void *ctx);

/* As cpa_engine_run, but where no request is left it waits for more, without using the processor on any rank, until it
 * is drained (CPA_OK) or stopped. */
CPA_API cpa_status cpa_engine_serve(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress,
                                    void *ctx);

/* What a step was. */
typedef enum cpa_step_result {
    CPA_STEP_RAN = 0, /* tokens were computed */
    CPA_STEP_IDLE,    /* there was nothing to compute */
    CPA_STEP_LAST     /* the run has ended */
} cpa_step_result;

/* For who drives the loop: each call is one step of a run that ends once the engine is drained (cpa_engine_drain), or
 * stopped: then *result is CPA_STEP_LAST, and the call returns what cpa_engine_serve would. It does not wait for
 * requests: what is submitted now is computed by the second call from now on at the latest, as the next step is planned
 * already. Until the last step no other function may run the engine; cpa_engine_destroy ends the run too, and tells
 * nothing of the requests that it leaves. Collective. *result is set only on success. */
CPA_API cpa_status cpa_engine_step(cpa_engine *engine, cpa_finish_fn on_finish, cpa_progress_fn on_progress, void *ctx,
                                   cpa_step_result *result);

/* Rank 0: from now on until the run has ended nothing is admitted, and requests whose arrival is still to come are
 * cancelled; the run ends when those that are left have. Waits for that, for timeout_s at most: CPA_OK, or CPA_BUSY if
 * some are left, or CPA_STOPPED if the run has ended without them. A callback does not wait. Where no run is under way,
 * the next one is meant. */
CPA_API cpa_status cpa_engine_drain(cpa_engine *engine, double timeout_s);

/* Asks a running engine to stop after the step in flight; rank 0. Safe from a signal handler and from any thread. */
CPA_API void cpa_engine_stop(cpa_engine *engine);

/* The statistics. On rank 0, while a run is under way, those of requests, steps and tokens, and what the scheduler
 * counts, are as of the last step; verify_*, bytes_sent, exposed_comm_s and imbalance likewise, with what other ranks
 * add to them as of the step before that; all others, and those of other ranks, as of the end of the last run. `size`
 * is that of *out, sizeof *out: as much of them is written, and zeros where the library knows less. */
CPA_API cpa_status cpa_engine_get_stats(const cpa_engine *engine, cpa_engine_stats *out, size_t size);

/* Those of one rank, on rank 0, where any thread may ask; and the bytes that it has sent each rank, bytes_to[ranks], of
 * which the sum over all ranks is bytes_sent of the statistics; NULL: nobody wants to know. While a run is under way
 * they are as of the last step, of other ranks as of the step before that. `size` as above. CPA_INVALID on other ranks,
 * or if there is no such rank. */
CPA_API cpa_status cpa_engine_get_rank_stats(const cpa_engine *engine, int32_t rank, cpa_rank_stats *out, size_t size,
                                             int64_t *bytes_to);

/* Hands the spans that options.timeline_spans kept, of all ranks, to on_span on rank 0, in no order. Collective. */
CPA_API cpa_status cpa_engine_timeline(cpa_engine *engine, cpa_span_fn on_span, void *ctx);

/* Bytes that each rank has sent each other since the engine was created: on rank 0 bytes[ranks, ranks], row-major by
 * sender, of which the sum is bytes_sent of the statistics; elsewhere `bytes` is not written and may be NULL.
 * Collective, while no run is under way. */
CPA_API cpa_status cpa_engine_bytes_between(cpa_engine *engine, int64_t *bytes);

/* What joins two ranks: what their devices and hosts have between them. Which of it MPI and NCCL use is their choice, and
 * that of whoever sets their variables. */
typedef enum cpa_link_kind {
    CPA_LINK_UNKNOWN = 0,   /* nothing was found out; a rank with itself */
    CPA_LINK_SAME_DEVICE,   /* both ranks use one GPU */
    CPA_LINK_NVLINK,        /* NVLink between the GPUs of one host, direct or by switches */
    CPA_LINK_PCIE,          /* GPUs of one host without NVLink that reach each other's memory */
    CPA_LINK_PEER_ACCESS,   /* GPUs of one host that reach each other's memory; over what is not known without NVML */
    CPA_LINK_HOST_MEMORY,   /* GPUs of one host that do not: what travels passes through memory of the host */
    CPA_LINK_SHARED_MEMORY, /* one host, which has memory that both can map */
    CPA_LINK_LOOPBACK,      /* one host, on which messages go over TCP, as those of a store do */
    CPA_LINK_SOCKETS,       /* two hosts of which one has no RDMA device, or messages go over TCP */
    CPA_LINK_RDMA           /* two hosts that both have RDMA devices */
} cpa_link_kind;

/* "NVLink", "shared memory", "sockets" and so on. Thread-safe. */
CPA_API const char *cpa_link_kind_name(cpa_link_kind kind);

typedef struct cpa_link {
    cpa_link_kind kind;
    int32_t nvlinks; /* of NVLink, that are up; 0: not known, or of another kind */
    /* Bytes/s that each of the two sends to the other, both at once, while other pairs do the same, as measured at start-up
     * by the engine's transport; 0: not measured, as where pairs are many and slow. */
    double bandwidth;
    int32_t reserved[4]; /* zero */
} cpa_link;

/* What joins each two ranks: links[ranks, ranks], with links[a, b] = links[b, a]; the same on every rank. Not
 * collective. CPA_INVALID without an engine or `links`. */
CPA_API cpa_status cpa_engine_links(const cpa_engine *engine, cpa_link *links);

/* What carries tensors between ranks: "nccl", "peer" or, of CPA_TRANSPORT_HOST, the name of the communicator, such as
 * "mpi" or "tcp". Lives as long as the engine. */
CPA_API const char *cpa_engine_transport(const cpa_engine *engine);

/* One line naming the device of this rank. Owned by the engine. */
CPA_API const char *cpa_engine_device(const cpa_engine *engine);

/* Seconds that one rank's share of a causal prefill of `tokens` tokens takes by the measured rates; for sizing a run.
 */
CPA_API double cpa_engine_estimate(const cpa_engine *engine, int64_t tokens);

/* The message of the last call of this thread that failed on this engine, or else of the last run or the like, unless
 * one is under way; empty if none did. Valid until the next call of this thread. */
CPA_API const char *cpa_engine_error(const cpa_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
