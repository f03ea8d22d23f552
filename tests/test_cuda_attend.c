/* attend on a CUDA device against the float64 reference, on each of its paths: dtypes, widths, groups, pages, shards,
 * masks, ragged tails, batches of long and short items, resumed calls. Whatever is no key or value is NaN. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend_fixture.h"
#include "cuda_fixture.h"
#include "kernels/host/convert.h"
#include "unit.h"

enum { ROW_PADDING = 8 }; /* floats between the rows of a state, which nothing may touch */

static cpa_cuda_site site;
static cpa_cuda_path first_path = CPA_CUDA_SIMPLE, last_path;

static const cpa_attend_case BASE = {.q_dtype = CPA_BF16,
                                     .kv_dtype = CPA_BF16,
                                     .q_heads = 8,
                                     .kv_heads = 2,
                                     .k_dim = 128,
                                     .v_dim = 128,
                                     .block_size = 16,
                                     .cp_size = 1,
                                     .interleave = 16,
                                     .length = 300,
                                     .mask = {.causal = 1}};

/* A fixture whose queries and pages are on the device. */
typedef struct device_case {
    cpa_attend_fixture host;
    cpa_kv_view view;
    void *q;
    cpa_attend_plan *plan;
} device_case;

static void case_init(device_case *c, const cpa_attend_case *shape) {
    cpa_attend_fixture_init(&c->host, shape, 1);
    c->view = cpa_cuda_upload_view(&site, &c->host.kv.view, c->host.kv.k_bytes, c->host.kv.v_bytes);
    c->q = cpa_cuda_upload(&site, c->host.q,
                           c->host.rows * shape->q_heads * shape->k_dim * cpa_dtype_bytes(shape->q_dtype));
    if (cpa_attend_plan_create(site.device, &c->plan, NULL) != CPA_OK) abort();
}

static void case_destroy(device_case *c) {
    cpa_attend_plan_destroy(c->plan);
    cpa_device_free(site.device, c->q);
    cpa_cuda_free_view(&site, &c->view);
    cpa_attend_fixture_destroy(&c->host);
}

/* A state of rows in which O, LSE and padding follow each other, as a message holds them. */
typedef struct padded_state {
    int64_t stride, bytes;
    float *memory; /* host */
    cpa_partial device;
} padded_state;

static void state_init(padded_state *s, const cpa_attend_fixture *f) {
    int32_t heads = f->shape.q_heads, o_floats = heads * f->shape.v_dim;
    s->stride = ((int64_t)o_floats + heads + ROW_PADDING + 3) / 4 * 4;
    s->bytes = f->rows * s->stride * (int64_t)sizeof(float);
    s->memory = cpa_test_poisoned(f->rows * s->stride, sizeof(float));
    float *base = cpa_cuda_upload(&site, s->memory, s->bytes);
    s->device = (cpa_partial){base, s->stride, base + o_floats, s->stride};
}

/* Copies the state to the result's o and lse; returns how many floats of padding were touched. */
static int64_t state_finish(padded_state *s, const cpa_attend_fixture *f, cpa_attend_result *result) {
    int64_t heads = f->shape.q_heads, o_floats = heads * f->shape.v_dim, touched = 0;
    const uint32_t poison = UINT32_MAX;
    cpa_cuda_download(&site, s->memory, s->device.o, s->bytes);
    for (int64_t row = 0; row < f->rows; row++) {
        const float *from = s->memory + row * s->stride;
        memcpy(result->o + row * o_floats, from, (size_t)o_floats * sizeof(float));
        memcpy(result->lse + row * heads, from + o_floats, (size_t)heads * sizeof(float));
        for (int64_t i = o_floats + heads; i < s->stride; i++) touched += memcmp(from + i, &poison, sizeof poison) != 0;
    }
    cpa_device_free(site.device, s->device.o);
    free(s->memory);
    return touched;
}

static cpa_status run(device_case *c, const cpa_attend_item *items, int64_t n_items, int resume, cpa_partial state,
                      void *out) {
    const cpa_attend_case *shape = &c->host.shape;
    cpa_error err = {0};
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = c->host.map,
                              .q_heads = shape->q_heads,
                              .kv_heads = shape->kv_heads,
                              .k_dim = shape->k_dim,
                              .v_dim = shape->v_dim,
                              .block_size = shape->block_size,
                              .items = items,
                              .n_items = n_items,
                              .block_tables = c->host.tables,
                              .n_table_entries = c->host.n_table_entries};
    cpa_attend_args args = {.size = sizeof args,
                            .q = c->q,
                            .q_dtype = shape->q_dtype,
                            .kv = c->view,
                            .mask = shape->mask,
                            .scale = shape->scale,
                            .resume = resume,
                            .state = state,
                            .out = out};
    cpa_status status = cpa_attend_plan_set(c->plan, &batch, &err);
    if (status == CPA_OK) status = cpa_attend(c->plan, &args, site.stream);
    if (status == CPA_OK) status = cpa_stream_sync(site.stream);
    if (status != CPA_OK) fprintf(stderr, "attend: %s%s\n", err.message, cpa_stream_error(site.stream));
    return status;
}

/* Attends the items, and checks every stride-th row against the keys of k_slot (-1: of all). */
static int64_t wrong_items(device_case *c, const cpa_attend_item *items, int64_t n_items, int32_t k_slot,
                           int64_t stride) {
    cpa_attend_result result;
    padded_state state;
    cpa_attend_result_init(&result, &c->host);
    state_init(&state, &c->host);
    void *out = cpa_cuda_upload(&site, result.out, result.out_bytes);
    int64_t wrong = run(c, items, n_items, 0, state.device, out) != CPA_OK;
    wrong += state_finish(&state, &c->host, &result);
    cpa_cuda_download(&site, result.out, out, result.out_bytes);
    wrong += cpa_attend_fixture_check(&c->host, k_slot, stride, &result, NULL);
    cpa_device_free(site.device, out);
    cpa_attend_result_destroy(&result);
    return wrong;
}

/* Attends over the keys of each slot in turn, on every path of the device; says what went wrong. */
static int64_t wrong_rows(const cpa_attend_case *shape, int64_t stride) {
    device_case c;
    int64_t wrong = 0;
    case_init(&c, shape);
    for (int path = (int)first_path; path <= (int)last_path; path++) {
        cpa_cuda_site_use(&site, (cpa_cuda_path)path);
        for (int32_t slot = 0; slot < shape->cp_size; slot++) {
            cpa_attend_item items[CPA_TEST_MAX_SLOTS];
            for (int32_t q = 0; q < shape->cp_size; q++)
                items[q] = cpa_attend_fixture_item(&c.host, q, 0, c.host.q_count[q], slot, 0, c.host.k_tokens[slot]);
            int64_t failed = wrong_items(&c, items, shape->cp_size, slot, stride);
            if (failed)
                printf(
                    "\n    %s: %lld wrong; dtype %d/%d heads %d/%d width %d/%d block %d N %d I %d start %lld length "
                    "%lld causal %d window %lld sinks %d head_major %d slot %d",
                    cpa_cuda_path_name((cpa_cuda_path)path), (long long)failed, shape->q_dtype, shape->kv_dtype,
                    shape->q_heads, shape->kv_heads, shape->k_dim, shape->v_dim, shape->block_size, shape->cp_size,
                    shape->interleave, (long long)shape->start, (long long)shape->length, shape->mask.causal,
                    (long long)shape->mask.window, shape->mask.sinks, shape->head_major, slot);
            wrong += failed;
        }
    }
    case_destroy(&c);
    return wrong;
}

static void every_pair_of_dtypes(void) {
    for (int q = 0; q < CPA_DTYPE_COUNT; q++) {
        for (int kv = 0; kv < CPA_DTYPE_COUNT; kv++) {
            cpa_attend_case shape = BASE;
            shape.q_dtype = (cpa_dtype)q;
            shape.kv_dtype = (cpa_dtype)kv;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 7), 0);
        }
    }
}

static void quantised_caches(void) {
    static const int32_t widths[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {96, 80}, {33, 65}};
    for (int kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
            for (int q = CPA_F32; q < CPA_DTYPE_COUNT; q++) {
                for (int late = 0; late < 2; late++) {
                    cpa_attend_case shape = BASE;
                    shape.q_dtype = (cpa_dtype)q;
                    shape.kv_dtype = kind == 2 ? CPA_INT8 : CPA_FP8_E4M3;
                    shape.k_scale = kind == 1 ? 0.03125f : 0;
                    shape.v_scale = kind == 1 ? 0.0625f : 0;
                    shape.k_dim = widths[i][0];
                    shape.v_dim = widths[i][1];
                    shape.head_major = late;
                    shape.start = late ? shape.length - 2 : 0;
                    shape.mask.window = i == 2 ? 100 : 0;
                    shape.mask.sinks = 3;
                    CU_ASSERT_EQUAL(wrong_rows(&shape, 13), 0);
                }
            }
        }
    }
}

static void quantised_caches_split_over_multiprocessors(void) {
    for (int kind = 0; kind < 3; kind++) {
        cpa_attend_case shape = BASE;
        shape.q_dtype = kind == 1 ? CPA_F16 : CPA_BF16;
        shape.kv_dtype = kind == 2 ? CPA_INT8 : CPA_FP8_E4M3;
        shape.k_scale = shape.v_scale = kind == 1 ? 0.0625f : 0;
        shape.k_dim = shape.v_dim = 128;
        shape.q_heads = 32;
        shape.kv_heads = 4;
        shape.length = 5000;
        shape.start = 4999;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
        shape.start = 4800;
        shape.cp_size = 2;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 31), 0);
    }
}

static void every_width_of_heads(void) {
    static const int32_t widths[][2] = {{64, 64},   {80, 80}, {96, 96}, {128, 128}, {256, 256},
                                        {192, 128}, {72, 8},  {8, 256}, {1, 1},     {33, 65}};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = BASE;
            shape.k_dim = widths[i][0];
            shape.v_dim = widths[i][1];
            shape.q_dtype = shape.kv_dtype = late ? CPA_F16 : CPA_BF16;
            shape.start = late ? shape.length - 2 : 0;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 13), 0);
        }
    }
}

static void every_grouping_of_heads(void) {
    static const int32_t heads[][2] = {{1, 1}, {4, 4}, {6, 2}, {8, 1}, {10, 2}, {32, 1}, {140, 1}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = BASE;
            shape.q_heads = heads[i][0];
            shape.kv_heads = heads[i][1];
            shape.start = late ? shape.length - 1 : 0;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
        }
    }
}

static void every_block_size_and_page_order(void) {
    static const int32_t sizes[] = {1, 2, 16, 32, 64, 128, 256};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int head_major = 0; head_major < 2; head_major++) {
            cpa_attend_case shape = BASE;
            shape.block_size = shape.interleave = sizes[i];
            shape.head_major = head_major;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
            shape.start = shape.length - 3;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
        }
    }
}

/* Tiles of keys that are full, one short, one over; queries from the start, from the middle, and the last alone. */
static void ragged_tails(void) {
    static const int64_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2600};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const int64_t starts[] = {0, lengths[i] - 1 - lengths[i] / 5, lengths[i] - 1};
        for (int s = 0; s < 3; s++) {
            cpa_attend_case shape = BASE;
            shape.length = lengths[i];
            shape.start = starts[s];
            CU_ASSERT_EQUAL(wrong_rows(&shape, 61), 0);
        }
    }
}

static void shards_of_every_rank_count(void) {
    static const int32_t interleaves[] = {16, 48, 256};
    for (int32_t n = 1; n <= 5; n++) {
        for (size_t i = 0; i < sizeof interleaves / sizeof interleaves[0]; i++) {
            for (int causal = 0; causal < 2; causal++) {
                cpa_attend_case shape = BASE;
                shape.cp_size = n;
                shape.interleave = interleaves[i];
                shape.mask.causal = causal;
                shape.length = 733;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 41), 0);
            }
        }
    }
}

static void windows_and_sinks(void) {
    static const cpa_mask masks[] = {{1, 0, 1},  {1, 0, 100},  {1, 4, 64},    {1, 40, 17},
                                     {0, 4, 50}, {1, 4, 5000}, {1, 150, 300}, {1, 16, 16}};
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        for (int32_t n = 1; n <= 3; n += 2) {
            cpa_attend_case shape = BASE;
            shape.cp_size = n;
            shape.length = 1500;
            shape.mask = masks[i];
            CU_ASSERT_EQUAL(wrong_rows(&shape, 97), 0);
            shape.start = shape.length - 4;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
        }
    }
}

static void scale_of_the_caller(void) {
    static const float scales[] = {0.02f, 0.15f, -0.1f};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        cpa_attend_case shape = BASE;
        shape.scale = scales[i];
        CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
    }
}

/* Long enough that the plan splits the keys of decode rows and of single tiles over many multiprocessors. */
static void split_keys(void) {
    static const int64_t queries[] = {1, 4, 9, 40};
    for (size_t i = 0; i < sizeof queries / sizeof queries[0]; i++) {
        for (int32_t n = 1; n <= 2; n++) {
            cpa_attend_case shape = BASE;
            shape.cp_size = n;
            shape.block_size = shape.interleave = 64;
            shape.length = 9001;
            shape.start = shape.length - queries[i];
            CU_ASSERT_EQUAL(wrong_rows(&shape, 3), 0);
        }
    }
}

/* One plan with items of many lengths, each with keys of its own length; long and short ones mixed. */
static void ragged_batches(void) {
    static const int64_t counts[] = {1, 2, 70, 1, 4, 5, 300, 1, 16, 33, 128, 3};
    enum { ITEMS = sizeof counts / sizeof counts[0] };
    for (int32_t width = 64; width <= 256; width *= 2) {
        cpa_attend_case shape = BASE;
        device_case c;
        cpa_attend_item items[ITEMS];
        int64_t row = 0;
        shape.k_dim = shape.v_dim = width;
        shape.length = 0;
        for (int i = 0; i < ITEMS; i++) shape.length += counts[i];
        case_init(&c, &shape);
        for (int i = 0; i < ITEMS; i++) {
            row += counts[i];
            items[i] = cpa_attend_fixture_item(&c.host, 0, row - counts[i], counts[i], 0, 0, row);
        }
        for (int path = (int)first_path; path <= (int)last_path; path++) {
            cpa_cuda_site_use(&site, (cpa_cuda_path)path);
            CU_ASSERT_EQUAL(wrong_items(&c, items, ITEMS, 0, 5), 0);
            CU_ASSERT_EQUAL(wrong_items(&c, items, 0, 0, shape.length) > 0, 1); /* the same plan, without items */
            CU_ASSERT_EQUAL(wrong_items(&c, items, ITEMS, 0, 11), 0);
        }
        case_destroy(&c);
    }
}

/* The keys in four calls, the first and the last of which some rows do not see at all. */
static void resumed_calls(void) {
    static const int64_t starts[] = {0, 590};
    for (int s = 0; s < 2; s++) {
        cpa_attend_case shape = BASE;
        device_case c;
        shape.length = 600;
        shape.start = starts[s];
        case_init(&c, &shape);
        const int64_t cuts[] = {0, 16, 16, 400, shape.length};
        for (int path = (int)first_path; path <= (int)last_path; path++) {
            cpa_attend_result result;
            padded_state state;
            cpa_cuda_site_use(&site, (cpa_cuda_path)path);
            cpa_attend_result_init(&result, &c.host);
            state_init(&state, &c.host);
            for (int i = 0; i < 4; i++) {
                cpa_attend_item item = cpa_attend_fixture_item(&c.host, 0, 0, c.host.rows, 0, cuts[i], cuts[i + 1]);
                CU_ASSERT_EQUAL(run(&c, &item, 1, i > 0, state.device, NULL), CPA_OK);
            }
            CU_ASSERT_EQUAL(state_finish(&state, &c.host, &result), 0);
            cpa_narrow(result.out, result.o, shape.q_dtype, result.o_bytes / (int64_t)sizeof *result.o);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&c.host, 0, 7, &result, NULL), 0);
            cpa_attend_result_destroy(&result);
        }
        case_destroy(&c);
    }
}

/* Without keys, from the empty state; and with a state of NaN and +inf, which counts as empty. */
static void empty_shards(void) {
    static const int64_t starts[] = {0, 298};
    for (int s = 0; s < 2; s++) {
        cpa_attend_case shape = BASE;
        device_case c;
        shape.start = starts[s];
        case_init(&c, &shape);
        for (int path = (int)first_path; path <= (int)last_path; path++) {
            for (int resume = 0; resume < 2; resume++) {
                cpa_attend_result result;
                padded_state state;
                cpa_cuda_site_use(&site, (cpa_cuda_path)path);
                cpa_attend_result_init(&result, &c.host);
                state_init(&state, &c.host);
                cpa_attend_item item = cpa_attend_fixture_item(&c.host, 0, 0, c.host.rows, 0, 0, 0);
                CU_ASSERT_EQUAL(run(&c, &item, 1, resume, state.device, NULL), CPA_OK);
                CU_ASSERT_EQUAL(state_finish(&state, &c.host, &result), 0);
                int64_t wrong = 0, floats = result.o_bytes / (int64_t)sizeof(float);
                for (int64_t i = 0; i < floats; i++) wrong += result.o[i] != 0;
                for (int64_t i = 0; i < floats / shape.v_dim; i++) wrong += result.lse[i] != -INFINITY;
                CU_ASSERT_EQUAL(wrong, 0);
                cpa_attend_result_destroy(&result);
            }
        }
        case_destroy(&c);
    }
}

static void rows_of_no_item(void) {
    device_case c;
    case_init(&c, &BASE);
    for (int path = (int)first_path; path <= (int)last_path; path++) {
        cpa_attend_result result, untouched;
        padded_state state;
        cpa_cuda_site_use(&site, (cpa_cuda_path)path);
        cpa_attend_result_init(&result, &c.host);
        cpa_attend_result_init(&untouched, &c.host);
        state_init(&state, &c.host);
        cpa_attend_item item = cpa_attend_fixture_item(&c.host, 0, 10, 20, 0, 0, c.host.k_tokens[0]);
        CU_ASSERT_EQUAL(run(&c, &item, 1, 0, state.device, NULL), CPA_OK);
        CU_ASSERT_EQUAL(state_finish(&state, &c.host, &result), 0);
        int64_t row = (int64_t)BASE.q_heads * BASE.v_dim, bytes = row * (int64_t)sizeof(float);
        CU_ASSERT_EQUAL(memcmp(result.o, untouched.o, (size_t)(10 * bytes)), 0);
        CU_ASSERT_EQUAL(memcmp(result.o + 30 * row, untouched.o, (size_t)(270 * bytes)), 0);
        CU_ASSERT_EQUAL(memcmp(result.lse, untouched.lse, 10 * sizeof(float) * (size_t)BASE.q_heads), 0);
        cpa_attend_result_destroy(&untouched);
        cpa_attend_result_destroy(&result);
    }
    case_destroy(&c);
}

/* With the name of a path, the tests run on that one alone; with a number, only so many of them. */
int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every pair of dtypes matches the reference", every_pair_of_dtypes},
        {"quantised caches match the reference", quantised_caches},
        {"quantised caches split over multiprocessors match the reference",
         quantised_caches_split_over_multiprocessors},
        {"every width of heads matches the reference", every_width_of_heads},
        {"every grouping of heads matches the reference", every_grouping_of_heads},
        {"every block size and page order matches the reference", every_block_size_and_page_order},
        {"ragged tails match the reference", ragged_tails},
        {"shards of every rank count match the reference", shards_of_every_rank_count},
        {"windows and sinks match the reference", windows_and_sinks},
        {"a scale of the caller matches the reference", scale_of_the_caller},
        {"keys split over multiprocessors match the reference", split_keys},
        {"batches of long and short items match the reference, plan after plan", ragged_batches},
        {"resumed calls match the reference", resumed_calls},
        {"no keys give O = 0 and LSE = -inf whatever memory held", empty_shards},
        {"rows of no item and padding are left alone", rows_of_no_item},
    };
    if (!cpa_cuda_site_open(&site)) return CPA_TEST_SKIPPED;
    last_path = site.best;
    for (int path = CPA_CUDA_SIMPLE; path <= (int)site.best && argc > 1; path++) {
        if (strcmp(argv[1], cpa_cuda_path_name((cpa_cuda_path)path)) == 0) first_path = last_path = (cpa_cuda_path)path;
    }
    int n_tests = (int)(sizeof tests / sizeof tests[0]), limit = argc > 2 ? atoi(argv[2]) : n_tests;
    int code = cpa_test_main("attend on CUDA", tests, limit < n_tests ? limit : n_tests);
    cpa_cuda_site_close(&site);
    return code;
}
