/* A scheduler whose requests have texts: `common` tokens of one that all have, then tokens of their own. */
#ifndef CPA_TEST_SCHEDULER_FIXTURE_H
#define CPA_TEST_SCHEDULER_FIXTURE_H

#include <string.h>

#include "src/scheduler.h"
#include "tests/unit.h"

typedef struct fixture {
    cpa_scheduler_options options;
    cpa_scheduler *scheduler;
    cpa_step_plan plan;
    double next;
    int64_t common[64]; /* of each request */
    cpa_scheduler_stats stats;
} fixture;

static inline uint32_t token_at(void *ctx, uint64_t request, int64_t position) {
    const fixture *f = ctx;
    return (uint32_t)position + (position < f->common[request] ? 0 : 1000 * (uint32_t)(request + 1));
}

/* With the prefix cache, and what else the options say; they may be changed until begin. */
static inline void prepare(fixture *f, const cpa_scheduler_options *options) {
    memset(f, 0, sizeof *f);
    f->options = *options;
    f->options.token_at = token_at;
    f->options.token_ctx = f;
    f->options.prefix_caching = 1;
    cpa_step_plan_init(&f->plan);
}

static inline void begin(fixture *f) {
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_create(&f->options, &f->scheduler, NULL), CPA_OK);
}

static inline void teardown(fixture *f) {
    cpa_scheduler_destroy(f->scheduler);
    cpa_step_plan_destroy(&f->plan);
}

static inline cpa_scheduler_request asked(uint64_t id, int64_t prompt, int64_t output) {
    return (cpa_scheduler_request){.id = id, .prompt_tokens = prompt, .output_tokens = output};
}

static inline void add(fixture *f, cpa_scheduler_request request, int64_t common) {
    f->common[request.id] = common;
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_add(f->scheduler, &request, NULL), CPA_OK);
}

/* Returns the number of chunks. */
static inline int64_t step(fixture *f, double now) {
    CU_ASSERT_EQUAL_FATAL(cpa_scheduler_plan(f->scheduler, now, &f->plan, &f->next, NULL), CPA_OK);
    cpa_scheduler_get_stats(f->scheduler, &f->stats);
    return f->plan.n_chunks;
}

#endif
