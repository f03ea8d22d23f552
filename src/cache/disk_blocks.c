#include "src/cache/disk_blocks.h"

#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "src/cache/disk_files.h"
#include "src/cache/disk_io.h"
#include "src/cache/kv_cache.h"

enum { THREADS = 4, QUEUE_BYTES = 256 << 20 /* of blocks that wait to be written */, NAME_BYTES = 128 };

static const double INDEX_SECONDS = 10; /* from one index to the next, while blocks are written */

/* A block on its way. */
typedef struct job {
    struct job *next;
    cpa_disk_entry where;
    void *to;          /* NULL: it is written, from `bytes` */
    uint64_t *failed;  /* of a load */
    uint64_t checksum; /* of a store */
    uint8_t bytes[];
} job;

/* A thread and its jobs: those of the slots whose number is its own modulo THREADS. */
typedef struct lane {
    cpa_disk_blocks *disk;
    pthread_t thread;
    cpa_disk_io io;
    pthread_cond_t more;
    job *first, *last;
} lane;

struct cpa_disk_blocks {
    char *folder_name, *identity;
    int32_t rank, n_groups;
    cpa_disk_files files;
    int64_t block_bytes[CPA_MAX_LAYER_GROUPS];
    int64_t first[CPA_MAX_LAYER_GROUPS + 1]; /* of each group the index of its first entry, and how many there are */
    cpa_disk_entry *found;                   /* [n_found] of the index that was there */
    int64_t n_found;
    double index_s;
    pthread_t index_thread;
    int has_index_thread;
    lane lanes[THREADS];
    int32_t n_lanes;

    pthread_mutex_t lock;    /* over all that follows, and the jobs */
    pthread_cond_t done;     /* something was written, or all is loaded */
    pthread_cond_t end;      /* nothing comes any more */
    cpa_disk_entry *entries; /* by slot */
    uint64_t used;
    int64_t loads, queued_bytes;
    int is_full, changed, ending;
    cpa_disk_blocks_stats stats;
};

static cpa_disk_entry *entry_of(const cpa_disk_blocks *disk, const cpa_disk_entry *where) {
    return &disk->entries[disk->first[where->group] + where->slot];
}

static void name_index(const cpa_disk_blocks *disk, char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, "rank-%" PRId32 ".index", disk->rank);
}

/* Once for all: nothing is written any more. Locked. */
static void give_up(cpa_disk_blocks *disk, const char *what, const char *why) {
    if (!disk->is_full)
        cpa_log(CPA_LOG_WARN, "swap folder %s: %s of rank %" PRId32 " cannot be written: %s; no more is kept there",
                disk->folder_name, what, disk->rank, why);
    disk->is_full = 1;
}

/* ---- the threads ---- */

/* Of the unit and of what is in the block, so that a block of another unit is none either. */
static int digest(const cpa_disk_entry *where, const void *block, int64_t bytes, uint8_t out[32]) {
    EVP_MD_CTX *hasher = EVP_MD_CTX_new();
    const int ok = hasher && EVP_DigestInit_ex(hasher, EVP_sha256(), NULL) &&
                   EVP_DigestUpdate(hasher, where->key, sizeof where->key) &&
                   EVP_DigestUpdate(hasher, block, (size_t)bytes) && EVP_DigestFinal_ex(hasher, out, NULL);
    EVP_MD_CTX_free(hasher);
    return ok;
}

/* A block whose bytes changed in memory would come back with a SHA-256 that is right. */
static int is_sound(const cpa_disk_blocks *disk, const job *j) {
    if (cpa_kv_checksum(j->bytes, disk->block_bytes[j->where.group]) == j->checksum) return 1;
    cpa_log(CPA_LOG_WARN,
            "swap folder %s: a block of group %" PRId32 " of rank %" PRId32
            " was damaged in host memory, and is not written",
            disk->folder_name, j->where.group, disk->rank);
    return 0;
}

/* Whether the block may be written; its SHA-256 is then in its entry. */
static int prepare(cpa_disk_blocks *disk, job *j) {
    if (!is_sound(disk, j)) return 0;
    if (digest(&j->where, j->bytes, disk->block_bytes[j->where.group], j->where.sha256)) return 1;
    pthread_mutex_lock(&disk->lock);
    give_up(disk, "a block", "OpenSSL gives no SHA-256");
    pthread_mutex_unlock(&disk->lock);
    return 0;
}

/* Locked. */
static void note_written(cpa_disk_blocks *disk, job *j, const cpa_disk_run *run) {
    disk->queued_bytes -= disk->block_bytes[j->where.group];
    if (run->n == 0) return;
    if (run->error) {
        give_up(disk, "a block", strerror(run->error));
        return;
    }
    j->where.used = ++disk->used;
    *entry_of(disk, &j->where) = j->where;
    disk->changed = 1;
    disk->stats.bytes_written += run->n;
}

static cpa_disk_run run_of(const cpa_disk_blocks *disk, job *j) {
    const int64_t bytes = disk->block_bytes[j->where.group];
    return (cpa_disk_run){.file = disk->files.groups[j->where.group],
                          .writes = j->to == NULL,
                          .bytes = j->to ? j->to : j->bytes,
                          .n = bytes,
                          .at = j->where.slot * bytes};
}

static void write_blocks(lane *l, job *const *jobs, int32_t n) {
    cpa_disk_blocks *disk = l->disk;
    cpa_disk_run runs[CPA_DISK_RUNS];
    pthread_mutex_lock(&disk->lock);
    for (int32_t i = 0; i < n; i++) entry_of(disk, &jobs[i]->where)->ranks = 0;
    pthread_mutex_unlock(&disk->lock);
    for (int32_t i = 0; i < n; i++) {
        runs[i] = run_of(disk, jobs[i]);
        if (!prepare(disk, jobs[i])) runs[i].n = 0;
    }
    cpa_disk_io_do(&l->io, runs, n);
    pthread_mutex_lock(&disk->lock);
    for (int32_t i = 0; i < n; i++) note_written(disk, jobs[i], &runs[i]);
    pthread_cond_broadcast(&disk->done);
    pthread_mutex_unlock(&disk->lock);
}

/* Whether the slot has the unit of a load, whose SHA-256 is then in the load's entry. Locked. */
static int is_there(cpa_disk_blocks *disk, cpa_disk_entry *where) {
    cpa_disk_entry *entry = entry_of(disk, where);
    if (entry->ranks == 0 || memcmp(entry->key, where->key, sizeof entry->key) != 0) return 0;
    entry->used = ++disk->used;
    disk->changed = 1;
    memcpy(where->sha256, entry->sha256, sizeof where->sha256);
    return 1;
}

/* What was read for a load is looked at, and told of. */
static void end_load(cpa_disk_blocks *disk, const job *j, const cpa_disk_run *run) {
    uint8_t found[32];
    const int there = run->n > 0;
    const int ok = there && run->error == 0 && digest(&j->where, j->to, run->n, found) &&
                   memcmp(found, j->where.sha256, sizeof found) == 0;
    if (there && !ok)
        cpa_log(CPA_LOG_WARN,
                "swap folder %s: slot %" PRId32 " of group %" PRId32 " of rank %" PRId32
                " has other bytes than were written; its tokens are computed again",
                disk->folder_name, j->where.slot, j->where.group, disk->rank);
    pthread_mutex_lock(&disk->lock);
    *j->failed = !ok;
    if (ok) disk->stats.bytes_read += run->n;
    if (there && !ok) {
        disk->stats.damaged++;
        entry_of(disk, &j->where)->ranks = 0;
        disk->changed = 1;
    }
    if (--disk->loads == 0) pthread_cond_broadcast(&disk->done);
    pthread_mutex_unlock(&disk->lock);
}

static void read_blocks(lane *l, job *const *jobs, int32_t n) {
    cpa_disk_blocks *disk = l->disk;
    cpa_disk_run runs[CPA_DISK_RUNS];
    pthread_mutex_lock(&disk->lock);
    for (int32_t i = 0; i < n; i++) {
        runs[i] = run_of(disk, jobs[i]);
        if (!is_there(disk, &jobs[i]->where)) runs[i].n = 0;
    }
    pthread_mutex_unlock(&disk->lock);
    cpa_disk_io_do(&l->io, runs, n);
    for (int32_t i = 0; i < n; i++) end_load(disk, jobs[i], &runs[i]);
}

/* The blocks go to disk before the index that tells of them. Called locked; the lock is open meanwhile. */
static void write_index(cpa_disk_blocks *disk) {
    const int64_t slots = disk->first[disk->n_groups];
    cpa_disk_entry *entries = malloc(((size_t)slots + 1) * sizeof *entries);
    cpa_error why = {CPA_OK, ""};
    char name[NAME_BYTES];
    int64_t n = 0;
    int ok = entries != NULL;
    for (int64_t i = 0; ok && i < slots; i++)
        if (disk->entries[i].ranks > 0) entries[n++] = disk->entries[i];
    disk->changed = 0;
    pthread_mutex_unlock(&disk->lock);
    name_index(disk, name);
    ok = ok && cpa_disk_files_sync(&disk->files);
    const char *what = entries ? strerror(errno) : "no memory for it";
    if (ok && cpa_disk_index_write(disk->files.folder, name, disk->identity, entries, n, &why) != CPA_OK) {
        ok = 0;
        what = why.message;
    }
    free(entries);
    pthread_mutex_lock(&disk->lock);
    if (!ok) give_up(disk, "the index", what);
}

/* A thread of its own, as whoever waits for a load is not to wait for what makes blocks and index safe. It ends last, and
 * writes the last index. */
static void *keep_index(void *ctx) {
    cpa_disk_blocks *disk = ctx;
    pthread_mutex_lock(&disk->lock);
    while (!disk->ending) {
        const struct timespec until = cpa_clock_after(disk->index_s);
        int due = 0;
        while (!disk->ending && !due)
            due = pthread_cond_clockwait(&disk->end, &disk->lock, CLOCK_MONOTONIC, &until) != 0;
        if (due && disk->changed && !disk->is_full) write_index(disk);
    }
    pthread_mutex_unlock(&disk->lock);
    for (int i = 0; i < disk->n_lanes; i++) pthread_join(disk->lanes[i].thread, NULL);
    pthread_mutex_lock(&disk->lock);
    if (disk->changed) write_index(disk);
    pthread_mutex_unlock(&disk->lock);
    return NULL;
}

/* Whether a job can be done together with those before it: loads, or stores of different slots. */
static int goes_with(const job *j, job *const *jobs, int32_t n) {
    if (n == 0) return 1;
    if (n == CPA_DISK_RUNS || (j->to == NULL) != (jobs[0]->to == NULL)) return 0;
    for (int32_t i = 0; !j->to && i < n; i++)
        if (jobs[i]->where.group == j->where.group && jobs[i]->where.slot == j->where.slot) return 0;
    return 1;
}

/* Takes the next jobs, [CPA_DISK_RUNS] at most; 0: there will be none. */
static int32_t next_jobs(lane *l, job **jobs) {
    cpa_disk_blocks *disk = l->disk;
    int32_t n = 0;
    pthread_mutex_lock(&disk->lock);
    while (!l->first && !disk->ending) pthread_cond_wait(&l->more, &disk->lock);
    for (job *j; (j = l->first) && goes_with(j, jobs, n); l->first = j->next) jobs[n++] = j;
    pthread_mutex_unlock(&disk->lock);
    return n;
}

static void *work(void *ctx) {
    lane *l = ctx;
    job *jobs[CPA_DISK_RUNS];
    for (int32_t n; (n = next_jobs(l, jobs)) > 0;) {
        if (jobs[0]->to) {
            read_blocks(l, jobs, n);
        } else {
            write_blocks(l, jobs, n);
        }
        for (int32_t i = 0; i < n; i++) free(jobs[i]);
    }
    return NULL;
}

/* ---- what they are asked for ---- */

/* Locked. */
static void enqueue(cpa_disk_blocks *disk, job *j) {
    lane *l = &disk->lanes[j->where.slot % THREADS];
    j->next = NULL;
    if (l->first) {
        l->last->next = j;
    } else {
        l->first = j;
    }
    l->last = j;
    pthread_cond_signal(&l->more);
}

/* Counts what is to be written; 0: there is no room for it. */
static int reserve_queue(cpa_disk_blocks *disk, int64_t bytes, int waits) {
    pthread_mutex_lock(&disk->lock);
    while (waits && !disk->is_full && disk->queued_bytes > 0 && disk->queued_bytes + bytes > QUEUE_BYTES)
        pthread_cond_wait(&disk->done, &disk->lock);
    const int has_room = !disk->is_full && (disk->queued_bytes == 0 || disk->queued_bytes + bytes <= QUEUE_BYTES);
    if (has_room) disk->queued_bytes += bytes;
    pthread_mutex_unlock(&disk->lock);
    return has_room;
}

void cpa_disk_blocks_store(cpa_disk_blocks *disk, const cpa_disk_entry *where, const void *block, uint64_t checksum,
                           int waits) {
    const int64_t bytes = disk->block_bytes[where->group];
    /* The slot of one that is not written has what it had, which is not found by that key. */
    if (!reserve_queue(disk, bytes, waits)) return;
    job *j = malloc(sizeof *j + (size_t)bytes);
    if (j) {
        *j = (job){.where = *where, .checksum = checksum};
        memcpy(j->bytes, block, (size_t)bytes);
    }
    pthread_mutex_lock(&disk->lock);
    if (j) {
        enqueue(disk, j);
    } else {
        disk->queued_bytes -= bytes;
    }
    pthread_mutex_unlock(&disk->lock);
}

void cpa_disk_blocks_load(cpa_disk_blocks *disk, const cpa_disk_entry *where, void *block, uint64_t *failed) {
    job *j = malloc(sizeof *j);
    if (!j) {
        *failed = 1;
        return;
    }
    *j = (job){.where = *where, .to = block, .failed = failed};
    pthread_mutex_lock(&disk->lock);
    disk->loads++;
    enqueue(disk, j);
    pthread_mutex_unlock(&disk->lock);
}

void cpa_disk_blocks_wait(cpa_disk_blocks *disk) {
    pthread_mutex_lock(&disk->lock);
    while (disk->loads > 0) pthread_cond_wait(&disk->done, &disk->lock);
    pthread_mutex_unlock(&disk->lock);
}

int cpa_disk_blocks_is_full(cpa_disk_blocks *disk) {
    pthread_mutex_lock(&disk->lock);
    const int is_full = disk->is_full;
    pthread_mutex_unlock(&disk->lock);
    return is_full;
}

void cpa_disk_blocks_get_stats(cpa_disk_blocks *disk, cpa_disk_blocks_stats *out) {
    pthread_mutex_lock(&disk->lock);
    *out = disk->stats;
    pthread_mutex_unlock(&disk->lock);
}

const cpa_disk_entry *cpa_disk_blocks_found(const cpa_disk_blocks *disk, int64_t *n) {
    *n = disk->n_found;
    return disk->found;
}

/* ---- begin and end ---- */

/* What the index says of slots that there are; a larger folder than the last time leaves the others empty. */
static void take_found(cpa_disk_blocks *disk) {
    int64_t taken = 0;
    for (int64_t i = 0; i < disk->n_found; i++) {
        const cpa_disk_entry *e = &disk->found[i];
        if (e->group < 0 || e->group >= disk->n_groups || e->slot < 0 || e->ranks == 0 ||
            e->slot >= disk->first[e->group + 1] - disk->first[e->group])
            continue;
        *entry_of(disk, e) = *e;
        if (e->used > disk->used) disk->used = e->used;
        disk->found[taken++] = *e;
    }
    disk->n_found = taken;
}

static cpa_status read_index(cpa_disk_blocks *disk, cpa_error *err) {
    char name[NAME_BYTES];
    cpa_error why = {CPA_OK, ""};
    name_index(disk, name);
    const cpa_status status =
        cpa_disk_index_read(disk->files.folder, name, disk->identity, &disk->found, &disk->n_found, &why);
    if (status == CPA_IO) {
        cpa_log(CPA_LOG_WARN, "swap folder %s: %s; what is there is not used", disk->folder_name, why.message);
        return CPA_OK;
    }
    if (status != CPA_OK) return cpa_fail(err, status, "swap_folder %s: %s", disk->folder_name, why.message);
    take_found(disk);
    return CPA_OK;
}

/* They take no signals: those are the program's, and SIGXFSZ is the error of a write. */
static cpa_status start_threads(cpa_disk_blocks *disk, cpa_error *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&disk->index_thread, NULL, keep_index, disk);
    disk->has_index_thread = code == 0;
    while (code == 0 && disk->n_lanes < THREADS) {
        lane *l = &disk->lanes[disk->n_lanes];
        code = pthread_create(&l->thread, NULL, work, l);
        disk->n_lanes += code == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code == 0 ? CPA_OK
                     : cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no thread could be started (error %d)", code);
}

/* Each thread has a ring, if it can have one. */
static void open_rings(cpa_disk_blocks *disk, int no_uring) {
    const char *why_not = NULL;
    for (int i = 0; i < THREADS; i++) {
        disk->lanes[i].disk = disk;
        const char *why = cpa_disk_io_open(&disk->lanes[i].io, !no_uring);
        if (why) why_not = why;
    }
    cpa_log(CPA_LOG_INFO, "swap folder %s: %d threads of rank %" PRId32 " move blocks by %s%s", disk->folder_name,
            THREADS, disk->rank, why_not ? "pread and pwrite; no io_uring: " : "io_uring", why_not ? why_not : "");
}

/* One without files. NULL without memory. */
static cpa_disk_blocks *create(const cpa_disk_blocks_options *options) {
    cpa_disk_blocks *disk = calloc(1, sizeof *disk);
    if (!disk) return NULL;
    disk->rank = options->rank;
    disk->n_groups = options->groups->count;
    cpa_disk_files_init(&disk->files);
    for (int32_t g = 0; g < disk->n_groups; g++) {
        disk->block_bytes[g] = options->groups->list[g].block_bytes;
        disk->first[g + 1] = disk->first[g] + options->groups->list[g].disk_blocks;
    }
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->done, NULL);
    pthread_cond_init(&disk->end, NULL);
    for (int i = 0; i < THREADS; i++) pthread_cond_init(&disk->lanes[i].more, NULL);
    disk->folder_name = strdup(options->folder);
    disk->identity = strdup(options->identity);
    disk->entries = calloc((size_t)disk->first[disk->n_groups] + 1, sizeof *disk->entries);
    disk->index_s = options->index_s > 0 ? options->index_s : INDEX_SECONDS;
    if (disk->folder_name && disk->identity && disk->entries) return disk;
    cpa_disk_blocks_close(disk);
    return NULL;
}

cpa_status cpa_disk_blocks_open(const cpa_disk_blocks_options *options, cpa_disk_blocks **out, cpa_error *err) {
    cpa_disk_blocks *disk = create(options);
    if (!disk) return cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no memory for its slots");
    cpa_status status = cpa_disk_files_open(&disk->files, disk->folder_name, disk->rank, disk->n_groups, err);
    if (status == CPA_OK) status = read_index(disk, err);
    if (status == CPA_OK) {
        open_rings(disk, options->no_uring);
        status = start_threads(disk, err);
    }
    if (status != CPA_OK) {
        cpa_disk_blocks_close(disk);
        return status;
    }
    *out = disk;
    return CPA_OK;
}

/* When they have nothing left to do. */
static void end_threads(cpa_disk_blocks *disk) {
    pthread_mutex_lock(&disk->lock);
    disk->ending = 1;
    for (int i = 0; i < disk->n_lanes; i++) pthread_cond_signal(&disk->lanes[i].more);
    pthread_cond_signal(&disk->end);
    pthread_mutex_unlock(&disk->lock);
    pthread_join(disk->index_thread, NULL);
}

void cpa_disk_blocks_close(cpa_disk_blocks *disk) {
    if (!disk) return;
    if (disk->has_index_thread) end_threads(disk);
    cpa_disk_files_close(&disk->files);
    for (int i = 0; i < THREADS; i++) {
        cpa_disk_io_close(&disk->lanes[i].io);
        pthread_cond_destroy(&disk->lanes[i].more);
    }
    pthread_cond_destroy(&disk->end);
    pthread_cond_destroy(&disk->done);
    pthread_mutex_destroy(&disk->lock);
    free(disk->entries);
    free(disk->found);
    free(disk->identity);
    free(disk->folder_name);
    free(disk);
}
