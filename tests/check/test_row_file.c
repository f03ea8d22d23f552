/* Rows in files: what was written is read; whatever else a file holds is refused with one line. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "src/check/cases/row_file.h"
#include "tests/fixtures/unit.h"

enum { KEYS = 5, K_DIM = 6, V_DIM = 3 };

static char path[] = "/tmp/cpattn-row-XXXXXX";

static void make_path(void) {
    memcpy(path + strlen(path) - 6, "XXXXXX", 6);
    const int file = mkstemp(path);
    CU_ASSERT_FATAL(file >= 0);
    close(file);
}

static cpa_row_file make_row(void) {
    cpa_row_file row = {.request = 7,
                        .token = 4,
                        .layer = 1,
                        .head = 3,
                        .kv_head = 1,
                        .ranks = 2,
                        .algorithm = 2,
                        .dtype = CPA_BF16,
                        .kv_dtype = CPA_INT8,
                        .k_dim = K_DIM,
                        .v_dim = V_DIM,
                        .scale = 0.1,
                        .softcap = 30,
                        .slope = -1e-300,
                        .has_sink = 1,
                        .sink = 2.5,
                        .error = 0.5,
                        .tolerance = 1.0 / 3,
                        .other_choice = 1,
                        .listed_key = 3,
                        .listed_score = 0.1,
                        .missing_key = 1,
                        .missing_score = 1.0 / 7,
                        .keys = KEYS};
    for (int d = 0; d < K_DIM; d++) row.q[d] = (float)d / 3;
    for (int d = 0; d < V_DIM; d++) row.result[d] = (float)d, row.reference[d] = d / 7.0;
    return row;
}

/* Writes the row with its keys from the last to the first. */
static void write_row(const cpa_row_file *row) {
    FILE *file = NULL;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_row_file_create(path, row, &file, &err), CPA_OK);
    for (int64_t i = KEYS - 1; i >= 0; i--) {
        float k[K_DIM], v[V_DIM];
        for (int d = 0; d < K_DIM; d++) k[d] = (float)(10 * i + d);
        for (int d = 0; d < V_DIM; d++) v[d] = (float)(100 * i + d);
        cpa_row_file_put(file, row, (cpa_row_file_key){i, (int32_t)(i % 2), i != 2}, k, v);
    }
    CU_ASSERT_EQUAL(cpa_row_file_close(file, path, &err), CPA_OK);
}

static void what_was_written_is_read(void) {
    const cpa_row_file row = make_row();
    cpa_row_read read;
    cpa_error err;
    make_path();
    write_row(&row);
    CU_ASSERT_EQUAL_FATAL(cpa_row_file_read(path, &read, &err), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(&read.row, &row, sizeof row), 0);
    for (int64_t i = 0; i < KEYS; i++) {
        CU_ASSERT_EQUAL(read.rank[i], i % 2);
        CU_ASSERT_EQUAL(read.seen[i], i != 2);
        CU_ASSERT_EQUAL(read.k[i * K_DIM + 1], 10 * i + 1);
        CU_ASSERT_EQUAL(read.v[i * V_DIM + 2], 100 * i + 2);
    }
    cpa_row_read_release(&read);
    unlink(path);
}

static void a_row_has_its_matrix(void) {
    enum { OUT_DIM = 2 };
    float matrix[V_DIM * OUT_DIM];
    cpa_row_file row = make_row();
    cpa_row_read read;
    cpa_error err;
    for (int i = 0; i < V_DIM * OUT_DIM; i++) matrix[i] = (float)i / 9;
    row.out_dim = OUT_DIM;
    row.matrix = matrix;
    make_path();
    write_row(&row);
    CU_ASSERT_EQUAL_FATAL(cpa_row_file_read(path, &read, &err), CPA_OK);
    CU_ASSERT_EQUAL(read.row.out_dim, OUT_DIM);
    CU_ASSERT_EQUAL(memcmp(read.row.matrix, matrix, sizeof matrix), 0);
    CU_ASSERT_EQUAL(memcmp(read.row.result, row.result, OUT_DIM * sizeof *row.result), 0);
    CU_ASSERT_EQUAL(read.v[(KEYS - 1) * V_DIM + 2], 100 * (KEYS - 1) + 2);
    cpa_row_read_release(&read);
    unlink(path);
}

static char *take_bytes(size_t *n) {
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(1 << 16);
    CU_ASSERT_FATAL(file && bytes);
    *n = fread(bytes, 1, 1 << 16, file);
    fclose(file);
    return bytes;
}

static void put_bytes(const char *bytes, size_t n) {
    FILE *file = fopen(path, "wb");
    CU_ASSERT_FATAL(file != NULL);
    CU_ASSERT_EQUAL(fwrite(bytes, 1, n, file), n);
    fclose(file);
}

/* Whether the file is read or refused with a line that names it. */
static void expect_an_answer(int may_be_read) {
    cpa_row_read read;
    cpa_error err = {CPA_OK, ""};
    const cpa_status status = cpa_row_file_read(path, &read, &err);
    if (status == CPA_OK) {
        CU_ASSERT(may_be_read);
        cpa_row_read_release(&read);
        return;
    }
    CU_ASSERT_EQUAL(status, CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, path));
    CU_ASSERT_PTR_NULL(strchr(err.message, '\n'));
}

static void files_that_are_cut_or_go_on_are_refused(void) {
    const cpa_row_file row = make_row();
    size_t n;
    make_path();
    write_row(&row);
    char *bytes = take_bytes(&n);
    for (size_t cut = 0; cut < n; cut++) {
        put_bytes(bytes, cut);
        expect_an_answer(0);
    }
    memset(bytes + n, 0, 8);
    put_bytes(bytes, n + 8);
    expect_an_answer(0);
    free(bytes);
    unlink(path);
}

static void changed_bytes_do_no_harm(void) {
    static const char others[] = {0, '\n', ' ', '-', '9', 'e', (char)0xff};
    const cpa_row_file row = make_row();
    size_t n;
    make_path();
    write_row(&row);
    char *bytes = take_bytes(&n);
    for (size_t i = 0; i < n; i++) {
        const char kept = bytes[i];
        for (size_t other = 0; other < sizeof others; other++) {
            bytes[i] = others[other];
            put_bytes(bytes, n);
            expect_an_answer(1);
        }
        bytes[i] = kept;
    }
    free(bytes);
    unlink(path);
}

static void numbers_that_no_row_has_are_refused(void) {
    const cpa_row_file rows[] = {
        [0] = {.k_dim = 0, .v_dim = 1, .ranks = 1},
        [1] = {.k_dim = 1, .v_dim = 0, .ranks = 1},
        [2] = {.k_dim = 1, .v_dim = 1, .ranks = 65},
        [3] = {.k_dim = 1, .v_dim = 1, .keys = -1},
        [4] = {.k_dim = 1, .v_dim = 1, .ranks = 1, .keys = (int64_t)1 << 50},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const cpa_row_file row = rows[i];
        FILE *file = NULL;
        make_path();
        CU_ASSERT_EQUAL_FATAL(cpa_row_file_create(path, &row, &file, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_row_file_close(file, path, NULL), CPA_OK);
        expect_an_answer(0);
        unlink(path);
    }
}

static void folders_and_what_is_not_there_are_refused(void) {
    cpa_row_read read;
    cpa_error err;
    FILE *file;
    CU_ASSERT_EQUAL(cpa_row_file_read("/tmp", &read, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_row_file_read("/tmp/none/of/this", &read, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "/tmp/none/of/this: cannot be read: No such file or directory");
    const cpa_row_file row = make_row();
    CU_ASSERT_EQUAL(cpa_row_file_create("/tmp/none/of/this", &row, &file, &err), CPA_INVALID);
    CU_ASSERT_EQUAL_FATAL(cpa_row_file_create("/dev/full", &row, &file, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_row_file_close(file, "/dev/full", &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "/dev/full: cannot be written: No space left on device");
}

static const cpa_test TESTS[] = {
    {"what was written is read", what_was_written_is_read},
    {"a row has its matrix", a_row_has_its_matrix},
    {"files that are cut or go on are refused", files_that_are_cut_or_go_on_are_refused},
    {"changed bytes do no harm", changed_bytes_do_no_harm},
    {"numbers that no row has are refused", numbers_that_no_row_has_are_refused},
    {"folders and what is not there are refused", folders_and_what_is_not_there_are_refused},
};

CPA_TEST_MAIN("rows in files", TESTS)
