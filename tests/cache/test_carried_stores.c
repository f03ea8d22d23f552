/* Stores over NIXL and Mooncake, whose libraries are opened at run time: parts go from process to process, damaged ones
 * are refused, and what is missing is told in a line. The libraries are stand-ins (nixl_stand_in.c,
 * mooncake_stand_in.c), or the one that CPATTN_TEST_NIXL_LIBRARY names. The other process is this program again. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "src/cache/parcel.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROW_BYTES = 1000, KEPT = 12, DAMAGED = 5, STORE_BYTES = 1 << 20 };

static const char *nixl_library(void) {
    const char *named = getenv("CPATTN_TEST_NIXL_LIBRARY");
    return named ? named : NIXL_STAND_IN;
}

/* ---- parts ---- */

static cpa_block_key key_of(int number) {
    cpa_block_key key = {.group = number % 2, .part = number % 3};
    for (size_t i = 0; i < sizeof key.digest; i++) key.digest[i] = (uint8_t)(number * 101 + (int)i * 29);
    return key;
}

static uint32_t bits_of(int number) {
    return (1U << (1 + number % 16)) - 1;
}

/* A sealed part, or one that has changed since. */
static cpa_status put(const cpa_block_store *store, int number, cpa_error *err) {
    const cpa_block_key key = key_of(number);
    const cpa_part part = {3, bits_of(number), ROW_BYTES};
    uint8_t *bytes = malloc((size_t)cpa_part_bytes(&part));
    memset(bytes, number, (size_t)cpa_part_bytes(&part));
    if (!cpa_part_seal(&key, &part, bytes)) abort();
    if (number == DAMAGED) bytes[CPA_PART_HEADER_BYTES + 7] ^= 1;
    const cpa_status status = store->put(store->ctx, &key, bytes, cpa_part_bytes(&part), err);
    free(bytes);
    return status;
}

typedef enum outcome { ABSENT, WHOLE, REFUSED, FAILED } outcome;

static outcome get(const cpa_block_store *store, int number) {
    const cpa_block_key key = key_of(number);
    const int64_t most = cpa_part_most_bytes(ROW_BYTES);
    uint8_t *bytes = malloc((size_t)most);
    int64_t n = -1;
    cpa_part part;
    cpa_error err = {CPA_OK, ""};
    outcome result = WHOLE;
    if (store->get(store->ctx, &key, bytes, most, &n, &err) != CPA_OK || n > most)
        result = FAILED;
    else if (n == 0)
        result = ABSENT;
    else if (cpa_part_open(&key, ROW_BYTES, bytes, n, &part, &err) != CPA_OK)
        result = REFUSED;
    else if (part.bits != bits_of(number) || bytes[CPA_PART_HEADER_BYTES] != (uint8_t)number)
        result = FAILED;
    if (result == FAILED) printf("part %d: %s\n", number, err.message);
    free(bytes);
    return result;
}

/* All that are put are there, the damaged one is refused, and no other is there. */
static int count_wrong(const cpa_block_store *store) {
    int wrong = get(store, KEPT) != ABSENT;
    for (int i = 0; i < KEPT; i++) wrong += get(store, i) != (i == DAMAGED ? REFUSED : WHOLE);
    return wrong;
}

/* ---- stores ---- */

static cpa_status make_nixl(const char *folder, int64_t bytes, cpa_nixl_store **out, cpa_block_store *table,
                            cpa_error *err) {
    const cpa_nixl_options options = {
        .size = sizeof options, .folder = folder, .bytes = bytes, .library = nixl_library()};
    const cpa_status status = cpa_nixl_store_create(&options, out, err);
    if (status == CPA_OK) cpa_nixl_store_table(*out, table);
    return status;
}

static cpa_mooncake_options mooncake_options(const char *folder) {
    return (cpa_mooncake_options){.size = sizeof(cpa_mooncake_options),
                                  .local_hostname = "localhost",
                                  .metadata_server = "P2PHANDSHAKE",
                                  .master_server = folder,
                                  .library = MOONCAKE_STAND_IN};
}

static cpa_status make_mooncake(const char *folder, cpa_mooncake_store **out, cpa_block_store *table, cpa_error *err) {
    const cpa_mooncake_options options = mooncake_options(folder);
    const cpa_status status = cpa_mooncake_store_create(&options, out, err);
    if (status == CPA_OK) cpa_mooncake_store_table(*out, table);
    return status;
}

/* ---- the other process ---- */

typedef struct other {
    pid_t process;
    int to, from;
} other;

static other start(const char *role, const char *folder) {
    int down[2], up[2];
    other o = {.process = -1};
    CU_ASSERT_EQUAL_FATAL(pipe(down), 0);
    CU_ASSERT_EQUAL_FATAL(pipe(up), 0);
    o.process = fork();
    if (o.process == 0) {
        dup2(down[0], 0);
        dup2(up[1], 1);
        for (int fd = 3; fd < 64; fd++) close(fd);
        execl("/proc/self/exe", "test_carried_stores", "--other", role, folder, (char *)NULL);
        _exit(99);
    }
    close(down[0]);
    close(up[1]);
    o.to = down[1];
    o.from = up[0];
    return o;
}

/* Until it says that it is there. */
static void wait_for(const other *o) {
    char byte = 0;
    CU_ASSERT_EQUAL(read(o->from, &byte, 1), 1);
    CU_ASSERT_EQUAL(byte, '!');
}

static int finish(const other *o) {
    int status = 0;
    close(o->to);
    waitpid(o->process, &status, 0);
    close(o->from);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 98;
}

/* Puts all parts, says so, and stays until it is told to end. */
static int play_owner(const char *folder) {
    cpa_nixl_store *store;
    cpa_block_store table;
    cpa_error err = {CPA_OK, ""};
    char byte;
    int wrong = 0;
    if (make_nixl(folder, STORE_BYTES, &store, &table, &err) != CPA_OK) {
        fprintf(stderr, "%s\n", err.message);
        return 97;
    }
    for (int i = 0; i < KEPT; i++) wrong += put(&table, i, NULL) != CPA_OK;
    if (write(1, "!", 1) != 1 || read(0, &byte, 1) != 0) wrong++;
    cpa_nixl_store_destroy(store);
    return wrong;
}

static int play_reader_of_mooncake(const char *folder) {
    cpa_mooncake_store *store;
    cpa_block_store table;
    if (make_mooncake(folder, &store, &table, NULL) != CPA_OK) return 97;
    const int wrong = count_wrong(&table);
    cpa_mooncake_store_destroy(store);
    return wrong;
}

/* ---- NIXL ---- */

static int count_files(const cpa_test_folder *folder) {
    DIR *files = opendir(folder->path);
    int n = 0;
    for (struct dirent *file = readdir(files); file; file = readdir(files)) n += file->d_name[0] != '.';
    closedir(files);
    return n;
}

static void parts_are_read_from_the_memory_of_other_processes(void) {
    const cpa_test_folder folder = cpa_test_folder_make();
    cpa_nixl_store *store;
    cpa_block_store table;
    cpa_error err = {CPA_OK, ""};
    if (make_nixl(folder.path, 0, &store, &table, &err) != CPA_OK) printf("%s\n", err.message);
    CU_ASSERT_EQUAL_FATAL(err.status, CPA_OK);
    CU_ASSERT_EQUAL(get(&table, 0), ABSENT); /* nobody is there yet */
    const other owners[2] = {start("owner", folder.path), start("owner", folder.path)};
    for (int i = 0; i < 2; i++) wait_for(&owners[i]);
    CU_ASSERT_EQUAL(count_wrong(&table), 0);
    CU_ASSERT_EQUAL(put(&table, 1, &err), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "created without memory for parts"));
    CU_ASSERT_EQUAL(count_files(&folder), 2);
    for (int i = 0; i < 2; i++) CU_ASSERT_EQUAL(finish(&owners[i]), 0);
    CU_ASSERT_EQUAL(count_files(&folder), 0);
    cpa_nixl_store_destroy(store);
    cpa_test_folder_remove(&folder);
}

static char said[4][512];
static int n_said;

static void hear(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx, (void)level;
    if (n_said < 4) snprintf(said[n_said], sizeof said[0], "%s", line);
    n_said++;
}

/* One that was killed leaves its file behind: it counts as none, and is spoken of once. */
static void a_process_that_was_killed_is_asked_no_more(void) {
    const cpa_test_folder folder = cpa_test_folder_make();
    cpa_nixl_store *store;
    cpa_block_store table;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL_FATAL(make_nixl(folder.path, STORE_BYTES, &store, &table, &err), CPA_OK);
    const other killed = start("owner", folder.path);
    wait_for(&killed);
    CU_ASSERT_EQUAL(get(&table, 1), WHOLE);
    kill(killed.process, SIGKILL);
    CU_ASSERT_EQUAL(finish(&killed), 98);
    n_said = 0;
    cpa_log_set(hear, NULL, CPA_LOG_WARN);
    for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL(get(&table, 2), ABSENT);
    CU_ASSERT_EQUAL(put(&table, 2, NULL), CPA_OK);
    CU_ASSERT_EQUAL(get(&table, 2), WHOLE);
    cpa_test_folder_write(&folder, "cpattn-1.nixl", "not a description of an agent", 29);
    cpa_test_folder_write(&folder, "notes.txt", "nothing", 7);
    for (int i = 0; i < 2; i++) CU_ASSERT_EQUAL(get(&table, 3), ABSENT);
    cpa_log_set(NULL, NULL, CPA_LOG_WARN);
    CU_ASSERT_EQUAL(n_said, 2);
    CU_ASSERT_PTR_NOT_NULL(strstr(said[0], "nothing is read from agent cpattn-"));
    CU_ASSERT_PTR_NOT_NULL(strstr(said[1], "begins with 20746f6e"));
    cpa_nixl_store_destroy(store);
    cpa_test_folder_remove(&folder);
}

static void expect_of_nixl(cpa_nixl_options options, cpa_status status, const char *line) {
    cpa_nixl_store *store = NULL;
    cpa_error err = {CPA_OK, ""};
    options.size = sizeof options;
    CU_ASSERT_EQUAL(cpa_nixl_store_create(&options, &store, &err), status);
    if (!strstr(err.message, line)) printf("found: %s\nexpected: %s\n", err.message, line);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, line));
    CU_ASSERT_PTR_NULL(store);
}

static void what_nixl_lacks_is_told(void) {
    const cpa_test_folder folder = cpa_test_folder_make();
    const char *path = folder.path, *library = nixl_library();
    expect_of_nixl((cpa_nixl_options){.folder = path, .library = "libnixl_that_is_not_there.so"}, CPA_UNSUPPORTED,
                   "nixl store: cannot load its library (libnixl_that_is_not_there.so: cannot open");
    expect_of_nixl((cpa_nixl_options){.folder = path, .library = "libc.so.6"}, CPA_UNSUPPORTED,
                   "nixl store: libc.so.6 has no function nixl_capi_create_agent");
    expect_of_nixl((cpa_nixl_options){.folder = path, .library = library, .backend = "PIGEON"}, CPA_COMM, "PIGEON");
    expect_of_nixl((cpa_nixl_options){.folder = path, .library = library, .bytes = 100}, CPA_INVALID,
                   "bytes is 100, expected 0, or 16384 or more");
    expect_of_nixl((cpa_nixl_options){.library = library}, CPA_INVALID, "folder is NULL");
    expect_of_nixl((cpa_nixl_options){.folder = "/nowhere/at/all", .library = library}, CPA_IO,
                   "/nowhere/at/all cannot be opened");
    setenv("NIXL_STAND_IN_IS_STUB", "1", 1);
    if (library == (const char *)NIXL_STAND_IN)
        expect_of_nixl((cpa_nixl_options){.folder = path, .library = library}, CPA_UNSUPPORTED, "is a stub of NIXL");
    unsetenv("NIXL_STAND_IN_IS_STUB");
    CU_ASSERT_EQUAL(count_files(&folder), 0);
    cpa_test_folder_remove(&folder);
}

/* ---- Mooncake ---- */

static void parts_are_objects_of_mooncake(void) {
    const cpa_test_folder folder = cpa_test_folder_make();
    cpa_mooncake_store *store;
    cpa_block_store table;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL_FATAL(make_mooncake(folder.path, &store, &table, &err), CPA_OK);
    for (int i = 0; i < KEPT; i++) CU_ASSERT_EQUAL(put(&table, i, &err), CPA_OK);
    CU_ASSERT_EQUAL(put(&table, 1, &err), CPA_OK);
    CU_ASSERT_EQUAL(count_wrong(&table), 0);
    const other reader = start("mooncake", folder.path);
    CU_ASSERT_EQUAL(finish(&reader), 0);
    /* Longer than what there is room for, and longer than the memory that was registered first. */
    const cpa_block_key key = key_of(100);
    const int64_t n = 6 << 20;
    char little[2] = "", *large = malloc((size_t)n), *back = malloc((size_t)n);
    int64_t found;
    for (int64_t i = 0; i < n; i++) large[i] = (char)(i * 7 + i / 251);
    CU_ASSERT_EQUAL(table.put(table.ctx, &key, large, n, &err), CPA_OK);
    CU_ASSERT_EQUAL(table.get(table.ctx, &key, little, 2, &found, &err), CPA_OK);
    CU_ASSERT_EQUAL(found, n);
    CU_ASSERT_EQUAL(little[0], 0);
    CU_ASSERT_EQUAL(table.get(table.ctx, &key, back, n, &found, &err), CPA_OK);
    CU_ASSERT_EQUAL(found, n);
    CU_ASSERT_EQUAL(memcmp(large, back, (size_t)n), 0);
    free(back);
    free(large);
    cpa_mooncake_store_destroy(store);
    cpa_test_folder_remove(&folder);
    CU_ASSERT_EQUAL(make_mooncake(folder.path, &store, &table, &err), CPA_COMM);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "client localhost does not reach master"));
}

static void expect_of_mooncake(const cpa_mooncake_options *options, cpa_status status, const char *line) {
    cpa_mooncake_store *store = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_mooncake_store_create(options, &store, &err), status);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, line));
    CU_ASSERT_PTR_NULL(store);
}

static void what_mooncake_lacks_is_told(void) {
    cpa_mooncake_options options = mooncake_options("/tmp");
    options.library = "libmooncake_that_is_not_there.so";
    expect_of_mooncake(&options, CPA_UNSUPPORTED,
                       "mooncake store: cannot load its library (libmooncake_that_is_not_there");
    options = mooncake_options(NULL);
    expect_of_mooncake(&options, CPA_INVALID, "mooncake store: master_server is NULL");
    options = mooncake_options("/tmp");
    options.segment_bytes = -1;
    expect_of_mooncake(&options, CPA_INVALID, "segment_bytes is -1, buffer_bytes 0; expected 0 or more");
}

static const cpa_test tests[] = {
    {"parts are read from the memory of other processes", parts_are_read_from_the_memory_of_other_processes},
    {"a process that was killed is asked no more", a_process_that_was_killed_is_asked_no_more},
    {"what NIXL lacks is told", what_nixl_lacks_is_told},
    {"parts are objects of Mooncake", parts_are_objects_of_mooncake},
    {"what Mooncake lacks is told", what_mooncake_lacks_is_told},
};

int main(int argc, char **argv) {
    /* Without what libraries do at the end of a process: those of a real NIXL may not get on with others there. */
    if (argc == 4 && strcmp(argv[1], "--other") == 0)
        _exit(strcmp(argv[2], "owner") == 0 ? play_owner(argv[3]) : play_reader_of_mooncake(argv[3]));
    return cpa_test_main(argc, argv, "carried stores", tests, (int)(sizeof tests / sizeof tests[0]));
}
