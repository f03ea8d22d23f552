#include "src/cache/disk_blocks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "src/cache/file_bytes.h"
#include "src/cache/kv_cache.h"

enum { THREADS = 4, QUEUE_BYTES = 256 << 20 /* of blocks that wait to be written */, NAME_BYTES = 128 };

/* How often the index is written while blocks are, and how long a thread sleeps at most meanwhile. */
static const double INDEX_SECONDS = 10, SLEEP_SECONDS = 1;

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
    pthread_cond_t more;
    job *first, *last;
} lane;

struct cpa_disk_blocks {
    char *folder_name, *identity;
    int32_t rank, n_groups;
    int folder;
    int files[CPA_MAX_LAYER_GROUPS];
    int64_t block_bytes[CPA_MAX_LAYER_GROUPS];
    int64_t first[CPA_MAX_LAYER_GROUPS + 1]; /* of each group the index of its first entry, and how many there are */
    cpa_disk_entry *found;                   /* [n_found] of the index that was there */
    int64_t n_found;
    lane lanes[THREADS];
    int32_t n_lanes;

    pthread_mutex_t lock;    /* over all that follows, and the jobs */
    pthread_cond_t done;     /* something was written, or all is loaded */
    cpa_disk_entry *entries; /* by slot */
    uint64_t used;
    int64_t loads, queued_bytes;
    int is_full, changed, ending;
    double indexed; /* when the index was written last */
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

static void write_block(cpa_disk_blocks *disk, const job *j) {
    const int64_t bytes = disk->block_bytes[j->where.group];
    cpa_disk_entry now = j->where;
    const char *why = "OpenSSL gives no SHA-256";
    int ok = 0;
    pthread_mutex_lock(&disk->lock);
    entry_of(disk, &now)->ranks = 0;
    pthread_mutex_unlock(&disk->lock);
    const int sound = is_sound(disk, j);
    if (sound && digest(&now, j->bytes, bytes, now.sha256)) {
        ok = cpa_file_write_at(disk->files[now.group], j->bytes, bytes, now.slot * bytes);
        why = strerror(errno);
    }
    pthread_mutex_lock(&disk->lock);
    disk->queued_bytes -= bytes;
    pthread_cond_broadcast(&disk->done);
    if (ok) {
        now.used = ++disk->used;
        *entry_of(disk, &now) = now;
        disk->changed = 1;
        disk->stats.bytes_written += bytes;
    } else if (sound) {
        give_up(disk, "a block", why);
    }
    pthread_mutex_unlock(&disk->lock);
}

/* Locked. */
static int is_there(cpa_disk_blocks *disk, const cpa_disk_entry *where) {
    cpa_disk_entry *entry = entry_of(disk, where);
    if (entry->ranks == 0 || memcmp(entry->key, where->key, sizeof entry->key) != 0) return 0;
    entry->used = ++disk->used;
    disk->changed = 1;
    return 1;
}

static void read_block(cpa_disk_blocks *disk, const job *j) {
    const int64_t bytes = disk->block_bytes[j->where.group];
    uint8_t found[32], expected[32];
    pthread_mutex_lock(&disk->lock);
    const int there = is_there(disk, &j->where);
    memcpy(expected, entry_of(disk, &j->where)->sha256, sizeof expected);
    pthread_mutex_unlock(&disk->lock);
    const int ok = there && cpa_file_read_at(disk->files[j->where.group], j->to, bytes, j->where.slot * bytes) &&
                   digest(&j->where, j->to, bytes, found) && memcmp(found, expected, sizeof found) == 0;
    if (there && !ok)
        cpa_log(CPA_LOG_WARN,
                "swap folder %s: slot %" PRId32 " of group %" PRId32 " of rank %" PRId32
                " has other bytes than were written; its tokens are computed again",
                disk->folder_name, j->where.slot, j->where.group, disk->rank);
    pthread_mutex_lock(&disk->lock);
    *j->failed = !ok;
    if (ok) disk->stats.bytes_read += bytes;
    if (there && !ok) {
        disk->stats.damaged++;
        entry_of(disk, &j->where)->ranks = 0;
        disk->changed = 1;
    }
    if (--disk->loads == 0) pthread_cond_broadcast(&disk->done);
    pthread_mutex_unlock(&disk->lock);
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
    for (int32_t g = 0; ok && g < disk->n_groups; g++) ok = fdatasync(disk->files[g]) == 0;
    const char *what = entries ? strerror(errno) : "no memory for it";
    if (ok && cpa_disk_index_write(disk->folder, name, disk->identity, entries, n, &why) != CPA_OK) {
        ok = 0;
        what = why.message;
    }
    free(entries);
    pthread_mutex_lock(&disk->lock);
    disk->indexed = cpa_clock_now();
    if (!ok) give_up(disk, "the index", what);
}

/* Of the first thread, with nothing else to do, or in between. Locked. */
static void look_after_index(cpa_disk_blocks *disk) {
    if (disk->changed && !disk->is_full && cpa_clock_now() - disk->indexed >= INDEX_SECONDS) write_index(disk);
}

/* Takes the next job; NULL: there will be none. */
static job *next_job(lane *l) {
    cpa_disk_blocks *disk = l->disk;
    pthread_mutex_lock(&disk->lock);
    for (;;) {
        if (l == disk->lanes) look_after_index(disk);
        if (l->first || disk->ending) break;
        const struct timespec until = cpa_clock_after(SLEEP_SECONDS);
        (void)pthread_cond_clockwait(&l->more, &disk->lock, CLOCK_MONOTONIC, &until);
    }
    job *j = l->first;
    if (j) l->first = j->next;
    pthread_mutex_unlock(&disk->lock);
    return j;
}

/* The first thread ends last, and writes the last index. */
static void end_lanes(cpa_disk_blocks *disk) {
    for (int i = 1; i < disk->n_lanes; i++) pthread_join(disk->lanes[i].thread, NULL);
    pthread_mutex_lock(&disk->lock);
    if (disk->changed) write_index(disk);
    pthread_mutex_unlock(&disk->lock);
}

static void *work(void *ctx) {
    lane *l = ctx;
    for (job *j; (j = next_job(l)); free(j)) {
        if (j->to) {
            read_block(l->disk, j);
        } else {
            write_block(l->disk, j);
        }
    }
    if (l == l->disk->lanes) end_lanes(l->disk);
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

/* A file of the rank, which no other process may have open; -1: see *err. */
static int open_file(const cpa_disk_blocks *disk, const char *name, int locks, cpa_error *err) {
    const int fd = openat(disk->folder, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        cpa_fail(err, CPA_IO, "swap_folder %s: %s cannot be opened: %s", disk->folder_name, name, strerror(errno));
        return -1;
    }
    if (!locks || flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    cpa_fail(err, CPA_IO, "swap_folder %s: another process has %s open", disk->folder_name, name);
    close(fd);
    return -1;
}

static cpa_status open_files(cpa_disk_blocks *disk, cpa_error *err) {
    char name[NAME_BYTES];
    disk->folder = open(disk->folder_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (disk->folder < 0)
        return cpa_fail(err, CPA_IO, "swap_folder %s cannot be opened: %s", disk->folder_name, strerror(errno));
    for (int32_t g = 0; g < disk->n_groups; g++) {
        snprintf(name, sizeof name, "rank-%" PRId32 "-group-%" PRId32 ".blocks", disk->rank, g);
        disk->files[g] = open_file(disk, name, g == 0, err);
        if (disk->files[g] < 0) return CPA_IO;
    }
    return CPA_OK;
}

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
        cpa_disk_index_read(disk->folder, name, disk->identity, &disk->found, &disk->n_found, &why);
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
    int code = 0;
    while (code == 0 && disk->n_lanes < THREADS) {
        lane *l = &disk->lanes[disk->n_lanes];
        l->disk = disk;
        code = pthread_create(&l->thread, NULL, work, l);
        disk->n_lanes += code == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code == 0 ? CPA_OK
                     : cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no thread could be started (error %d)", code);
}

/* One without files. NULL without memory. */
static cpa_disk_blocks *create(const cpa_disk_blocks_options *options) {
    cpa_disk_blocks *disk = calloc(1, sizeof *disk);
    if (!disk) return NULL;
    disk->rank = options->rank;
    disk->n_groups = options->groups->count;
    disk->folder = -1;
    for (int32_t g = 0; g < CPA_MAX_LAYER_GROUPS; g++) disk->files[g] = -1;
    for (int32_t g = 0; g < disk->n_groups; g++) {
        disk->block_bytes[g] = options->groups->list[g].block_bytes;
        disk->first[g + 1] = disk->first[g] + options->groups->list[g].disk_blocks;
    }
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->done, NULL);
    for (int i = 0; i < THREADS; i++) pthread_cond_init(&disk->lanes[i].more, NULL);
    disk->folder_name = strdup(options->folder);
    disk->identity = strdup(options->identity);
    disk->entries = calloc((size_t)disk->first[disk->n_groups] + 1, sizeof *disk->entries);
    disk->indexed = cpa_clock_now();
    if (disk->folder_name && disk->identity && disk->entries) return disk;
    cpa_disk_blocks_close(disk);
    return NULL;
}

cpa_status cpa_disk_blocks_open(const cpa_disk_blocks_options *options, cpa_disk_blocks **out, cpa_error *err) {
    cpa_disk_blocks *disk = create(options);
    if (!disk) return cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no memory for its slots");
    cpa_status status = open_files(disk, err);
    if (status == CPA_OK) status = read_index(disk, err);
    if (status == CPA_OK) status = start_threads(disk, err);
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
    pthread_mutex_unlock(&disk->lock);
    pthread_join(disk->lanes[0].thread, NULL);
}

void cpa_disk_blocks_close(cpa_disk_blocks *disk) {
    if (!disk) return;
    if (disk->n_lanes > 0) end_threads(disk);
    for (int32_t g = 0; g < disk->n_groups; g++)
        if (disk->files[g] >= 0) close(disk->files[g]);
    if (disk->folder >= 0) close(disk->folder);
    for (int i = 0; i < THREADS; i++) pthread_cond_destroy(&disk->lanes[i].more);
    pthread_cond_destroy(&disk->done);
    pthread_mutex_destroy(&disk->lock);
    free(disk->entries);
    free(disk->found);
    free(disk->identity);
    free(disk->folder_name);
    free(disk);
}
