/* What moves beside the work of a stream. */
#include "base/progress.h"
#include "tests/fixtures/unit.h"

enum { HOOKS = 3 };

/* The order in which hooks were called: a digit each, the last call last. */
typedef struct calls {
    int digit;
    int *looks, *idles;
} calls;

static void look(void *ctx) {
    const calls *c = ctx;
    *c->looks = *c->looks * 10 + c->digit;
}

static void idle(void *ctx) {
    const calls *c = ctx;
    *c->idles = *c->idles * 10 + c->digit;
}

static void the_hook_that_was_added_last_is_called_first(void) {
    int looks = 0, idles = 0;
    cpa_progress progress = {NULL};
    calls of[HOOKS];
    cpa_progress_hook hooks[HOOKS];
    for (int i = 0; i < HOOKS; i++) {
        of[i] = (calls){i + 1, &looks, &idles};
        hooks[i] = (cpa_progress_hook){.look = i == 1 ? NULL : look, .idle = i == 2 ? NULL : idle, .ctx = &of[i]};
        cpa_progress_add(&progress, &hooks[i]);
    }
    cpa_progress_look(&progress);
    cpa_progress_idle(&progress);
    CU_ASSERT_EQUAL(looks, 31);
    CU_ASSERT_EQUAL(idles, 21);
    looks = 0;
    cpa_progress_add(&progress, &hooks[0]); /* again: it comes to the front */
    cpa_progress_look(&progress);
    CU_ASSERT_EQUAL(looks, 13);
}

static void a_hook_that_is_removed_is_not_called(void) {
    int looks = 0, idles = 0;
    cpa_progress progress = {NULL}, other = {NULL};
    calls of[2] = {{1, &looks, &idles}, {2, &looks, &idles}};
    cpa_progress_hook first = {.look = look, .ctx = &of[0]}, second = {.look = look, .ctx = &of[1]};
    cpa_progress_remove(&first); /* it is nowhere */
    CU_ASSERT(!cpa_progress_looks(&progress));
    cpa_progress_add(&progress, &first);
    cpa_progress_add(&progress, &second);
    cpa_progress_add(&other, &second); /* which takes it from the first */
    cpa_progress_look(&progress);
    CU_ASSERT_EQUAL(looks, 1);
    cpa_progress_remove(&first);
    CU_ASSERT(!cpa_progress_looks(&progress) && cpa_progress_looks(&other));
}

static const cpa_test tests[] = {
    {"the hook that was added last is called first", the_hook_that_was_added_last_is_called_first},
    {"a hook that is removed is not called", a_hook_that_is_removed_is_not_called},
};

CPA_TEST_MAIN("progress", tests)
