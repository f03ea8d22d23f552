/* Parts of parcels, and the stores that keep them: in memory, through a pipe, in a folder; what was changed on the way
 * is refused. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "src/cache/parcel.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROW_BYTES = 24 };

static cpa_block_key key_of(int number) {
    cpa_block_key key = {.group = number % 3, .part = number % 5};
    memset(key.digest, number + 1, sizeof key.digest);
    return key;
}

/* A sealed part with five rows; free() it. */
static uint8_t *make_part(const cpa_block_key *key, cpa_part *part) {
    *part = (cpa_part){6, 0x8113, ROW_BYTES};
    uint8_t *bytes = malloc((size_t)cpa_part_bytes(part));
    for (int i = 0; i < cpa_part_rows(part) * ROW_BYTES; i++) bytes[CPA_PART_HEADER_BYTES + i] = (uint8_t)(7 * i);
    CU_ASSERT(cpa_part_seal(key, part, bytes));
    return bytes;
}

static void a_part_is_refused_with_any_byte_changed(void) {
    const cpa_block_key key = key_of(4);
    cpa_part part, found;
    cpa_error err = {CPA_OK, ""};
    uint8_t *bytes = make_part(&key, &part);
    const int64_t n = cpa_part_bytes(&part);
    CU_ASSERT_EQUAL(cpa_part_rows(&part), 5);
    CU_ASSERT_EQUAL(cpa_part_open(&key, ROW_BYTES, bytes, n, &found, &err), CPA_OK);
    CU_ASSERT_EQUAL(found.parts, 6);
    CU_ASSERT_EQUAL(found.bits, 0x8113);
    for (int64_t i = 0; i < n; i++) {
        bytes[i] ^= 0x10;
        CU_ASSERT_EQUAL(cpa_part_open(&key, ROW_BYTES, bytes, n, &found, &err), CPA_INVALID);
        bytes[i] ^= 0x10;
    }
    for (int64_t less = 1; less <= n; less++)
        CU_ASSERT_EQUAL(cpa_part_open(&key, ROW_BYTES, bytes, n - less, &found, &err), CPA_INVALID);
    free(bytes);
}

static void a_part_is_refused_by_another_key_or_for_other_rows(void) {
    const cpa_block_key key = key_of(4);
    cpa_part part, found;
    uint8_t *bytes = make_part(&key, &part);
    const int64_t n = cpa_part_bytes(&part);
    cpa_block_key others[] = {key, key, key};
    others[0].digest[31] ^= 1;
    others[1].group++;
    others[2].part++;
    for (int i = 0; i < 3; i++)
        CU_ASSERT_EQUAL(cpa_part_open(&others[i], ROW_BYTES, bytes, n, &found, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_part_open(&key, ROW_BYTES + 8, bytes, n, &found, NULL), CPA_INVALID);
    free(bytes);
}

static void digests_of_parcels_depend_on_all_before(void) {
    const uint32_t tokens[CPA_PARCEL_TOKENS] = {1, 2, 3};
    cpa_prefix_digest root, other, a, b;
    CU_ASSERT(cpa_parcel_root("shape", "model", NULL, 7, &root));
    CU_ASSERT(cpa_parcel_root("shape", "", "model", 7, &other));
    CU_ASSERT(memcmp(&root, &other, sizeof root) != 0);
    CU_ASSERT(cpa_parcel_root("shape", "model", NULL, 8, &other));
    CU_ASSERT(memcmp(&root, &other, sizeof root) != 0);
    CU_ASSERT(cpa_parcel_link(&root, tokens, CPA_PARCEL_TOKENS, &a));
    CU_ASSERT(cpa_parcel_link(&other, tokens, CPA_PARCEL_TOKENS, &b));
    CU_ASSERT(memcmp(&a, &b, sizeof a) != 0);
    CU_ASSERT(cpa_parcel_link(&root, tokens, 3, &b));
    CU_ASSERT(memcmp(&a, &b, sizeof a) != 0);
    CU_ASSERT_EQUAL(cpa_parcels(0), 0);
    CU_ASSERT_EQUAL(cpa_parcels(CPA_PARCEL_TOKENS), 1);
    CU_ASSERT_EQUAL(cpa_parcels(CPA_PARCEL_TOKENS + 1), 2);
}

/* What a store has of a key is that text, or nothing for NULL. */
static void expect(const cpa_block_store *store, const cpa_block_key *key, const char *text) {
    char found[64] = "";
    int64_t n = -1;
    CU_ASSERT_EQUAL(store->get(store->ctx, key, found, sizeof found, &n, NULL), CPA_OK);
    CU_ASSERT_EQUAL(n, text ? (int64_t)strlen(text) : 0);
    if (text) CU_ASSERT_NSTRING_EQUAL(found, text, strlen(text));
}

static void check_store(const cpa_block_store *store) {
    const cpa_block_key a = key_of(1), b = key_of(2);
    char little[2] = "";
    int64_t n;
    expect(store, &a, NULL);
    CU_ASSERT_EQUAL(store->put(store->ctx, &a, "first", 5, NULL), CPA_OK);
    CU_ASSERT_EQUAL(store->put(store->ctx, &b, "second", 6, NULL), CPA_OK);
    expect(store, &a, "first");
    CU_ASSERT_EQUAL(store->put(store->ctx, &a, "again", 5, NULL), CPA_OK);
    expect(store, &a, "again");
    expect(store, &b, "second");
    CU_ASSERT_EQUAL(store->get(store->ctx, &b, little, sizeof little, &n, NULL), CPA_OK);
    CU_ASSERT_EQUAL(n, 6);
    CU_ASSERT_EQUAL(little[0], 0);
}

static void stores_give_back_what_was_put_last(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_memory_store *memory;
    cpa_folder_store *files;
    cpa_block_store store;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(0, &memory, &err), CPA_OK);
    cpa_memory_store_table(memory, &store);
    check_store(&store);
    CPA_ASSERT_ORDER(cpa_memory_store_bytes(memory), >, 11);
    cpa_memory_store_destroy(memory);
    CU_ASSERT_EQUAL_FATAL(cpa_folder_store_create(folder.path, &files, &err), CPA_OK);
    cpa_folder_store_table(files, &store);
    check_store(&store);
    cpa_folder_store_destroy(files);
    cpa_test_folder_remove(&folder);
    CU_ASSERT_EQUAL(cpa_folder_store_create(folder.path, &files, &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, folder.path));
}

/* What a part of n bytes counts in a memory store. */
static int64_t bytes_of_a_part(int64_t n) {
    static const char part[4096];
    const cpa_block_key key = key_of(1);
    cpa_memory_store *memory;
    cpa_block_store store;
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(0, &memory, NULL), CPA_OK);
    cpa_memory_store_table(memory, &store);
    CU_ASSERT_EQUAL(store.put(store.ctx, &key, part, n, NULL), CPA_OK);
    const int64_t bytes = cpa_memory_store_bytes(memory);
    cpa_memory_store_destroy(memory);
    return bytes;
}

static void a_memory_store_forgets_the_oldest(void) {
    cpa_memory_store *memory;
    cpa_block_store store;
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(2 * bytes_of_a_part(5), &memory, NULL), CPA_OK);
    cpa_memory_store_table(memory, &store);
    for (int i = 0; i < 3; i++) {
        const cpa_block_key key = key_of(i);
        CU_ASSERT_EQUAL(store.put(store.ctx, &key, "12345", 5, NULL), CPA_OK);
    }
    const cpa_block_key first = key_of(0), last = key_of(2);
    expect(&store, &first, NULL);
    expect(&store, &last, "12345");
    CU_ASSERT_EQUAL(cpa_memory_store_bytes(memory), 2 * bytes_of_a_part(5));
    cpa_memory_store_destroy(memory);
}

static void a_memory_store_forgets_nothing_for_what_it_cannot_keep(void) {
    static const char part[4096];
    const cpa_block_key kept = key_of(1), large = key_of(2);
    const int64_t bound = bytes_of_a_part(1000);
    cpa_memory_store *memory, *from;
    cpa_block_store store, source;
    cpa_error err = {CPA_OK, ""};
    int ends[2];
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(bound, &memory, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(0, &from, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(pipe(ends), 0);
    cpa_memory_store_table(memory, &store);
    cpa_memory_store_table(from, &source);
    CU_ASSERT_EQUAL(store.put(store.ctx, &kept, "12345", 5, NULL), CPA_OK);
    CU_ASSERT_EQUAL(store.put(store.ctx, &large, part, 1001, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "1001 bytes"));
    expect(&store, &kept, "12345");
    CU_ASSERT_EQUAL(source.put(source.ctx, &large, part, sizeof part, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_memory_store_send(from, ends[1], NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_memory_store_receive(memory, ends[0], &err), CPA_INVALID);
    expect(&store, &kept, "12345");
    CU_ASSERT_EQUAL(store.put(store.ctx, &large, part, 1000, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_memory_store_bytes(memory), bound);
    close(ends[0]);
    close(ends[1]);
    cpa_memory_store_destroy(memory);
    cpa_memory_store_destroy(from);
}

static void a_memory_store_goes_through_a_pipe(void) {
    cpa_memory_store *from, *to;
    cpa_block_store store;
    int ends[2];
    cpa_error err = {CPA_OK, ""};
    const cpa_block_key a = key_of(1), b = key_of(2);
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(0, &from, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(0, &to, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(pipe(ends), 0);
    cpa_memory_store_table(from, &store);
    store.put(store.ctx, &a, "first", 5, NULL);
    store.put(store.ctx, &b, "second", 6, NULL);
    CU_ASSERT_EQUAL(cpa_memory_store_send(from, ends[1], &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_memory_store_receive(to, ends[0], &err), CPA_OK);
    cpa_memory_store_table(to, &store);
    expect(&store, &a, "first");
    expect(&store, &b, "second");
    /* What is no such stream, and one that is cut in its second part. */
    CU_ASSERT_EQUAL(write(ends[1], "GET / HTTP/1.1\r\n", 16), 16);
    CU_ASSERT_EQUAL(cpa_memory_store_receive(to, ends[0], &err), CPA_IO);
    close(ends[0]);
    close(ends[1]);
    CU_ASSERT_EQUAL_FATAL(pipe(ends), 0);
    CU_ASSERT_EQUAL(cpa_memory_store_send(from, ends[1], &err), CPA_OK);
    char bytes[4096];
    const ssize_t n = read(ends[0], bytes, sizeof bytes);
    CU_ASSERT_EQUAL(write(ends[1], bytes, (size_t)n - 50), n - 50);
    close(ends[1]);
    CU_ASSERT_EQUAL(cpa_memory_store_receive(to, ends[0], &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "before the end of a part"));
    close(ends[0]);
    cpa_memory_store_destroy(from);
    cpa_memory_store_destroy(to);
}

/* One end of a pipe, and the store that writes to it or takes in what comes. */
typedef struct stream {
    cpa_memory_store *store;
    int fd;
    cpa_status status;
} stream;

static void *send_stream(void *arg) {
    stream *s = arg;
    s->status = cpa_memory_store_send(s->store, s->fd, NULL);
    return NULL;
}

static void *receive_stream(void *arg) {
    stream *s = arg;
    s->status = cpa_memory_store_receive(s->store, s->fd, NULL);
    return NULL;
}

/* Each has more than a pipe holds, so that neither is done before the other has taken something in. */
static void stores_send_to_each_other_at_once(void) {
    enum { PARTS = 40, BYTES = 16384 };
    static const char part[BYTES] = "a part";
    cpa_memory_store *stores[2];
    stream streams[4];
    pthread_t threads[4];
    for (int i = 0; i < 2; i++) {
        cpa_block_store table;
        int ends[2];
        CU_ASSERT_EQUAL_FATAL(cpa_memory_store_create(0, &stores[i], NULL), CPA_OK);
        CU_ASSERT_EQUAL_FATAL(pipe(ends), 0);
        cpa_memory_store_table(stores[i], &table);
        for (int j = 0; j < PARTS; j++) {
            const cpa_block_key key = key_of(i * PARTS + j);
            CU_ASSERT_EQUAL(table.put(table.ctx, &key, part, BYTES, NULL), CPA_OK);
        }
        streams[i] = (stream){.store = stores[i], .fd = ends[1]};
        streams[3 - i] = (stream){.fd = ends[0]};
    }
    for (int i = 0; i < 2; i++) streams[3 - i].store = stores[1 - i];
    for (int i = 0; i < 4; i++)
        CU_ASSERT_EQUAL_FATAL(pthread_create(&threads[i], NULL, i < 2 ? send_stream : receive_stream, &streams[i]), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CU_ASSERT_EQUAL(streams[i].status, CPA_OK);
        close(streams[i].fd);
    }
    CU_ASSERT_EQUAL(cpa_memory_store_bytes(stores[0]), cpa_memory_store_bytes(stores[1]));
    CPA_ASSERT_ORDER(cpa_memory_store_bytes(stores[0]), >=, 2 * PARTS * BYTES);
    for (int i = 0; i < 2; i++) cpa_memory_store_destroy(stores[i]);
}

enum { ROUNDS = 200, LONG_PART = 1 << 16 };

typedef struct writer {
    cpa_block_store table;
    char letter;
    int failures;
} writer;

/* Puts a part that is all one letter, again and again. */
static void *write_part(void *arg) {
    writer *w = arg;
    const cpa_block_key key = key_of(1);
    char *part = malloc(LONG_PART);
    memset(part, w->letter, LONG_PART);
    for (int i = 0; i < ROUNDS; i++) w->failures += w->table.put(w->table.ctx, &key, part, LONG_PART, NULL) != CPA_OK;
    free(part);
    return NULL;
}

/* Whether what there is by the key is a part as one of them has put it. */
static int reads_whole(const cpa_block_store *table, char *part) {
    const cpa_block_key key = key_of(1);
    int64_t n = 0;
    if (table->get(table->ctx, &key, part, LONG_PART, &n, NULL) != CPA_OK || n != LONG_PART) return 0;
    for (int i = 1; i < LONG_PART; i++)
        if (part[i] != part[0]) return 0;
    return 1;
}

static void threads_put_one_key_into_a_folder(void) {
    const cpa_test_folder folder = cpa_test_folder_make();
    cpa_folder_store *files;
    cpa_block_store table;
    writer writers[2];
    pthread_t threads[2];
    char *part = malloc(LONG_PART);
    int torn = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_folder_store_create(folder.path, &files, NULL), CPA_OK);
    cpa_folder_store_table(files, &table);
    for (int i = 0; i < 2; i++) writers[i] = (writer){.table = table, .letter = (char)('a' + i)};
    write_part(&writers[0]);
    for (int i = 0; i < 2; i++) CU_ASSERT_EQUAL_FATAL(pthread_create(&threads[i], NULL, write_part, &writers[i]), 0);
    for (int i = 0; i < ROUNDS; i++) torn += !reads_whole(&table, part);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    CU_ASSERT_EQUAL(torn, 0);
    CU_ASSERT_EQUAL(writers[0].failures + writers[1].failures, 0);
    cpa_folder_store_destroy(files);
    cpa_test_folder_remove(&folder);
    free(part);
}

static const cpa_test tests[] = {
    {"a part is refused with any byte changed", a_part_is_refused_with_any_byte_changed},
    {"a part is refused by another key or for other rows", a_part_is_refused_by_another_key_or_for_other_rows},
    {"digests of parcels depend on all before", digests_of_parcels_depend_on_all_before},
    {"stores give back what was put last", stores_give_back_what_was_put_last},
    {"a memory store forgets the oldest", a_memory_store_forgets_the_oldest},
    {"a memory store forgets nothing for what it cannot keep", a_memory_store_forgets_nothing_for_what_it_cannot_keep},
    {"a memory store goes through a pipe", a_memory_store_goes_through_a_pipe},
    {"stores send to each other at once", stores_send_to_each_other_at_once},
    {"threads put one key into a folder", threads_put_one_key_into_a_folder},
};

CPA_TEST_MAIN("block stores", tests)
