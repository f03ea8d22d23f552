/* Which algorithm a chunk uses: pass-KV or pass-Q.
 *
 * For T new and P cached tokens of a sequence, C FLOP/s and W bytes/s a rank, e bytes an element (Yang et al.,
 * arXiv:2411.01783, with the return of partial states in the second term):
 *     pass-KV  if  T >= N*C*Hkv*e / (2*Hq*W)              (its exchange hides under the attention)
 *              or  T/(T+P) >= 2*Hkv/Hq - 4*T*W/(N*C*e)    (it moves fewer bytes)
 *     pass-Q   otherwise, and always for decode.
 * Where chunks of about T new tokens over a long cached context have been timed by both, the faster one is taken.
 * A forced algorithm holds for every chunk, decode too, so that users can compare. One rank exchanges nothing: pass-KV,
 * whose first round is the whole work. */
#ifndef CPA_PLANNER_H
#define CPA_PLANNER_H

#include <stdint.h>

#include <cpattn/context.h>

/* Seconds of a layer of a chunk: first_s over the least of what is cached, and each_s more for each token beyond. */
typedef struct cpa_planner_line {
    double first_s, each_s;
} cpa_planner_line;

/* What chunks of so many new tokens have taken by each algorithm. */
typedef struct cpa_planner_probe {
    int64_t new_tokens;
    cpa_planner_line pass_kv, pass_q;
} cpa_planner_probe;

enum {
    CPA_PLANNER_PROBES = 5,
    CPA_PLANNER_PROBE_CACHED = 16384 /* tokens: the least that is cached where probes decide */
};

typedef struct cpa_planner {
    cpa_algorithm forced; /* CPA_AUTO: choose */
    int32_t cp_size;
    cpa_attention_shape shape;
    cpa_dtype state_dtype;   /* dtype of O of states that travel */
    double flops;            /* C, FLOP/s, measured */
    double bandwidth;        /* W, bytes/s, measured */
    double memory_bandwidth; /* R, bytes/s at which a rank reads its cache, measured */
    double exchange_s; /* x, s that a layer of a decode step takes longer when it exchanges, measured; 0: unknown */
    cpa_planner_probe probes[CPA_PLANNER_PROBES]; /* ascending */
    int32_t n_probes;                             /* 0: nothing was timed */
} cpa_planner;

typedef enum cpa_planner_reason {
    CPA_REASON_FORCED = 0, /* --algorithm */
    CPA_REASON_LOCAL,      /* one rank: nothing to exchange */
    CPA_REASON_DECODE,
    CPA_REASON_OVERLAP,  /* T reaches the first threshold */
    CPA_REASON_BYTES,    /* the share of new tokens reaches the second */
    CPA_REASON_MEASURED, /* the faster of both, as they were timed */
    CPA_REASON_PREFIX,   /* neither: few new tokens meet a long cached prefix */
    CPA_REASON_COUNT
} cpa_planner_reason;

typedef struct cpa_planner_choice {
    cpa_algorithm algorithm;
    cpa_planner_reason reason;
} cpa_planner_choice;

cpa_planner_choice cpa_planner_choose(const cpa_planner *planner, int64_t new_tokens, int64_t cached_tokens,
                                      int decode);

/* The new-token count from which pass-KV hides its exchange (the first threshold). */
double cpa_planner_overlap_tokens(const cpa_planner *planner);

/* Predicted seconds of one layer of a chunk: what was timed, else for pass-KV the longer of attention and exchange, for
 * pass-Q their sum, since its exchanges cannot overlap. */
double cpa_planner_predict(const cpa_planner *planner, cpa_algorithm algorithm, int64_t new_tokens,
                           int64_t cached_tokens);

/* Predicted seconds of the attention of one layer to one token of decode. Its exchange is not in it: a layer of a step
 * has one for all its sequences, exchange_s where that was measured. */
double cpa_planner_predict_decode(const cpa_planner *planner, int64_t cached_tokens);

/* A longer sequence is never preferred on one rank: an exchange takes less time than reading so many tokens. */
enum { CPA_PLANNER_LOCAL_TOKENS = 32768 };

/* The longest sequence that may be preferred on one rank; 0 if there is one only, where x is not known, and where an
 * algorithm is forced, as users compare algorithms by their exchanges. */
int64_t cpa_planner_local_tokens(const cpa_planner *planner);

/* Whether a sequence of at most that length is sooner done on one rank, where `found_local` tokens of its prompt are
 * cached already, than sharded over all, where `found_sharded` are, while so many others run or soon will. See
 * planner.c.
 */
int cpa_planner_prefers_local(const cpa_planner *planner, int64_t prompt_tokens, int64_t output_tokens,
                              int64_t found_local, int64_t found_sharded, int64_t running);

/* The planner for sequences that lie on one rank. */
cpa_planner cpa_planner_on_rank(const cpa_planner *planner);

/* A short phrase for a report; never NULL. */
const char *cpa_planner_reason_name(cpa_planner_reason reason);

#endif
