/* What else moves while one thing is computed or waited for: the messages of a layer, the plan of the next step. Whoever
 * has something to move along adds a hook to what the thread works on, a stream, and takes it away when that is over.
 *
 * A progress belongs to one thread, which alone adds, removes and calls. The hook that was added last is called first.
 * Functions of a hook that are NULL are passed over. */
#ifndef CPA_BASE_PROGRESS_H
#define CPA_BASE_PROGRESS_H

#include <stddef.h>

#include <cpattn/device.h>

typedef struct cpa_progress cpa_progress;
typedef struct cpa_progress_hook cpa_progress_hook;

/* Owned by whoever adds it; it stays where it is until it is removed. */
struct cpa_progress_hook {
    /* Moves things along, without waiting. Called from within operations that run inside their call, at least every
     * millisecond or so, and while a device is waited for. Enqueues nothing. */
    void (*look)(void *ctx);
    /* Moves things along while a device works off what has been enqueued: unlike `look` it may take long, and enqueue
     * more. */
    void (*idle)(void *ctx);
    /* Blocks until the stream is idle, where its work waits for more than its device, such as for messages of other
     * ranks. On failure writes to stream->error; the stream is idle then, or will be. */
    cpa_status (*drain)(void *ctx, cpa_stream *stream);
    void *ctx;
    cpa_progress *of; /* the progress object whose list has this hook; NULL: none */
    cpa_progress_hook *next;
};

/* Zeros: nothing moves. */
struct cpa_progress {
    cpa_progress_hook *first;
};

/* Nothing happens where it is nowhere. */
static inline void cpa_progress_remove(cpa_progress_hook *hook) {
    if (!hook->of) return;
    cpa_progress_hook **link = &hook->of->first;
    while (*link != hook) link = &(*link)->next;
    *link = hook->next;
    hook->of = NULL;
}

/* Removes it from where it was. */
static inline void cpa_progress_add(cpa_progress *progress, cpa_progress_hook *hook) {
    cpa_progress_remove(hook);
    hook->next = progress->first;
    hook->of = progress;
    progress->first = hook;
}

/* Whether cpa_progress_look does anything. */
static inline int cpa_progress_looks(const cpa_progress *progress) {
    for (const cpa_progress_hook *hook = progress->first; hook; hook = hook->next)
        if (hook->look) return 1;
    return 0;
}

static inline void cpa_progress_look(const cpa_progress *progress) {
    for (const cpa_progress_hook *hook = progress->first; hook; hook = hook->next)
        if (hook->look) hook->look(hook->ctx);
}

static inline void cpa_progress_idle(const cpa_progress *progress) {
    for (const cpa_progress_hook *hook = progress->first; hook; hook = hook->next)
        if (hook->idle) hook->idle(hook->ctx);
}

#endif
