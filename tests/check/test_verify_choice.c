/* What an indexer chose for a row, judged: the right list passes in any order of sums; a list with another key, of another
 * length, out of order or out of range does not, and what is said of it names both keys. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "kernels/device.h"
#include "src/check/verify_choice.h"
#include "tests/fixtures/unit.h"

enum { KEYS = 400, ROW = 350, K = 24, HEADS = 4, DIM = 40, RANKS = 3, MOST_LIST = K + 8 };

typedef struct choice_case {
    cpa_index_form form;
    cpa_device device;
    cpa_worker worker;
    cpa_verify verify;
    float q[HEADS * DIM], weights[HEADS], k[KEYS * DIM], scales[KEYS];
    uint8_t q_codes[HEADS * DIM], k_codes[KEYS * DIM];
    struct {
        cpa_verify_list head;
        int32_t entries[MOST_LIST];
        char index[HEADS * DIM * 4 + HEADS * 4];
    } list;
} choice_case;

static choice_case made;
static char says[300];

/* Between -1 and 1, now and then twenty times as large. */
static float value(uint64_t seed, int64_t i) {
    const uint64_t bits = cpa_mix64(seed * 1000003 + (uint64_t)i);
    return ((float)(bits >> 40) / 0x1p23f - 1) * (bits % 29 == 0 ? 20 : 1);
}

static void make(cpa_dtype dtype) {
    memset(&made, 0, sizeof made);
    made.form = (cpa_index_form){.heads = HEADS, .dim = DIM, .dtype = dtype, .has_weights = 1, .k = K};
    made.worker.options.model.index = &made.form;
    made.worker.device = &made.device;
    made.verify.worker = &made.worker;
    made.verify.list_bytes = (int64_t)(sizeof made.list.head + sizeof made.list.entries);
    for (int i = 0; i < HEADS; i++) made.weights[i] = value(1, i);
    for (int i = 0; i < KEYS; i++) made.scales[i] = dtype == CPA_FP8_E4M3 ? ldexpf(1, i % 5 - 2) : 1;
    for (int i = 0; i < HEADS * DIM; i++) {
        made.q_codes[i] = (uint8_t)(cpa_mix64((uint64_t)i + 77) % 126 | (i % 3 == 0 ? 128 : 0));
        made.q[i] = value(2, i);
    }
    for (int i = 0; i < KEYS * DIM; i++) {
        made.k_codes[i] = (uint8_t)(cpa_mix64((uint64_t)i + 99) % 126 | (i % 7 < 3 ? 128 : 0));
        made.k[i] = value(3, i);
    }
}

static float decode(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? ldexpf(1 + (float)mantissa / 8, exponent - 7) : ldexpf((float)mantissa, -9);
    return code & 128 ? -size : size;
}

/* The score of a key in fp32, summed from the end on. */
static float score_of(int64_t key) {
    float sum = 0;
    for (int h = HEADS - 1; h >= 0; h--) {
        float product = 0;
        for (int d = DIM - 1; d >= 0; d--)
            product += made.form.dtype == CPA_FP8_E4M3
                           ? decode(made.q_codes[h * DIM + d]) * decode(made.k_codes[key * DIM + d])
                           : made.q[h * DIM + d] * made.k[key * DIM + d];
        if (product > 0) sum += product * made.weights[h];
    }
    return sum * made.scales[key];
}

static float scores[ROW + 1];

static int is_better(int32_t a, int32_t b) {
    const int a_forced = a < made.form.forced_first || a > ROW - made.form.forced_last;
    const int b_forced = b < made.form.forced_first || b > ROW - made.form.forced_last;
    const float x = scores[a], y = scores[b];
    if (a_forced != b_forced) return a_forced;
    return x != y ? x > y : a < b;
}

/* The K best keys of the row by a plain sort, ascending. */
static void choose(void) {
    static int32_t order[ROW + 1];
    static const int32_t none = -1;
    for (int32_t i = 0; i <= ROW; i++) scores[i] = score_of(i);
    for (int32_t i = 0; i <= ROW; i++) {
        int32_t at = i;
        for (; at > 0 && is_better(i, order[at - 1]); at--) order[at] = order[at - 1];
        order[at] = i;
    }
    int32_t n = 0;
    for (int32_t key = 0; key <= ROW; key++)
        for (int32_t i = 0; i < K; i++)
            if (order[i] == key) made.list.entries[n++] = key;
    for (; n < MOST_LIST; n++) made.list.entries[n] = none;
    made.list.head = (cpa_verify_list){.unit = 1, .count = K, .width = K, .is_chosen = 1};
}

/* Puts the query behind the list, as samples have it. */
static void give_query(void) {
    const int is_coded = made.form.dtype == CPA_FP8_E4M3;
    const size_t bytes = HEADS * DIM * (is_coded ? 1 : 4);
    memcpy(made.list.index, is_coded ? (const void *)made.q_codes : made.q, bytes);
    memcpy(made.list.index + bytes, made.weights, sizeof made.weights);
}

/* The keys of a rank, every third one, as they come in a piece; behind those of the row are NaN. */
static void add_rank(cpa_verify_choice *choice, int32_t rank) {
    static char memory[KEYS * (DIM * 4 + 4)];
    static cpa_verify_index_keys keys;
    int64_t positions[KEYS], n = 0;
    const int is_coded = made.form.dtype == CPA_FP8_E4M3;
    const size_t row = DIM * (is_coded ? 1 : 4);
    for (int64_t key = rank; key < KEYS; key += RANKS, n++) {
        positions[n] = key;
        memcpy(memory + n * (int64_t)row, is_coded ? (const void *)(made.k_codes + key * DIM) : made.k + key * DIM,
               row);
        if (key > ROW) memset(memory + n * (int64_t)row, 255, row);
    }
    for (int64_t i = 0; is_coded && i < n; i++)
        memcpy(memory + n * (int64_t)row + i * 4, &made.scales[positions[i]], 4);
    const cpa_verify_piece piece = {.index = memory, .tokens = n};
    const cpa_verify_chooser chooser = {&made.verify, &made.list.head, ROW};
    for (int64_t first = 0; first < n; first += 50) {
        const int64_t count = n - first < 50 ? n - first : 50;
        cpa_verify_read_index(&made.verify, &piece, first, count, &keys);
        cpa_verify_choice_add(choice, &chooser, &keys, count, positions + first);
    }
}

static cpa_verify_choice gather(void) {
    cpa_verify_choice all, of_rank;
    give_query();
    cpa_verify_choice_begin(&all);
    for (int32_t rank = RANKS - 1; rank >= 0; rank--) {
        cpa_verify_choice_begin(&of_rank);
        add_rank(&of_rank, rank);
        cpa_verify_choice_join(&all, &of_rank);
    }
    return all;
}

static int is_right(void) {
    const cpa_verify_chooser chooser = {&made.verify, &made.list.head, ROW};
    const cpa_verify_choice all = gather();
    says[0] = 0;
    CU_ASSERT_FALSE(all.undecided && isfinite(made.weights[0]));
    return cpa_verify_choice_judge(&all, &chooser, says, sizeof says);
}

static const cpa_dtype DTYPES[] = {CPA_F32, CPA_FP8_E4M3};

static void the_best_keys_are_right(void) {
    for (int i = 0; i < 2; i++) {
        make(DTYPES[i]);
        choose();
        CU_ASSERT_TRUE(is_right());
        CU_ASSERT_STRING_EQUAL(says, "");
    }
}

static int compare(const void *a, const void *b) {
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* Any entry that gives way to the best key that was not chosen is found, and the best such key named. */
static void another_key_is_another_choice(void) {
    for (int i = 0; i < 2; i++) {
        for (int at = 0; at < K; at++) {
            make(DTYPES[i]);
            choose();
            const int32_t removed = made.list.entries[at];
            int32_t worst = -1, key = 0;
            for (int32_t other = 0; other <= ROW; other++) {
                int listed = 0;
                for (int j = 0; j < K; j++) listed |= made.list.entries[j] == other;
                if (!listed && (worst < 0 || is_better(other, worst))) worst = other;
            }
            key = worst;
            made.list.entries[at] = key;
            qsort(made.list.entries, K, sizeof made.list.entries[0], compare);
            char expected[80];
            CU_ASSERT_FALSE(is_right());
            snprintf(expected, sizeof expected, "key %d is on the list", key);
            CU_ASSERT_PTR_NOT_NULL(strstr(says, expected));
            snprintf(expected, sizeof expected, "but not key %d with", removed);
            CU_ASSERT_PTR_NOT_NULL(strstr(says, expected));
        }
    }
}

/* Keys that are equal but for less than rounding may change places; those whose scores are exactly 0 may not. */
static void ties_go_by_the_index_where_scores_are_exact(void) {
    make(CPA_F32);
    choose();
    int32_t worst = 0, twin = made.list.entries[0];
    for (int32_t i = 1; i < K; i++) worst = is_better(made.list.entries[worst], made.list.entries[i]) ? i : worst;
    while (bsearch(&twin, made.list.entries, K, sizeof twin, compare)) twin++;
    for (int d = 0; d < DIM; d++) made.k[twin * DIM + d] = made.k[made.list.entries[worst] * DIM + d] * (1 + 0x1p-23f);
    CU_ASSERT_TRUE(is_right());
    made.list.entries[worst] = twin;
    qsort(made.list.entries, K, sizeof made.list.entries[0], compare);
    CU_ASSERT_TRUE(is_right());
    for (int h = 0; h < HEADS; h++) made.weights[h] = -fabsf(made.weights[h]); /* no score is above 0 */
    for (int d = 0; d < HEADS * DIM; d++) made.q[d] = fabsf(made.q[d]);
    for (int i = 0; i < KEYS * DIM; i++) made.k[i] = -fabsf(made.k[i]);
    choose();
    CU_ASSERT_EQUAL(made.list.entries[K - 1], K - 1);
    CU_ASSERT_TRUE(is_right());
    made.list.entries[K - 1] = K;
    CU_ASSERT_FALSE(is_right());
    CU_ASSERT_STRING_EQUAL(says, "key 24 is on the list, with the index score 0, but not key 23 with 0 (allowed 0)");
}

static void forced_keys_have_to_be_there(void) {
    make(CPA_F32);
    made.form.forced_first = 2;
    made.form.forced_last = 3;
    choose();
    CU_ASSERT_EQUAL(made.list.entries[1], 1);
    CU_ASSERT_EQUAL(made.list.entries[K - 3], ROW - 2);
    CU_ASSERT_TRUE(is_right());
    made.list.entries[1] = 2;
    CU_ASSERT_FALSE(is_right());
    CU_ASSERT_PTR_NOT_NULL(strstr(says, "but not key 1 with inf"));
}

static void what_is_no_list_is_told(void) {
    static const struct {
        int32_t at, entry, count;
        const char *says;
    } cases[] = {{0, -2, K - 1, "a list of 23 keys, expected 24"},
                 {0, -2, K + 1, "a list of 25 keys, expected 24"},
                 {0, -2, -1, "a list of -1 keys, expected 24"},
                 {K - 1, ROW + 1, K, "entry 23 of the list is key 351, behind key"},
                 {0, -1, K, "entry 0 of the list is key -1, behind key -1, expected ascending keys of 0 to 350"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make(CPA_F32);
        choose();
        if (cases[i].entry > -2) made.list.entries[cases[i].at] = cases[i].entry;
        made.list.head.count = cases[i].count;
        CU_ASSERT_FALSE(is_right());
        CU_ASSERT_PTR_NOT_NULL(strstr(says, cases[i].says));
    }
    make(CPA_F32);
    choose();
    made.list.entries[7] = made.list.entries[6]; /* twice */
    CU_ASSERT_FALSE(is_right());
    CU_ASSERT_PTR_NOT_NULL(strstr(says, "entry 7 of the list"));
}

/* Where a score is no number nobody is accused. */
static void what_is_no_number_is_not_judged(void) {
    make(CPA_F32);
    choose();
    made.weights[0] = NAN;
    made.list.head.count = 3;
    CU_ASSERT_TRUE(is_right());
}

/* Tensor cores that lose bits of codes may swap keys that differ by these. */
static void codes_on_devices_are_allowed_more(void) {
    double slack[2];
    for (int on_device = 0; on_device < 2; on_device++) {
        make(CPA_FP8_E4M3);
        made.device.backend = on_device ? CPA_BACKEND_CUDA : CPA_BACKEND_HOST;
        choose();
        const cpa_verify_choice all = gather();
        CU_ASSERT(all.listed.key >= 0 && all.listed.slack > 0);
        slack[on_device] = all.listed.slack / fabs(all.listed.score);
    }
    CPA_ASSERT_ORDER(slack[0], <, 2e-4);
    CPA_ASSERT_ORDER(slack[1], >, 100 * slack[0]);
    CPA_ASSERT_ORDER(slack[1], <, 0.1);
}

static const cpa_test tests[] = {
    {"the best keys are right", the_best_keys_are_right},
    {"another key is another choice", another_key_is_another_choice},
    {"ties go by the index where scores are exact", ties_go_by_the_index_where_scores_are_exact},
    {"forced keys have to be there", forced_keys_have_to_be_there},
    {"what is no list is told", what_is_no_list_is_told},
    {"what is no number is not judged", what_is_no_number_is_not_judged},
    {"codes on devices are allowed more", codes_on_devices_are_allowed_more},
};
CPA_TEST_MAIN("verify choice", tests)
