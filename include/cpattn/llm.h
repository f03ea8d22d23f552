/* Text by the model of a Hugging Face folder: its weights, tokenizer and chat template behind an engine
 * (cpattn/engine.h), which a thread of this library runs. libcpattn_llm, beside libcpattn: it stands on jansson, PCRE2,
 * libunistring and sentencepiece, too, and on no MPI.
 *
 *     cpa_llm_open     loads the folder, and begins to serve
 *     cpa_llm_submit   a prompt of text, of token ids, or of a chat; cpa_llm_submit_samples: several answers to it
 *     cpa_llm_next     what has come of one request since the last call; waits for it
 *     cpa_llm_wait     a request of which something has come, for who reads many by one thread
 *     cpa_llm_cancel, cpa_llm_release
 *     cpa_llm_stop, cpa_llm_close
 *
 * Threads: cpa_llm_submit, _submit_samples, _wait, _cancel, _stop and _get_info may be called by any threads at once; cpa_llm_next and
 * _release of one request by one thread at a time, those of different requests at once. */
#ifndef CPATTN_LLM_H
#define CPATTN_LLM_H

#include <cpattn/engine.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cpa_llm cpa_llm;

/* One request, from its submission until its owner releases it. */
typedef struct cpa_llm_request cpa_llm_request;

typedef struct cpa_llm_options {
    size_t size;
    /* The engine; NULL: all defaults. Set here, whatever it says, are model, network, outputs_given and the callbacks
     * of tokens. With device.size 0 it is a CUDA device, the first one, where there is one, or the host. device.threads
     * 0: one for each processor that the process may use, of which ranks have equal parts. num_blocks 0: what memory
     * holds and can be of use. A block_store whose model is NULL knows the model by its config and samples of its
     * weights, as that of cp_attn's --block-store does. Copied. */
    const cpa_engine_options *engine;
    /* NULL: one rank. Else all of its ranks open the folder, with equal options; rank 0 takes requests, and the others
     * serve until it closes. Not one over MPI, which wants to be used by MPI's main thread. It must outlive the llm,
     * whose thread uses it meanwhile. */
    cpa_comm *comm;
    int64_t
        max_model_len; /* most tokens of a prompt and its answer; 0: what the model is made for and the cache holds */
    /* The dtype that is computed in, and that of the cache. 0: on a device that of the weights, on the host fp32; and
     * the same for the cache. */
    int32_t has_dtype, has_kv_dtype;
    cpa_dtype dtype, kv_dtype;
    /* The name of a family of chat templates ("chatml", "llama3", ...), or a file with one; NULL: the folder's own. */
    const char *chat_template;
    /* With num_blocks 0 on a device: the share of its free memory that weights and cache take together; 0 = 0.9. On the
     * host the cache takes at most half of what is left. */
    double gpu_memory_utilization;
} cpa_llm_options;

/* Opens the folder, as `cp_attn serve --model-dir` does: config.json, safetensors, and what there is of tokenizer and
 * chat template. Runs the engine's self-test and measurements, which takes seconds. Collective over options->comm;
 * fails on all ranks alike, but for a fault that one rank meets alone while the engine is created: the others wait for
 * it then until it says so (cpa_comm_abort) or ends. CPA_IO, CPA_INVALID and CPA_UNSUPPORTED name the file and the key.
 * `options` may be NULL; *out is set only on success. */
CPA_API cpa_status cpa_llm_open(const char *folder, const cpa_llm_options *options, cpa_llm **out, cpa_error *err);

/* From now on nothing is taken (CPA_STOPPED), and what is unfinished is cancelled, as its readers hear. Does not
 * wait. */
CPA_API void cpa_llm_stop(cpa_llm *llm);

/* Stops, and frees all of it, with every request that is not released yet; no other call may be under way. On ranks
 * other than 0 it waits until rank 0 has closed. NULL does nothing. */
CPA_API void cpa_llm_close(cpa_llm *llm);

typedef struct cpa_llm_info {
    int64_t max_model_len; /* most tokens of a prompt and its answer */
    int64_t vocabulary;    /* token ids are below it */
    int64_t num_blocks;    /* blocks of one rank */
    int32_t has_text;      /* there is a tokenizer: prompts and answers may be text */
    int32_t has_chat;      /* there is a chat template, too */
} cpa_llm_info;
/* `size` is that of *out, sizeof *out. */
CPA_API cpa_status cpa_llm_get_info(const cpa_llm *llm, cpa_llm_info *out, size_t size);

/* The engine, for cpa_engine_get_stats and cpa_engine_device, as long as the llm; nothing else of it may be called. */
CPA_API const cpa_engine *cpa_llm_engine(const cpa_llm *llm);

/* A prompt is one of ids, text and messages. Everything is copied. */
typedef struct cpa_llm_prompt {
    size_t size;
    const uint32_t *ids; /* [n_ids] */
    int64_t n_ids;
    const char *text; /* [text_bytes] UTF-8; the tokenizer puts around it what it puts around texts */
    int64_t text_bytes;
    /* JSON: an array of messages as in OpenAI's chats, which the chat template makes text of: objects with "role",
     * "content" and whatever else the template knows. */
    const char *messages;
    /* For the template; without messages CPA_INVALID. */
    const char *tools;           /* JSON: an array of objects; NULL: none */
    const char *template_kwargs; /* JSON: an object of names that the template knows, and their values; NULL: none */
    int32_t continues_last;      /* the answer goes on where the last message ends */
} cpa_llm_prompt;

typedef struct cpa_llm_request_options {
    size_t size;
    int64_t max_tokens;           /* most tokens of the answer; 0: what max_model_len leaves */
    const cpa_sampling *sampling; /* NULL = zeros: the most probable tokens */
    /* [n_stops] texts that end the answer where they begin, not within the first min_tokens of its tokens, each of 1
     * byte or more. They are looked for as the answer is read, and cancel the rest of it. */
    const char *const *stops;
    int32_t n_stops;
    int32_t keeps_stop;    /* the text, or the token, that ends the answer is part of its text */
    int32_t keeps_special; /* special tokens are part of the text */
    int32_t priority;      /* as in cpa_request, like those that follow */
    double deadline_s;
    const char *salt, *tenant;
    /* What the answer is bound to, whatever the sampling, as JSON of an object with one key; NULL: nothing.
     *
     *     {"json_schema": SCHEMA}          a value that is valid by a JSON schema
     *     {"json_object": true}            any object
     *     {"regex": EXPRESSION}            a text that a regular expression takes whole
     *     {"choice": [TEXT, ...]}          one of these texts
     *     {"text": TEXT}                   this text
     *     {"token": TEXT}                  the special token of this text; the text, if there is no such token
     *     {"sequence": [CONSTRAINT, ...]}  one after the other
     *     {"any_of": [CONSTRAINT, ...]}    one of them
     *     {"repeat": CONSTRAINT, "separator": CONSTRAINT}   once or more; without "separator" nothing is in between
     *
     * Takes a tokenizer, and a token of the model that ends answers: the answer ends where it must, and may where it is
     * whole; max_tokens ends it earlier. Grammars are made within the call, half a second at most, and kept for those
     * that follow. Log-probabilities are those of all tokens. */
    const char *constraint;
    uint32_t transfer; /* as in cpa_request: bits of cpa_transfer, of an engine with a block_store */
} cpa_llm_request_options;

/* Submits a request. `options` may be NULL. CPA_INVALID with a line that says what of the prompt or the options is
 * wrong; CPA_UNSUPPORTED for text without a tokenizer, messages without a template, and constraints that cannot be held
 * to; CPA_BUSY if the engine's queue is full, or grammars take too much memory; CPA_STOPPED after cpa_llm_stop, and on another rank than 0; where the engine has failed, its status and
 * line. Templates of Jinja are rendered within the call, by another process. *out, set only on success, is to be
 * released. */
CPA_API cpa_status cpa_llm_submit(cpa_llm *llm, const cpa_llm_prompt *prompt, const cpa_llm_request_options *options,
                                  cpa_llm_request **out, cpa_error *err);

/* Submits n requests, 1 or more, for as many answers to one prompt, which is computed once: answer i has the seed of the
 * sampling plus i, and the first alone prompt_logprobs. out [n] is set only on success; each is to be released. Errors are
 * those of cpa_llm_submit: all are taken, or none. */
CPA_API cpa_status cpa_llm_submit_samples(cpa_llm *llm, const cpa_llm_prompt *prompt,
                                          const cpa_llm_request_options *options, int32_t n, cpa_llm_request **out,
                                          cpa_error *err);

/* The ids of a request's prompt, *n of them; they live as long as the request. */
CPA_API const uint32_t *cpa_llm_prompt_ids(const cpa_llm_request *request, int64_t *n);

/* What has come of a request since it was last asked for, valid until the next call with the request. */
typedef struct cpa_llm_piece {
    const uint32_t *tokens;       /* [n_tokens] */
    const float *logprobs;        /* [n_tokens] where the sampling asks for them; NULL */
    const cpa_token_ranks *ranks; /* [n_tokens] where the sampling asks for top_logprobs; NULL */
    int64_t n_tokens;
    const char *text; /* [text_bytes] whole characters in UTF-8, and a zero behind them; "" without a tokenizer */
    int64_t text_bytes;
    int32_t has_ended; /* nothing more comes */
    /* Why: CPA_FINISH_STOP also for one of the texts in `stops`, CPA_FINISH_CANCELLED for cpa_llm_cancel and _stop. */
    cpa_finish_reason reason;
    const char *stop;  /* the text that ended it, of `stops`; NULL */
    const char *error; /* with CPA_FINISH_FAILED: the line; else "" */
} cpa_llm_piece;

/* What the network says of the prompt's tokens [first, first + count), the first token of all having nothing before it:
 * their log-probabilities and ranks, and the most probable tokens, where the sampling asks for prompt_logprobs. Known from
 * the first piece with tokens on, until the request is released. CPA_INVALID for tokens that are not among [1, tokens of
 * the prompt), CPA_UNSUPPORTED where nobody has asked, CPA_BUSY before they are known, or if the request has ended
 * before. As cpa_llm_next, by one thread at a time. */
CPA_API cpa_status cpa_llm_prompt_ranks(const cpa_llm_request *request, int64_t first, int64_t count,
                                        cpa_token_ranks *out, cpa_error *err);

/* Waits until something has come, or the request has ended, for timeout_s at most (negative: without end), and takes
 * it: pieces together are the answer. After the end it returns pieces without tokens. CPA_BUSY if nothing came in time;
 * CPA_NO_MEMORY. `size` is that of *out, sizeof *out. */
CPA_API cpa_status cpa_llm_next(cpa_llm_request *request, double timeout_s, cpa_llm_piece *out, size_t size,
                                cpa_error *err);

/* Waits for a request of which something has come that cpa_llm_next has not taken, for timeout_s at most (negative:
 * without end): those come in turn, each once for what has come of it. For requests that no other thread reads or
 * releases meanwhile. CPA_BUSY if there is none in time, CPA_STOPPED if there is none and cpa_llm_stop was called. */
CPA_API cpa_status cpa_llm_wait(cpa_llm *llm, double timeout_s, cpa_llm_request **out, cpa_error *err);

/* Ends a request, which gives its blocks back within two steps; cpa_llm_next tells the end. Any thread, while the
 * request is not released. */
CPA_API void cpa_llm_cancel(cpa_llm_request *request);

/* Frees a request, and cancels it if it has not ended. NULL does nothing. */
CPA_API void cpa_llm_release(cpa_llm_request *request);

#ifdef __cplusplus
}
#endif
#endif
