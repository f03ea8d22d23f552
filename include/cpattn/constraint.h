/* What the answer to a request may be: a mask over the vocabulary for each of its tokens, which follows from the tokens
 * before. A token that a mask leaves out is not drawn, greedily or at random: its logit counts as -infinity, behind
 * penalties and before temperature, top_k, top_p and min_p, which see what is left. Log-probabilities are those of the
 * logits as the network gives them, of all tokens. */
#ifndef CPATTN_CONSTRAINT_H
#define CPATTN_CONSTRAINT_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Called on rank 0, by the thread that runs the engine (that of cpa_engine_destroy for what is left then): one call at a
 * time, and none of the engine's functions may be called from within. It is called while a step is computed and holds
 * up the end of that step, of all requests in it. A call that does not return CPA_OK, with its line in *err, ends the
 * request as failed, by that line, and no other. */
typedef struct cpa_constraint_ops {
    size_t size;
    /* The answer goes on by a token. Each comes once and in order, from the first output token on, however often the
     * engine computes it; that which ends the request does not come. */
    cpa_status (*accept)(void *ctx, uint32_t token, cpa_error *err);
    /* Sets the bits of the tokens that may come next: token i is bit i % 32 of words[i / 32]. There are (vocabulary +
     * 31) / 32 words (cpa_model.vocabulary), which come as zeros; bits behind the vocabulary count nothing. A mask of
     * none ends the request as failed. An answer can end by a token of the network's end_ids, or of the request's
     * stop_ids, where the mask lets it. */
    cpa_status (*mask)(void *ctx, uint32_t *words, cpa_error *err);
    /* Stands for the mask: where two constraints of an engine, or one at two times, have the same key, they have the
     * same mask, which is then not asked for again. 0, or key NULL: it is asked for each time. */
    uint64_t (*key)(void *ctx);
    /* The request has ended, for whatever reason, and that has been told; or the engine is destroyed. Once, and the last
     * call. May be NULL. */
    void (*close)(void *ctx);
} cpa_constraint_ops;

#ifdef __cplusplus
}
#endif
#endif
