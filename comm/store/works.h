/* What a rank has done last in calls that others take part in, to find out who does something else than the others. */
#ifndef CPA_STORE_WORKS_H
#define CPA_STORE_WORKS_H

#include <stdint.h>

/* What a rank does in a call of a channel: a digest of it. Ranks whose digests differ do not do the same. */
typedef struct cpa_work {
    int32_t channel; /* -1: none */
    int64_t call;
    uint64_t digest;
} cpa_work;

/* The last calls, in any order: a rank that waits for less than another goes on alone for a call or two. */
enum { CPA_WORKS = 4 };
typedef struct cpa_works {
    cpa_work last[CPA_WORKS];
    int64_t next;
} cpa_works;

static inline void cpa_works_forget(cpa_works *works) {
    for (int i = 0; i < CPA_WORKS; i++) works->last[i] = (cpa_work){.channel = -1};
    works->next = 0;
}

static inline void cpa_works_add(cpa_works *works, cpa_work work) {
    works->last[works->next] = work;
    works->next = (works->next + 1) % CPA_WORKS;
}

/* Whether two ranks have not done the same in one of these calls. */
static inline int cpa_works_differ(const cpa_works *a, const cpa_works *b) {
    for (int i = 0; i < CPA_WORKS * CPA_WORKS; i++) {
        const cpa_work *left = &a->last[i / CPA_WORKS], *right = &b->last[i % CPA_WORKS];
        if (left->channel >= 0 && left->channel == right->channel && left->call == right->call &&
            left->digest != right->digest)
            return 1;
    }
    return 0;
}

#endif
