/* Blocks on disk: what comes back is what was written for that unit, also for who opens the folder next; what is damaged,
 * another job's, or too much for the disk. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "src/cache/disk_blocks.h"
#include "src/cache/kv_cache.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

enum { BYTES = 4096, SLOTS = 12 };

static const char IDENTITY[] = "model a, 2 layers, salt 1";
static const cpa_layer_groups GROUPS = {
    2, {{.block_bytes = BYTES, .disk_blocks = SLOTS}, {.block_bytes = BYTES / 2, .disk_blocks = 3}}};

/* How the blocks of the test at hand are moved. */
static int no_uring;
static double index_s;

static cpa_disk_blocks *open_with(const cpa_test_folder *folder, const char *identity, const cpa_layer_groups *groups,
                                  cpa_error *err) {
    const cpa_disk_blocks_options options = {.folder = folder->path,
                                             .identity = identity,
                                             .rank = 1,
                                             .groups = groups,
                                             .no_uring = no_uring,
                                             .index_s = index_s};
    cpa_disk_blocks *disk = NULL;
    const cpa_status status = cpa_disk_blocks_open(&options, &disk, err);
    CU_ASSERT_EQUAL(status == CPA_OK, disk != NULL);
    return disk;
}

static cpa_disk_blocks *open_again(const cpa_test_folder *folder) {
    cpa_error err = {CPA_OK, ""};
    cpa_disk_blocks *disk = open_with(folder, IDENTITY, &GROUPS, &err);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_NOT_NULL_FATAL(disk);
    return disk;
}

static cpa_disk_entry slot_of(int32_t group, int32_t slot, int unit) {
    cpa_disk_entry where = {.group = group, .slot = slot, .ranks = 2};
    memset(where.key, unit, sizeof where.key);
    return where;
}

/* What the block of a unit is. */
static void fill(char *block, int32_t group, int unit) {
    for (int i = 0; i < BYTES; i++) block[i] = (char)(i * (unit + 3) + group);
}

static void store(cpa_disk_blocks *disk, int32_t group, int32_t slot, int unit) {
    const cpa_disk_entry where = slot_of(group, slot, unit);
    char block[BYTES];
    fill(block, group, unit);
    cpa_disk_blocks_store(disk, &where, block, cpa_kv_checksum(block, GROUPS.list[group].block_bytes), unit % 2);
}

/* 1: it is what was stored for the unit; 0: it is not there. */
static int loads(cpa_disk_blocks *disk, int32_t group, int32_t slot, int unit) {
    const cpa_disk_entry where = slot_of(group, slot, unit);
    char block[BYTES], expected[BYTES];
    uint64_t failed = 0;
    memset(block, 0x55, sizeof block);
    fill(expected, group, unit);
    cpa_disk_blocks_load(disk, &where, block, &failed);
    cpa_disk_blocks_wait(disk);
    CU_ASSERT(failed || memcmp(block, expected, (size_t)GROUPS.list[group].block_bytes) == 0);
    return !failed;
}

static int warnings;
static char warning[512];

static void note_warning(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx;
    (void)level;
    warnings++;
    snprintf(warning, sizeof warning, "%s", line);
}

static void listen(void) {
    warnings = 0;
    warning[0] = 0;
    cpa_log_set(note_warning, NULL, CPA_LOG_WARN);
}

static void expect_warning(const char *part) {
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(warnings, 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(warning, part));
}

static void path_of(const cpa_test_folder *folder, const char *name, char path[600]) {
    snprintf(path, 600, "%s/%s", folder->path, name);
}

static void change_byte(const cpa_test_folder *folder, const char *name, int64_t at) {
    char path[600], byte;
    path_of(folder, name, path);
    const int fd = open(path, O_RDWR);
    CU_ASSERT_FATAL(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 4;
    CU_ASSERT(pwrite(fd, &byte, 1, at) == 1);
    close(fd);
}

static void a_slot_has_the_unit_that_was_stored_last(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_disk_blocks *disk = open_again(&folder);
    cpa_disk_blocks_stats stats;
    for (int32_t slot = 0; slot < SLOTS; slot++) store(disk, 0, slot, slot);
    for (int32_t slot = 0; slot < 3; slot++) store(disk, 1, slot, 20 + slot);
    /* Every block is asked for right behind its store, and a slot is written over right behind a load. */
    for (int32_t slot = 0; slot < SLOTS; slot++) CU_ASSERT(loads(disk, 0, slot, slot));
    const cpa_disk_entry old = slot_of(0, 5, 5);
    char block[BYTES], expected[BYTES];
    uint64_t failed = 0;
    cpa_disk_blocks_load(disk, &old, block, &failed);
    store(disk, 0, 5, 40);
    cpa_disk_blocks_wait(disk);
    fill(expected, 0, 5);
    CU_ASSERT(failed == 0 && memcmp(block, expected, BYTES) == 0);
    CU_ASSERT(loads(disk, 0, 5, 40));
    CU_ASSERT_FALSE(loads(disk, 0, 5, 5));
    CU_ASSERT(loads(disk, 1, 2, 22));
    CU_ASSERT_FALSE(loads(disk, 1, 2, 2));
    cpa_disk_blocks_get_stats(disk, &stats);
    CU_ASSERT_EQUAL(stats.bytes_written, (SLOTS + 1) * BYTES + 3 * BYTES / 2);
    CU_ASSERT_EQUAL(stats.damaged, 0);
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

static void who_opens_the_folder_next_finds_what_was_stored(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    int64_t n;
    cpa_disk_blocks *disk = open_again(&folder);
    (void)cpa_disk_blocks_found(disk, &n);
    CU_ASSERT_EQUAL(n, 0);
    store(disk, 0, 2, 7);
    store(disk, 0, 3, 8);
    store(disk, 1, 0, 9);
    CU_ASSERT(loads(disk, 0, 3, 8) && loads(disk, 1, 0, 9));
    CU_ASSERT(loads(disk, 0, 2, 7)); /* used after the others */
    cpa_disk_blocks_close(disk);
    /* One who has not come to its end leaves this. */
    cpa_test_folder_write(&folder, "rank-1.index.new", "half", 4);
    disk = open_again(&folder);
    const cpa_disk_entry *found = cpa_disk_blocks_found(disk, &n);
    CU_ASSERT_EQUAL_FATAL(n, 3);
    CU_ASSERT(found[0].slot == 2 && found[0].ranks == 2 && found[0].key[31] == 7);
    CU_ASSERT(found[1].slot == 3 && found[1].group == 0 && found[2].group == 1);
    CPA_ASSERT_ORDER(found[0].used, >, found[1].used);
    CU_ASSERT(loads(disk, 0, 2, 7) && loads(disk, 0, 3, 8) && loads(disk, 1, 0, 9));
    cpa_disk_blocks_close(disk);
    /* With fewer slots those that are left. */
    cpa_layer_groups fewer = GROUPS;
    fewer.list[0].disk_blocks = 3;
    disk = open_with(&folder, IDENTITY, &fewer, NULL);
    (void)cpa_disk_blocks_found(disk, &n);
    CU_ASSERT_EQUAL(n, 2);
    CU_ASSERT(loads(disk, 0, 2, 7));
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

/* A process that ends in the middle of its work: slots 0 and 1 have other units than the index says. */
static void crash(const cpa_test_folder *folder) {
    cpa_disk_blocks *disk = open_with(folder, IDENTITY, &GROUPS, NULL);
    store(disk, 0, 0, 50);
    store(disk, 0, 1, 51);
    const int stored = loads(disk, 0, 0, 50) && loads(disk, 0, 1, 51);
    _exit(stored ? 0 : 1);
}

static void after_a_crash_the_last_index_is_there(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    int64_t n;
    int how = 1;
    cpa_disk_blocks *disk = open_again(&folder);
    for (int32_t slot = 0; slot < 3; slot++) store(disk, 0, slot, slot);
    cpa_disk_blocks_close(disk);
    const pid_t child = fork();
    if (child == 0) crash(&folder);
    CU_ASSERT(waitpid(child, &how, 0) == child && how == 0);
    disk = open_again(&folder);
    (void)cpa_disk_blocks_found(disk, &n);
    CU_ASSERT_EQUAL(n, 3);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    for (int32_t slot = 0; slot < 3; slot++) CU_ASSERT_EQUAL(loads(disk, 0, slot, slot), slot == 2);
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

static void a_damaged_block_does_not_come_back(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_disk_blocks_stats stats;
    cpa_disk_blocks *disk = open_again(&folder);
    for (int32_t slot = 0; slot < 3; slot++) store(disk, 0, slot, slot);
    cpa_disk_blocks_close(disk);
    change_byte(&folder, "rank-1-group-0.blocks", BYTES + 77);
    disk = open_again(&folder);
    listen();
    CU_ASSERT(loads(disk, 0, 0, 0));
    CU_ASSERT_FALSE(loads(disk, 0, 1, 1));
    CU_ASSERT_FALSE(loads(disk, 0, 1, 1)); /* nor is it asked for again: it is not there */
    CU_ASSERT(loads(disk, 0, 2, 2));
    expect_warning("slot 1 of group 0 of rank 1 has other bytes than were written");
    cpa_disk_blocks_get_stats(disk, &stats);
    CU_ASSERT_EQUAL(stats.damaged, 1);
    store(disk, 0, 1, 1);
    CU_ASSERT(loads(disk, 0, 1, 1));
    cpa_disk_blocks_close(disk);
    /* A file that was cut off. */
    char path[600];
    path_of(&folder, "rank-1-group-0.blocks", path);
    CU_ASSERT_EQUAL(truncate(path, 2 * BYTES + 5), 0);
    disk = open_again(&folder);
    listen();
    CU_ASSERT_FALSE(loads(disk, 0, 2, 2));
    expect_warning("slot 2 of group 0");
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

/* Its SHA-256 would be that of what it has become. */
static void a_block_that_was_damaged_in_memory_is_not_stored(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_disk_blocks *disk = open_again(&folder);
    const cpa_disk_entry where = slot_of(0, 4, 4);
    char block[BYTES];
    fill(block, 0, 4);
    const uint64_t checksum = cpa_kv_checksum(block, BYTES);
    block[BYTES - 1] ^= 1;
    listen();
    cpa_disk_blocks_store(disk, &where, block, checksum, 0);
    CU_ASSERT_FALSE(loads(disk, 0, 4, 4));
    expect_warning("a block of group 0 of rank 1 was damaged in host memory, and is not written");
    CU_ASSERT_FALSE(cpa_disk_blocks_is_full(disk));
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

static void a_damaged_index_is_not_used(void) {
    for (int64_t at = 9; at < 400; at += 13) {
        cpa_test_folder folder = cpa_test_folder_make();
        int64_t n;
        cpa_disk_blocks *disk = open_again(&folder);
        for (int32_t slot = 0; slot < 5; slot++) store(disk, 0, slot, slot);
        cpa_disk_blocks_close(disk);
        change_byte(&folder, "rank-1.index", at);
        listen();
        disk = open_again(&folder);
        expect_warning("what is there is not used");
        (void)cpa_disk_blocks_found(disk, &n);
        CU_ASSERT_EQUAL(n, 0);
        CU_ASSERT_FALSE(loads(disk, 0, 2, 2));
        store(disk, 0, 2, 2);
        CU_ASSERT(loads(disk, 0, 2, 2));
        cpa_disk_blocks_close(disk);
        cpa_test_folder_remove(&folder);
    }
}

static void a_folder_of_another_job_is_refused(void) {
    static const struct {
        const char *identity, *message;
    } others[] = {
        {"model b, 2 layers, salt 1", "rank-1.index is of another job, of model a; expected model b"},
        {"model a, 2 layers, salt 2", "is of another job, of salt 1; expected salt 2"},
        {"model a, 2 layers, salt 11", "of salt 1; expected salt 11"},
        {"model a, 2 layers", "is of another job, which tells more of itself"},
        {"model a, 2 layers, salt 1, drafts", "is of another job, which tells less of itself"},
        {"", "of model a; expected "},
    };
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_disk_blocks *disk = open_again(&folder);
    store(disk, 0, 0, 0);
    cpa_disk_blocks_close(disk);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_PTR_NULL(open_with(&folder, others[i].identity, &GROUPS, &err));
        CU_ASSERT_EQUAL(err.status, CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, others[i].message));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, folder.path));
    }
    cpa_error err = {CPA_OK, ""};
    change_byte(&folder, "rank-1.index", 4);
    CU_ASSERT_PTR_NULL(open_with(&folder, IDENTITY, &GROUPS, &err));
    CU_ASSERT_EQUAL(err.status, CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "version 5; expected"));
    cpa_test_folder_remove(&folder);
}

static void a_folder_in_use_or_not_there_is_refused(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_error err = {CPA_OK, ""};
    cpa_disk_blocks *disk = open_again(&folder);
    CU_ASSERT_PTR_NULL(open_with(&folder, IDENTITY, &GROUPS, &err));
    CU_ASSERT_EQUAL(err.status, CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "another process has rank-1-group-0.blocks open"));
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
    CU_ASSERT_PTR_NULL(open_with(&folder, IDENTITY, &GROUPS, &err));
    CU_ASSERT_EQUAL(err.status, CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "No such file or directory"));
}

/* The largest file that a process may write. */
static void bound_files(rlim_t bytes) {
    struct rlimit limit;
    CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes;
    CU_ASSERT_EQUAL_FATAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void a_full_disk_is_told_once_and_what_is_there_stays(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_disk_blocks *disk = open_again(&folder);
    bound_files(3 * BYTES + BYTES / 2);
    listen();
    for (int32_t slot = 0; slot < 3; slot++) store(disk, 0, slot, slot);
    for (int32_t slot = 0; slot < 3; slot++) CU_ASSERT(loads(disk, 0, slot, slot));
    CU_ASSERT_FALSE(cpa_disk_blocks_is_full(disk));
    for (int32_t slot = 3; slot < SLOTS; slot++) store(disk, 0, slot, slot);
    for (int32_t slot = 3; slot < SLOTS; slot++) CU_ASSERT_FALSE(loads(disk, 0, slot, slot));
    CU_ASSERT(cpa_disk_blocks_is_full(disk));
    store(disk, 0, 0, 33); /* nothing is written any more */
    CU_ASSERT(loads(disk, 0, 1, 1));
    CU_ASSERT(loads(disk, 0, 0, 0));
    cpa_disk_blocks_close(disk);
    bound_files(RLIM_INFINITY);
    expect_warning("a block of rank 1 cannot be written: File too large; no more is kept there");
    disk = open_again(&folder);
    for (int32_t slot = 0; slot < SLOTS; slot++) CU_ASSERT_EQUAL(loads(disk, 0, slot, slot), slot < 3);
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

/* The index that was there before stays. */
static void an_index_that_cannot_be_written_leaves_the_last_one(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_disk_blocks *disk = open_again(&folder);
    store(disk, 0, 0, 0);
    cpa_disk_blocks_close(disk);
    disk = open_again(&folder);
    store(disk, 0, 1, 1);
    CU_ASSERT(loads(disk, 0, 1, 1));
    listen();
    bound_files(100);
    cpa_disk_blocks_close(disk);
    bound_files(RLIM_INFINITY);
    expect_warning("the index of rank 1 cannot be written");
    disk = open_again(&folder);
    CU_ASSERT(loads(disk, 0, 0, 0));
    CU_ASSERT_FALSE(loads(disk, 0, 1, 1));
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

/* More blocks at once than one call takes, of both groups, some of which are not there. */
static void many_blocks_come_back_together(void) {
    enum { MANY = 200 };
    static char blocks[MANY][BYTES], expected[BYTES];
    const cpa_layer_groups groups = {1, {{.block_bytes = BYTES, .disk_blocks = MANY}}};
    uint64_t failed[MANY] = {0};
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_error err;
    cpa_disk_blocks *disk = open_with(&folder, IDENTITY, &groups, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(disk);
    for (int twice = 0; twice < 2; twice++) /* a slot that is written over at once has what came last */
        for (int32_t slot = 0; slot < MANY; slot++)
            if (slot % 7 != 3) store(disk, 0, slot, slot + 20 * twice);
    for (int32_t slot = 0; slot < MANY; slot++) {
        const cpa_disk_entry where = slot_of(0, slot, slot + 20);
        cpa_disk_blocks_load(disk, &where, blocks[slot], &failed[slot]);
    }
    cpa_disk_blocks_wait(disk);
    for (int32_t slot = 0; slot < MANY; slot++) {
        CU_ASSERT_EQUAL(failed[slot], slot % 7 == 3);
        fill(expected, 0, slot + 20);
        if (!failed[slot]) CU_ASSERT_EQUAL(memcmp(blocks[slot], expected, BYTES), 0);
    }
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

/* What one way has written the other one reads. */
static void both_ways_leave_the_same_on_disk(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    const int way = no_uring;
    for (int i = 0; i < 2; i++) {
        no_uring = i == 0 ? way : !way;
        cpa_disk_blocks *disk = open_again(&folder);
        for (int32_t slot = 0; slot < SLOTS; slot++) {
            if (i == 0) store(disk, 0, slot, slot);
            CU_ASSERT(loads(disk, 0, slot, slot));
        }
        cpa_disk_blocks_close(disk);
    }
    no_uring = way;
    cpa_test_folder_remove(&folder);
}

/* Stands in for the C library's: takes some seconds where `slow` is set, as a disk does that has much to write. */
static atomic_int slow, syncing, syncs;

int fdatasync(int fd) {
    const struct timespec nap = {.tv_nsec = 10000000};
    syncing = slow ? ++syncs : 0; /* which one it is */
    for (int i = 0; i < 300 && slow; i++) nanosleep(&nap, NULL);
    syncing = 0;
    return (int)syscall(SYS_fdatasync, fd);
}

static void no_load_waits_for_the_index(void) {
    const struct timespec nap = {.tv_nsec = 1000000};
    cpa_test_folder folder = cpa_test_folder_make();
    index_s = 0.01;
    slow = 1;
    cpa_disk_blocks *disk = open_again(&folder);
    for (int32_t slot = 0; slot < SLOTS; slot++) store(disk, 0, slot, slot);
    while (!syncing) nanosleep(&nap, NULL);
    const int first = syncing;
    for (int32_t slot = 0; slot < SLOTS; slot++) CU_ASSERT(loads(disk, 0, slot, slot));
    CU_ASSERT_EQUAL(syncing, first);
    slow = 0;
    cpa_disk_blocks_close(disk);
    index_s = 0;
    cpa_test_folder_remove(&folder);
}

/* As containers do. */
static void forbid_uring(void) {
    struct sock_filter lines[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const struct sock_fprog program = {sizeof lines / sizeof lines[0], lines};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        _exit(2);
}

static void without_the_right_to_io_uring_blocks_are_kept_all_the_same(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    int how = 1;
    const pid_t child = fork();
    if (child == 0) {
        forbid_uring();
        cpa_log_set(note_warning, NULL, CPA_LOG_INFO);
        cpa_disk_blocks *disk = open_again(&folder);
        store(disk, 0, 3, 3);
        const int there = loads(disk, 0, 3, 3) && strstr(warning, "pread and pwrite; no io_uring: ");
        cpa_disk_blocks_close(disk);
        _exit(there ? 0 : 1);
    }
    CU_ASSERT(waitpid(child, &how, 0) == child && how == 0);
    cpa_test_folder_remove(&folder);
}

/* The log says how blocks are moved, which is as was asked for. */
static void the_way_is_told(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    warnings = 0;
    cpa_log_set(note_warning, NULL, CPA_LOG_INFO);
    cpa_disk_blocks *disk = open_again(&folder);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(warnings, 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(warning, "threads of rank 1 move blocks by "));
    CU_ASSERT_EQUAL(strstr(warning, "pread and pwrite; no io_uring: not asked for") != NULL, no_uring);
    cpa_disk_blocks_close(disk);
    cpa_test_folder_remove(&folder);
}

static const cpa_test tests[] = {
    {"a slot has the unit that was stored last", a_slot_has_the_unit_that_was_stored_last},
    {"who opens the folder next finds what was stored", who_opens_the_folder_next_finds_what_was_stored},
    {"after a crash the last index is there", after_a_crash_the_last_index_is_there},
    {"a damaged block does not come back", a_damaged_block_does_not_come_back},
    {"a block that was damaged in memory is not stored", a_block_that_was_damaged_in_memory_is_not_stored},
    {"a damaged index is not used", a_damaged_index_is_not_used},
    {"a folder of another job is refused", a_folder_of_another_job_is_refused},
    {"a folder in use, or not there, is refused", a_folder_in_use_or_not_there_is_refused},
    {"a full disk is told once, and what is there stays", a_full_disk_is_told_once_and_what_is_there_stays},
    {"an index that cannot be written leaves the last one", an_index_that_cannot_be_written_leaves_the_last_one},
    {"many blocks come back together", many_blocks_come_back_together},
    {"both ways leave the same on disk", both_ways_leave_the_same_on_disk},
    {"no load waits for the index", no_load_waits_for_the_index},
    {"the way is told", the_way_is_told},
    {"without the right to io_uring blocks are kept all the same",
     without_the_right_to_io_uring_blocks_are_kept_all_the_same},
};

int main(int argc, char **argv) {
    const int n = (int)(sizeof tests / sizeof tests[0]);
    const int failed = cpa_test_main(argc, argv, "blocks on disk", tests, n);
    no_uring = 1;
    return cpa_test_main(argc, argv, "blocks on disk, without io_uring", tests, n) | failed;
}
