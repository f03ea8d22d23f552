/* Blocks that go from one process of a host to another through memory of a device: by their ids, and by digest. The
 * other process is this program again, which has opened no device before. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cpattn/blocks.h>

#include "kernels/block_layout.h"
#include "src/cache/parcel.h"
#include "src/cache/part_region.h"
#include "src/ops/shared_memory.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { LAYERS = 2, BLOCKS = 6, BLOCK_SIZE = 16, MOVED = 3, ROW_BYTES = 256, REGION_BYTES = 1 << 18 };

static const cpa_attention_shape SHAPE = {.q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 32, .kv_dtype = CPA_BF16};

/* ---- the other process ---- */

typedef struct other {
    pid_t process;
    int pipe; /* what is written there it reads */
} other;

/* Starts this program with a role; it has the handle first of all. */
static other start(const char *role, const cpa_shared_memory *memory) {
    cpa_shared_memory_handle handle;
    int ends[2];
    char number[16];
    other o = {.process = -1};
    CU_ASSERT_EQUAL_FATAL(pipe(ends), 0);
    snprintf(number, sizeof number, "%d", ends[0]);
    o.process = fork();
    if (o.process == 0) {
        close(ends[1]);
        execl("/proc/self/exe", "test_shared_memory", "--other", role, number, (char *)NULL);
        _exit(99);
    }
    close(ends[0]);
    o.pipe = ends[1];
    cpa_shared_memory_get_handle(memory, &handle);
    CU_ASSERT_EQUAL(write(o.pipe, &handle, sizeof handle), (ssize_t)sizeof handle);
    return o;
}

/* How many things it found wrong. */
static int finish(const other *o) {
    int status = 0;
    close(o->pipe);
    waitpid(o->process, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 98;
}

/* ---- by ids ---- */

typedef struct cache {
    cpa_kv_view views[LAYERS];
    void *memory[LAYERS];
} cache;

/* Blocks of bytes that depend on the layer, or of zeros. */
static cache make_cache(cpa_kv_layout layout, int filled, cpa_stream *stream) {
    cache c;
    cpa_attention_shape shape = SHAPE;
    shape.layout = layout;
    const cpa_block_layout l = cpa_block_layout_of(&shape, BLOCK_SIZE);
    const int64_t bytes = l.bytes * BLOCKS;
    char *content = calloc(1, (size_t)bytes);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int64_t i = 0; i < bytes && filled; i++) content[i] = (char)(i * 37 + i / 250 + layer);
        c.memory[layer] = cpa_test_upload(stream, content, bytes);
        c.views[layer] = cpa_block_layout_view(&l, c.memory[layer], BLOCKS, 0);
    }
    free(content);
    return c;
}

static void discard(cache *c, cpa_stream *stream) {
    for (int i = 0; i < LAYERS; i++) cpa_test_free(stream, c->memory[i]);
}

static cpa_blocks_args args_of(const cache *c, const int32_t *ids, void *rows, int on_device) {
    return (cpa_blocks_args){.size = sizeof(cpa_blocks_args),
                             .layers = c->views,
                             .n_layers = LAYERS,
                             .ids = ids,
                             .n = MOVED,
                             .rows = rows,
                             .rows_on_device = on_device};
}

static const int32_t FROM[MOVED] = {4, 0, 3}, TO[MOVED] = {1, 5, 2};

static int64_t rows_bytes(const cache *c) {
    return MOVED * BLOCK_SIZE * cpa_blocks_row_bytes(c->views, LAYERS);
}

/* Imports into blocks of another layout and other numbers, and compares with rows of a cache like the first's. */
static int take_rows(cpa_device *device, cpa_stream *stream, const cpa_shared_memory *memory) {
    cache like = make_cache(CPA_TOKEN_MAJOR, 1, stream), into = make_cache(CPA_HEAD_MAJOR, 0, stream);
    const int64_t bytes = rows_bytes(&like);
    char *expected = malloc((size_t)bytes), *found = malloc((size_t)bytes);
    cpa_blocks_args args = args_of(&into, TO, cpa_shared_memory_address(memory), 1);
    int wrong = bytes > cpa_shared_memory_bytes(memory);
    (void)device;
    wrong += !wrong && cpa_blocks_import(&args, stream) != CPA_OK;
    args = args_of(&into, TO, found, 0);
    wrong += cpa_blocks_export(&args, stream) != CPA_OK;
    args = args_of(&like, FROM, expected, 0);
    wrong += cpa_blocks_export(&args, stream) != CPA_OK;
    wrong += memcmp(found, expected, (size_t)bytes) != 0;
    discard(&like, stream);
    discard(&into, stream);
    free(expected);
    free(found);
    return wrong;
}

static void blocks_go_to_another_process_by_their_ids(void) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_shared_memory *memory;
    cpa_error err = {CPA_OK, ""};
    cpa_test_device_open(1, &device, &stream);
    cache c = make_cache(CPA_TOKEN_MAJOR, 1, stream);
    if (cpa_shared_memory_create(device, rows_bytes(&c), &memory, &err) != CPA_OK) printf("%s\n", err.message);
    CU_ASSERT_EQUAL_FATAL(err.status, CPA_OK);
    const cpa_blocks_args args = args_of(&c, FROM, cpa_shared_memory_address(memory), 1);
    CU_ASSERT_EQUAL(cpa_blocks_export(&args, stream), CPA_OK);
    const other o = start("rows", memory);
    CU_ASSERT_EQUAL(finish(&o), 0);
    cpa_shared_memory_destroy(memory);
    discard(&c, stream);
    cpa_test_device_close(device, stream);
}

/* ---- by digest ---- */

static cpa_block_key key_of(int number) {
    cpa_block_key key = {.group = number % 2, .part = number % 3};
    for (size_t i = 0; i < sizeof key.digest; i++) key.digest[i] = (uint8_t)(number * 101 + (int)i * 29 + number / 256);
    return key;
}

/* A sealed part of that number, with as many rows as it has; its rows are all of one byte. */
static int64_t make_part(int number, uint8_t *bytes) {
    const cpa_block_key key = key_of(number);
    const cpa_part part = {3, (1U << (1 + number % 16)) - 1, ROW_BYTES};
    memset(bytes, number, (size_t)cpa_part_bytes(&part));
    if (!cpa_part_seal(&key, &part, bytes)) abort();
    return cpa_part_bytes(&part);
}

static uint8_t *part_memory(void) {
    return malloc((size_t)cpa_part_most_bytes(ROW_BYTES));
}

static cpa_status put(const cpa_block_store *store, int number) {
    const cpa_block_key key = key_of(number);
    uint8_t *bytes = part_memory();
    const cpa_status status = store->put(store->ctx, &key, bytes, make_part(number, bytes), NULL);
    free(bytes);
    return status;
}

typedef enum outcome { ABSENT, WHOLE, REFUSED, FAILED } outcome;

/* What the store has of a part, its digest checked. */
static outcome get(const cpa_block_store *store, int number) {
    const cpa_block_key key = key_of(number);
    uint8_t *bytes = part_memory();
    const int64_t most = cpa_part_most_bytes(ROW_BYTES);
    int64_t n = -1;
    cpa_part part;
    outcome result = FAILED;
    if (store->get(store->ctx, &key, bytes, most, &n, NULL) == CPA_OK && n <= most)
        result = n == 0 ? ABSENT : cpa_part_open(&key, ROW_BYTES, bytes, n, &part, NULL) != CPA_OK ? REFUSED : WHOLE;
    if (result == WHOLE &&
        (part.bits != (1U << (1 + number % 16)) - 1 || bytes[CPA_PART_HEADER_BYTES] != (uint8_t)number))
        result = FAILED;
    free(bytes);
    return result;
}

enum { KEPT = 20, DAMAGED = 7, ROUNDS = 3000 };

/* All parts are there but the damaged one, which its digest refuses; and nothing can be put. */
static int take_parts(const cpa_block_store *store) {
    int wrong = 0;
    for (int i = 0; i < KEPT; i++) wrong += get(store, i) != (i == DAMAGED ? REFUSED : WHOLE);
    wrong += get(store, KEPT) != ABSENT;
    return wrong + (put(store, KEPT) != CPA_UNSUPPORTED);
}

/* Reads what is being written over: no part is another's, and most are read whole. */
static int take_while_written(const cpa_block_store *store) {
    int counts[4] = {0};
    for (int round = 0; round < ROUNDS; round++) counts[get(store, round % KEPT)]++;
    if (counts[FAILED] > 0 || counts[WHOLE] < ROUNDS / 20)
        printf("absent %d, whole %d, refused %d, failed %d\n", counts[ABSENT], counts[WHOLE], counts[REFUSED],
               counts[FAILED]);
    return counts[FAILED] > 0 || counts[WHOLE] < ROUNDS / 20;
}

typedef struct owner {
    cpa_device *device;
    cpa_stream *stream;
    cpa_shared_memory *memory;
    cpa_shared_store *store;
    cpa_block_store table;
} owner;

static owner make_owner(int64_t bytes) {
    owner o;
    cpa_error err = {CPA_OK, ""};
    cpa_test_device_open(1, &o.device, &o.stream);
    CU_ASSERT_EQUAL_FATAL(cpa_shared_memory_create(o.device, bytes, &o.memory, &err), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_shared_store_create(o.memory, &o.store, &err), CPA_OK);
    cpa_shared_store_table(o.store, &o.table);
    return o;
}

static void end_owner(owner *o) {
    cpa_shared_store_destroy(o->store);
    cpa_shared_memory_destroy(o->memory);
    cpa_test_device_close(o->device, o->stream);
}

/* Changes a byte of the rows of a part, behind the store's back. */
static void damage(const owner *o, int number) {
    uint8_t *all = malloc(REGION_BYTES), *bytes = part_memory();
    const int64_t n = make_part(number, bytes);
    cpa_test_download(o->stream, all, cpa_shared_memory_address(o->memory), REGION_BYTES);
    uint8_t *at = memmem(all, REGION_BYTES, bytes, (size_t)n);
    CU_ASSERT_PTR_NOT_NULL_FATAL(at);
    at[CPA_PART_HEADER_BYTES + 3] ^= 1;
    o->device->table->copy(cpa_shared_memory_address(o->memory), all, REGION_BYTES, o->stream);
    CU_ASSERT_EQUAL(cpa_stream_sync(o->stream), CPA_OK);
    free(all);
    free(bytes);
}

static void parts_are_read_by_another_process_and_damage_is_refused(void) {
    owner o = make_owner(REGION_BYTES);
    for (int i = 0; i < KEPT; i++) CU_ASSERT_EQUAL(put(&o.table, i), CPA_OK);
    CU_ASSERT_EQUAL(put(&o.table, 3), CPA_OK);
    damage(&o, DAMAGED);
    for (int i = 0; i < KEPT; i++) CU_ASSERT_EQUAL(get(&o.table, i), i == DAMAGED ? REFUSED : WHOLE);
    const other reader = start("parts", o.memory);
    CU_ASSERT_EQUAL(finish(&reader), 0);
    end_owner(&o);
}

static void parts_that_are_written_over_are_never_taken_for_others(void) {
    owner o = make_owner(1 << 15); /* room for some nine parts of 20 */
    const other reader = start("race", o.memory);
    int status = 0;
    for (int i = 0; waitpid(reader.process, &status, WNOHANG) == 0; i++)
        CU_ASSERT_EQUAL(put(&o.table, i % KEPT), CPA_OK);
    CU_ASSERT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(reader.pipe);
    end_owner(&o);
}

static void the_oldest_parts_make_room(void) {
    const int64_t bytes = 1 << 15;
    owner o = make_owner(bytes);
    uint8_t *part = part_memory();
    int64_t newest = 0;
    for (int i = 0; i < 200; i++) {
        CU_ASSERT_EQUAL(put(&o.table, i), CPA_OK);
        CU_ASSERT_EQUAL(get(&o.table, i), WHOLE);
    }
    /* Those from some place on are there, as many as fill more than a half of it. */
    int first = 199;
    while (first >= 0 && get(&o.table, first) == WHOLE) newest += make_part(first--, part);
    CPA_ASSERT_ORDER(newest, >, bytes / 2);
    CPA_ASSERT_ORDER(newest, <, bytes);
    for (int i = 0; i < 100; i++) CU_ASSERT_EQUAL(get(&o.table, i), ABSENT);
    cpa_error err = {CPA_OK, ""};
    const cpa_block_key key = key_of(1);
    char *large = calloc(1, (size_t)bytes);
    CU_ASSERT_EQUAL(o.table.put(o.table.ctx, &key, large, bytes, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "a part of 32768 bytes, expected 1 to"));
    CU_ASSERT_EQUAL(get(&o.table, 199), WHOLE);
    free(large);
    free(part);
    end_owner(&o);
}

/* ---- what goes wrong ---- */

static void what_cannot_be_opened_is_told(void) {
    owner o = make_owner(REGION_BYTES);
    cpa_shared_memory_handle handle;
    cpa_shared_memory *memory = NULL;
    cpa_shared_store *store = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_shared_memory_create(o.device, 0, &memory, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "bytes is 0, expected 1 to 2^60"));
    memset(&handle, 'x', sizeof handle);
    CU_ASSERT_EQUAL(cpa_shared_memory_open(o.device, &handle, &memory, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "the handle begins with 78787878"));
    /* Memory that is gone, and a length that is another one. */
    cpa_shared_memory_get_handle(o.memory, &handle);
    cpa_shared_memory *little;
    CU_ASSERT_EQUAL_FATAL(cpa_shared_memory_create(o.device, 100, &little, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_shared_store_create(little, &store, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "memory of 100 bytes for parts, expected 16384 or more"));
    cpa_shared_memory_get_handle(little, &handle);
    cpa_shared_memory_destroy(little);
    const cpa_status status = cpa_shared_memory_open(o.device, &handle, &memory, &err);
    CU_ASSERT(status == CPA_IO || status == CPA_DEVICE);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "shared memory: "));
    CU_ASSERT_PTR_NULL(memory);
    CU_ASSERT_PTR_NULL(store);
    CU_ASSERT_EQUAL(cpa_shared_memory_bytes(NULL), 0);
    CU_ASSERT_PTR_NULL(cpa_shared_memory_address(NULL));
    end_owner(&o);
}

/* Memory that nobody has made a store of. */
static int take_nothing(const cpa_block_store *store) {
    const cpa_block_key key = key_of(1);
    char bytes[16];
    int64_t n;
    cpa_error err = {CPA_OK, ""};
    const cpa_status status = store->get(store->ctx, &key, bytes, sizeof bytes, &n, &err);
    return status != CPA_IO || !strstr(err.message, "memory of parts begins with 00000000");
}

static void memory_without_a_store_has_no_parts(void) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_shared_memory *memory;
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL_FATAL(cpa_shared_memory_create(device, REGION_BYTES, &memory, NULL), CPA_OK);
    const other reader = start("nothing", memory);
    CU_ASSERT_EQUAL(finish(&reader), 0);
    cpa_shared_memory_destroy(memory);
    cpa_test_device_close(device, stream);
}

/* ---- main ---- */

static int play(const char *role, int in) {
    cpa_shared_memory_handle handle;
    cpa_device *device;
    cpa_stream *stream;
    cpa_shared_memory *memory;
    cpa_shared_store *store;
    cpa_block_store table;
    cpa_error err = {CPA_OK, ""};
    int wrong;
    if (read(in, &handle, sizeof handle) != (ssize_t)sizeof handle) return 97;
    cpa_test_device_open(1, &device, &stream);
    if (cpa_shared_memory_open(device, &handle, &memory, &err) != CPA_OK ||
        cpa_shared_store_create(memory, &store, &err) != CPA_OK) {
        printf("%s\n", err.message);
        return 96;
    }
    cpa_shared_store_table(store, &table);
    if (strcmp(role, "rows") == 0)
        wrong = take_rows(device, stream, memory);
    else if (strcmp(role, "parts") == 0)
        wrong = take_parts(&table);
    else
        wrong = strcmp(role, "race") == 0 ? take_while_written(&table) : take_nothing(&table);
    cpa_shared_store_destroy(store);
    cpa_shared_memory_destroy(memory);
    cpa_test_device_close(device, stream);
    return wrong;
}

static const cpa_test tests[] = {
    {"blocks go to another process by their ids", blocks_go_to_another_process_by_their_ids},
    {"parts are read by another process, and damage is refused",
     parts_are_read_by_another_process_and_damage_is_refused},
    {"parts that are written over are never taken for others", parts_that_are_written_over_are_never_taken_for_others},
    {"the oldest parts make room", the_oldest_parts_make_room},
    {"what cannot be opened is told", what_cannot_be_opened_is_told},
    {"memory without a store has no parts", memory_without_a_store_has_no_parts},
};

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "--other") == 0) return play(argv[2], atoi(argv[3]));
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    return cpa_test_main(argc, argv, "shared memory", tests, (int)(sizeof tests / sizeof tests[0]));
}
