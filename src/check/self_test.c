#include "src/check/self_test.h"

#include <math.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/check/verify_step.h"
#include "src/model/synthetic.h"
#include "src/schedule/scheduler.h"

enum {
    SELF_TEST_LAYERS = 2,
    SELF_TEST_OUTPUTS = 3,
    SELF_TEST_ROWS = 512 /* checked, about, for each algorithm */
};

/* Tokens after which both a run and a block end. */
static int64_t run_of(const cpa_worker_options *options) {
    return cpa_max64(options->map.interleave, options->block_size);
}

/* Prompt lengths, in units that make shards empty, ragged and several runs and blocks long. */
static int64_t prompt_length(int32_t request, const cpa_worker_options *options) {
    int64_t run = run_of(options), round = run * options->map.cp_size;
    const int64_t lengths[] = {1, cpa_max64(options->block_size - 1, 1), run + 1, round - run / 2,
                               2 * round + run / 2 + 3};
    return lengths[request];
}

enum { SELF_TEST_REQUESTS = 5 };

/* The masks of the first layer and of the next one that differs from it, if any does. */
static void pick_masks(const cpa_model_shape *model, cpa_mask masks[SELF_TEST_LAYERS]) {
    cpa_mask first = cpa_model_mask(model, 0), other = first;
    for (int32_t layer = 1; layer < model->layers; layer++) {
        cpa_mask mask = cpa_model_mask(model, layer);
        if (cpa_mask_equals(mask, first)) continue;
        other = mask;
        break;
    }
    masks[0] = first;
    for (int32_t layer = 1; layer < SELF_TEST_LAYERS; layer++) masks[layer] = other;
}

/* Two layers and sizes of the small cache and steps: everything fits, and the longest prompt takes several steps. */
static cpa_worker_options small_options(const cpa_worker_options *options, const cpa_mask masks[SELF_TEST_LAYERS],
                                        const cpa_model_form *as_they_lie, int64_t *total) {
    cpa_worker_options small = *options;
    small.model.layers = SELF_TEST_LAYERS;
    small.model.draft_layers = 0;
    small.model.index = NULL;
    small.model.layer_masks = masks;
    small.model.n_forms = options->model.attention.v_in_k; /* whose scores have a scale */
    small.model.forms = small.model.n_forms > 0 ? as_they_lie : NULL;
    small.model.prefill_form = small.model.decode_form = 0;
    *total = 0;
    for (int32_t r = 0; r < SELF_TEST_REQUESTS; r++) *total += prompt_length(r, options) + SELF_TEST_OUTPUTS;
    small.max_tokens = *total / 3 + SELF_TEST_REQUESTS;
    small.max_seqs = SELF_TEST_REQUESTS;
    cpa_layer_groups_of(&small.model, small.block_size, &small.groups); /* of which none is of precise tokens */
    for (int32_t g = 0; g < small.groups.count; g++)
        small.groups.list[g].num_blocks = (*total + SELF_TEST_REQUESTS * run_of(options)) / options->block_size + 1;
    return small;
}

static cpa_status make_scheduler(const cpa_worker_options *small, cpa_algorithm algorithm, uint64_t *seed,
                                 cpa_scheduler **out, cpa_error *err) {
    cpa_scheduler_options options = {
        .map = small->map,
        .block_size = small->block_size,
        .groups = small->groups,
        .max_num_batched_tokens = small->max_tokens,
        .max_num_seqs = small->max_seqs,
        .planner = {.forced = algorithm, .cp_size = small->map.cp_size},
        .token_at = cpa_synthetic_token,
        .token_ctx = seed,
    };
    CPA_TRY(cpa_scheduler_create(&options, out, err));
    for (int32_t r = 0; r < SELF_TEST_REQUESTS; r++) {
        cpa_scheduler_request request = {
            .id = (uint64_t)r, .prompt_tokens = prompt_length(r, small), .output_tokens = SELF_TEST_OUTPUTS};
        cpa_status status = cpa_scheduler_add(*out, &request, err);
        if (status != CPA_OK) {
            cpa_scheduler_destroy(*out);
            *out = NULL;
            return status;
        }
    }
    return CPA_OK;
}

/* Every rank runs the same scheduler, which is pure, so no plan has to travel. */
static cpa_status run_all(cpa_scheduler *scheduler, cpa_worker *worker, cpa_verify *verify, cpa_error *err) {
    cpa_step_plan plan;
    cpa_step_plan_init(&plan);
    cpa_worker_observer observer = cpa_verify_observer(verify);
    cpa_status status = CPA_OK;
    for (double next = 0; status == CPA_OK && isfinite(next);) {
        status = cpa_scheduler_plan(scheduler, 0, &plan, &next, err);
        if (status != CPA_OK || plan.n_chunks == 0) break;
        next = 0;
        status = cpa_worker_prepare(worker, &plan, &observer, err);
        if (status == CPA_OK) status = cpa_worker_run(worker, &plan, &observer, err);
        if (status == CPA_OK) status = cpa_verify_step(verify, &plan, err);
    }
    cpa_step_plan_destroy(&plan);
    return status;
}

static cpa_status test_algorithm(cpa_control *control, cpa_device *device, const cpa_worker_options *options,
                                 cpa_algorithm algorithm, uint64_t seed, int64_t *rows, cpa_error *err) {
    int64_t total;
    cpa_mask masks[SELF_TEST_LAYERS];
    pick_masks(&options->model, masks);
    float scales[SELF_TEST_LAYERS];
    for (int32_t i = 0; i < SELF_TEST_LAYERS; i++) scales[i] = 1 / sqrtf((float)options->model.attention.k_dim);
    const cpa_model_form as_they_lie = {.layer_scales = scales};
    cpa_worker_options small = small_options(options, masks, &as_they_lie, &total);
    cpa_synthetic synthetic = {.device = device, .shape = small.model.attention, .seed = seed};
    CPA_TRY(cpa_synthetic_take_forms(&synthetic, &small.model, err));
    const cpa_model network = cpa_synthetic_model(&synthetic);
    cpa_worker *worker = NULL;
    cpa_verify *verify = NULL;
    cpa_scheduler *scheduler = NULL;
    double rate = SELF_TEST_ROWS / ((double)total * small.model.layers * small.model.attention.q_heads);
    cpa_status status;
    CPA_TRY_GOTO(cpa_worker_create(control, device, &network, &small, &worker, err), done);
    status = cpa_verify_create(control, worker, fmin(rate, 1), seed, NULL, &verify, err);
    if (status == CPA_OK) status = make_scheduler(&small, algorithm, &seed, &scheduler, err);
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), done);
    status = run_all(scheduler, worker, verify, err);
    /* A failed check is known to every rank. Any other failure may be this one's alone, and to destroy a context waits
     * for the others. */
    if (status != CPA_OK && status != CPA_CHECK_FAILED) return status;
    cpa_verify_stats stats;
    cpa_verify_get_stats(verify, &stats);
    *rows += (int64_t)stats.rows;
done:
    cpa_scheduler_destroy(scheduler);
    cpa_verify_destroy(verify);
    cpa_worker_destroy(worker);
    return status;
}

cpa_status cpa_self_test(cpa_control *control, cpa_device *device, const cpa_worker_options *options, uint64_t seed,
                         int64_t *rows, cpa_error *err) {
    *rows = 0;
    for (int algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        cpa_error own = {CPA_OK, ""};
        cpa_status status =
            test_algorithm(control, device, options, (cpa_algorithm)algorithm, seed + (uint64_t)algorithm, rows, &own);
        if (status != CPA_OK) return cpa_fail(err, status, "self-test: %s", own.message);
    }
    return CPA_OK;
}
