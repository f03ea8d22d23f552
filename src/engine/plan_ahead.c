#include "src/engine/plan_ahead.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "src/schedule/evicted_units.h"
#include "src/schedule/scheduler_transfer.h"
#include "src/schedule/step_plan_wire.h"

/* How long a waiting thread sleeps before it looks at the stop flag again. */
static const double POLL_SECONDS = 0.05;
/* How long one call of cpa_plan_ahead_take waits. */
static const double TAKE_SECONDS = 0.25;

/* What got less than its plan said. */
typedef enum damage_kind { SWAP_IN, IMPORT, LOAD, STORES } damage_kind;
typedef struct damage {
    damage_kind kind;
    cpa_block_move move; /* of a swap_in */
    cpa_disk_move load;
    uint64_t request; /* that imports */
    int64_t imported; /* tokens of it that have come */
} damage;

typedef struct encoded_plan {
    uint8_t *buffer;
    int64_t capacity;
    int64_t bytes;
    double begin, seconds; /* when making the plan began, and how long it took */
} encoded_plan;

struct cpa_plan_ahead {
    cpa_scheduler *scheduler;
    cpa_inbox *inbox;
    cpa_run_mode mode;
    double start;
    atomic_int *stop;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    encoded_plan encoded[2]; /* plans in their wire form: the taker reads one while the thread writes the other */
    double plan_begin;       /* when the thread began to make the plan at hand */
    int write;               /* index of the encoded plan that the thread writes */
    int taken;               /* index of the encoded plan that was taken last */
    int ready;               /* not 0: the encoded plan that is not `write` waits to be taken */
    int going_on;            /* not 0: the thread may make the next plan */
    int awaited;             /* not 0: the taker waits, all steps before are done, and what they told is known */
    int ending;
    damage *damaged; /* what to tell the scheduler of before it plans again */
    int64_t n_damaged, damaged_capacity;
    cpa_scheduler_stats stats; /* the scheduler's statistics as of the last plan */
    cpa_status status;
    cpa_error error;
};

/* A flag that the other thread sets. */
static int read_flag(cpa_plan_ahead *ahead, const int *flag) {
    pthread_mutex_lock(&ahead->mutex);
    int is_set = *flag;
    pthread_mutex_unlock(&ahead->mutex);
    return is_set;
}

/* Sleeps until that moment, or until something comes into the inbox; 0: the thread is to end. */
static int wait_for_work(cpa_plan_ahead *ahead, double until) {
    for (;;) {
        double left = ahead->start + until - cpa_clock_now();
        if (left <= 0 || atomic_load(ahead->stop)) return 1;
        if (cpa_inbox_wait(ahead->inbox, fmin(left, POLL_SECONDS))) return 1;
        if (read_flag(ahead, &ahead->ending)) return 0;
    }
}

static cpa_status tell_of(cpa_scheduler *scheduler, const damage *d, cpa_error *err) {
    switch (d->kind) {
        case SWAP_IN:
            if (cpa_evicted_fetch_failed(scheduler, &d->move)) return CPA_OK;
            return cpa_scheduler_swap_failed(scheduler, d->move.request, err);
        case IMPORT: return cpa_scheduler_import_failed(scheduler, d->request, d->imported, err);
        case LOAD: cpa_evicted_load_failed(scheduler, &d->load); break;
        case STORES: cpa_evicted_stop_stores(scheduler); break;
    }
    return CPA_OK;
}

static cpa_status pass_damage_on(cpa_plan_ahead *ahead, cpa_error *err) {
    cpa_status status = CPA_OK;
    pthread_mutex_lock(&ahead->mutex);
    for (; ahead->n_damaged > 0 && status == CPA_OK; ahead->n_damaged--) {
        status = tell_of(ahead->scheduler, &ahead->damaged[ahead->n_damaged - 1], err);
        if (status == CPA_INVALID) status = CPA_OK; /* the request has been ended meanwhile */
    }
    pthread_mutex_unlock(&ahead->mutex);
    return status;
}

/* Whether the ranks have something to do in this plan. */
static int has_entries(const cpa_step_plan *plan) {
    return plan->n_chunks + plan->n_releases + plan->n_swap_outs + plan->n_swap_ins + plan->n_loads + plan->n_nulled +
               plan->n_discards + plan->n_transfers >
           0;
}

static cpa_status plan_stop(cpa_step_plan *plan) {
    cpa_step_plan_clear(plan);
    plan->flags = CPA_PLAN_STOP;
    return CPA_OK;
}

/* Plans the next step that has work; waits for it. */
static cpa_status plan_next(cpa_plan_ahead *ahead, cpa_step_plan *plan, cpa_error *err) {
    for (;;) {
        double next_arrival;
        int to_tell;
        ahead->plan_begin = cpa_clock_now();
        if (atomic_load(ahead->stop)) return plan_stop(plan);
        double now = cpa_clock_now() - ahead->start;
        CPA_TRY(pass_damage_on(ahead, err));
        CPA_TRY(cpa_inbox_pass_on(ahead->inbox, ahead->scheduler, now, &to_tell, err));
        CPA_TRY(cpa_scheduler_plan(ahead->scheduler, now, plan, &next_arrival, err));
        if (plan->n_chunks > 0) return CPA_OK;
        const int all_told = !to_tell && read_flag(ahead, &ahead->awaited);
        if (!isfinite(next_arrival) && cpa_inbox_close(ahead->inbox, ahead->mode, all_told)) {
            plan->flags |= CPA_PLAN_STOP;
            cpa_evicted_save(ahead->scheduler, plan);
            return CPA_OK;
        }
        /* Where blocks are on their way the plans that follow count, with or without entries. */
        if (has_entries(plan) || next_arrival <= now || to_tell || ahead->mode == CPA_RUN_STEPS) return CPA_OK;
        if (!wait_for_work(ahead, fmin(next_arrival, cpa_inbox_next_deadline(ahead->inbox)))) return CPA_STOPPED;
    }
}

static void *plan_steps(void *ctx) {
    cpa_plan_ahead *ahead = ctx;
    cpa_step_plan plan;
    cpa_step_plan_init(&plan);
    for (int last = 0; !last;) {
        encoded_plan *encoded = &ahead->encoded[ahead->write];
        cpa_error error = {CPA_OK, ""};
        cpa_status status = plan_next(ahead, &plan, &error);
        if (status == CPA_OK)
            status = cpa_step_plan_encode(&plan, &encoded->buffer, &encoded->capacity, &encoded->bytes, &error);
        encoded->begin = ahead->plan_begin;
        encoded->seconds = cpa_clock_now() - ahead->plan_begin;
        last = status != CPA_OK || plan.flags & CPA_PLAN_STOP;
        pthread_mutex_lock(&ahead->mutex);
        cpa_scheduler_get_stats(ahead->scheduler, &ahead->stats);
        ahead->status = status;
        ahead->error = error;
        ahead->write ^= 1;
        ahead->ready = 1;
        ahead->going_on = 0;
        pthread_cond_broadcast(&ahead->changed);
        /* Once this plan begins to execute, the one before it is no longer read, and its bytes may be written over. */
        while (!ahead->going_on && !ahead->ending) pthread_cond_wait(&ahead->changed, &ahead->mutex);
        last |= ahead->ending;
        pthread_mutex_unlock(&ahead->mutex);
    }
    cpa_step_plan_destroy(&plan);
    return NULL;
}

cpa_status cpa_plan_ahead_begin(cpa_scheduler *scheduler, cpa_inbox *inbox, cpa_run_mode mode, double start,
                                atomic_int *stop, cpa_plan_ahead **out, cpa_error *err) {
    cpa_plan_ahead *ahead = calloc(1, sizeof *ahead);
    if (!ahead) return cpa_fail(err, CPA_NO_MEMORY, "planning: no memory");
    ahead->scheduler = scheduler;
    ahead->inbox = inbox;
    ahead->mode = mode;
    ahead->start = start;
    ahead->stop = stop;
    pthread_mutex_init(&ahead->mutex, NULL);
    pthread_cond_init(&ahead->changed, NULL);
    int code = pthread_create(&ahead->thread, NULL, plan_steps, ahead);
    if (code != 0) {
        pthread_cond_destroy(&ahead->changed);
        pthread_mutex_destroy(&ahead->mutex);
        free(ahead);
        return cpa_fail(err, CPA_NO_MEMORY, "planning: no thread could be started (error %d)", code);
    }
    *out = ahead;
    return CPA_OK;
}

cpa_status cpa_plan_ahead_take(cpa_plan_ahead *ahead, int wait, const uint8_t **bytes, int64_t *n_bytes,
                               cpa_error *err) {
    cpa_status status = CPA_OK;
    const struct timespec until = cpa_clock_after(TAKE_SECONDS);
    *bytes = NULL;
    pthread_mutex_lock(&ahead->mutex);
    if (wait && !ahead->ready && !ahead->awaited) {
        ahead->awaited = 1;
        pthread_mutex_unlock(&ahead->mutex);
        cpa_inbox_wake(ahead->inbox);
        pthread_mutex_lock(&ahead->mutex);
    }
    for (int timed_out = 0; !ahead->ready && wait && !timed_out;)
        timed_out = pthread_cond_clockwait(&ahead->changed, &ahead->mutex, CLOCK_MONOTONIC, &until) != 0;
    if (!ahead->ready) goto done;
    status = ahead->status;
    if (status == CPA_OK) {
        const encoded_plan *encoded = &ahead->encoded[ahead->write ^ 1];
        ahead->taken = ahead->write ^ 1;
        *bytes = encoded->buffer;
        *n_bytes = encoded->bytes;
    } else if (err) {
        *err = ahead->error;
    }
    ahead->ready = ahead->awaited = 0;
done:
    pthread_mutex_unlock(&ahead->mutex);
    return status;
}

void cpa_plan_ahead_go_on(cpa_plan_ahead *ahead) {
    pthread_mutex_lock(&ahead->mutex);
    ahead->going_on = 1;
    pthread_cond_broadcast(&ahead->changed);
    pthread_mutex_unlock(&ahead->mutex);
}

static cpa_status report(cpa_plan_ahead *ahead, damage found, cpa_error *err) {
    cpa_status status = CPA_OK;
    pthread_mutex_lock(&ahead->mutex);
    if (!cpa_array_reserve(&ahead->damaged, &ahead->damaged_capacity, ahead->n_damaged + 1, sizeof *ahead->damaged))
        status = cpa_fail(err, CPA_NO_MEMORY, "planning: no memory to report damage");
    if (status == CPA_OK) ahead->damaged[ahead->n_damaged++] = found;
    pthread_mutex_unlock(&ahead->mutex);
    return status;
}

cpa_status cpa_plan_ahead_report_damage(cpa_plan_ahead *ahead, const cpa_block_move *move, cpa_error *err) {
    return report(ahead, (damage){.kind = SWAP_IN, .move = *move}, err);
}

cpa_status cpa_plan_ahead_report_import(cpa_plan_ahead *ahead, uint64_t request, int64_t tokens, cpa_error *err) {
    return report(ahead, (damage){.kind = IMPORT, .request = request, .imported = tokens}, err);
}

cpa_status cpa_plan_ahead_report_load(cpa_plan_ahead *ahead, const cpa_disk_move *load, cpa_error *err) {
    return report(ahead, (damage){.kind = LOAD, .load = *load}, err);
}

cpa_status cpa_plan_ahead_report_full(cpa_plan_ahead *ahead, cpa_error *err) {
    return report(ahead, (damage){.kind = STORES}, err);
}

void cpa_plan_ahead_times(const cpa_plan_ahead *ahead, double *begin, double *seconds) {
    /* The plan that was taken stays as it is until the second call of cpa_plan_ahead_go_on after. */
    const encoded_plan *encoded = &ahead->encoded[ahead->taken];
    *begin = encoded->begin;
    *seconds = encoded->seconds;
}

void cpa_plan_ahead_stats(cpa_plan_ahead *ahead, cpa_scheduler_stats *out) {
    pthread_mutex_lock(&ahead->mutex);
    *out = ahead->stats;
    pthread_mutex_unlock(&ahead->mutex);
}

void cpa_plan_ahead_end(cpa_plan_ahead *ahead) {
    if (!ahead) return;
    pthread_mutex_lock(&ahead->mutex);
    ahead->ending = 1;
    pthread_cond_broadcast(&ahead->changed);
    pthread_mutex_unlock(&ahead->mutex);
    cpa_inbox_wake(ahead->inbox);
    pthread_join(ahead->thread, NULL);
    (void)pass_damage_on(ahead, NULL); /* what the last step found, for a run that goes on */
    pthread_cond_destroy(&ahead->changed);
    pthread_mutex_destroy(&ahead->mutex);
    free(ahead->damaged);
    free(ahead->encoded[0].buffer);
    free(ahead->encoded[1].buffer);
    free(ahead);
}
