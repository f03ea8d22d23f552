/* The answer to one request, as it streams in: when output came, how many tokens, and whether it is whole. */
#ifndef CPA_BENCH_SERVE_STREAM_ANSWER_H
#define CPA_BENCH_SERVE_STREAM_ANSWER_H

#include "bench/serve/events.h"

/* Zeros, and is_chat, to begin with. */
typedef struct cpa_stream_answer {
    bool is_chat; /* answers /v1/chat/completions */
    cpa_event_reader events;
    double now; /* when the bytes that are being read came */

    double *token_s; /* when each piece of output came */
    int64_t n_times, times_capacity;
    int64_t ids;               /* tokens whose ids came */
    int64_t prompt_tokens;     /* as the server counts them; 0: it has not said */
    int64_t completion_tokens; /* as the server counts them; 0: it has not said */
    bool has_finished;         /* a finish_reason has come */
    bool is_done;              /* [DONE] has come */
    char error[160];           /* empty: none so far */
} cpa_stream_answer;

/* Reads on in the body of an answer of status 200; `now` is when the bytes came. False once there is an error. */
bool cpa_stream_answer_feed(cpa_stream_answer *answer, const char *bytes, size_t count, double now);

/* The answer ends here: sets the error of one that is not whole. */
void cpa_stream_answer_end(cpa_stream_answer *answer);

/* Output tokens: as the server says, else those whose ids came, else the pieces. */
int64_t cpa_stream_answer_tokens(const cpa_stream_answer *answer);

/* What an error of OpenAI's interface says, {"error": {"message": ...}} and the like, as one line in `out`; the
 * beginning of `body` if it is none. */
void cpa_answer_refusal(const char *body, size_t bytes, char *out, size_t out_bytes);

void cpa_stream_answer_release(cpa_stream_answer *answer);

#endif
