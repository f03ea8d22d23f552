/* sample, rank_tokens and mark_tokens: every argument is checked here and strides are filled in, then the table of the
 * back end runs. */
#include "base/struct_size.h"
#include "kernels/draw.h"
#include "kernels/nn.h"
#include "src/ops/nn_check.h"

/* Words of the bitmap of a sequence. */
static int64_t words_of(int64_t vocabulary) {
    return (vocabulary + 31) / 32;
}

static cpa_status check_sample(cpa_sample_args *a, cpa_error *err) {
    const char *where = "sample";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "vocabulary", a->vocabulary, 1, CPA_DRAW_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "sequences", a->sequences, 0, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "path_entries", a->path_entries, 0, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "n_masks", a->n_masks, 0, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "bias_entries", a->bias_entries, 0, INT32_MAX, err));
    const int64_t rows = a->rows, words = words_of(a->vocabulary);
    const int paths = a->path_ends != NULL, masks = a->mask_index != NULL, biases = a->bias_count != NULL;
    const int penalties = a->in_prompt || a->in_output;
    const cpa_nn_tensor tensors[] = {
        {"logits", "logits_stride", a->logits, &a->logits_stride, rows, a->vocabulary, 4, 0},
        {"temperature", NULL, a->temperature, NULL, rows, 1, 4, 1},
        {"top_k", NULL, a->top_k, NULL, rows, 1, 4, 1},
        {"top_p", NULL, a->top_p, NULL, rows, 1, 4, 1},
        {"min_p", NULL, a->min_p, NULL, rows, 1, 4, 1},
        {"repetition", NULL, a->repetition, NULL, rows, 1, 4, 1},
        {"presence", NULL, a->presence, NULL, rows, 1, 4, 1},
        {"seed", NULL, a->seed, NULL, rows, 1, 8, 1},
        {"position", NULL, a->position, NULL, rows, 1, 8, 1},
        {"given", NULL, a->given, NULL, rows, 1, 8, 1},
        {"in_prompt", NULL, a->in_prompt, NULL, a->sequences, words, 4, 1},
        {"in_output", NULL, a->in_output, NULL, a->sequences, words, 4, 1},
        {"sequence", NULL, a->sequence, NULL, rows, 1, 4, !penalties},
        {"frequency", NULL, a->frequency, NULL, rows, 1, 4, 1},
        {"output_counts", NULL, a->output_counts, NULL, a->sequences, a->vocabulary, 4, 1},
        {"path_ends", NULL, a->path_ends, NULL, rows, 1, 4, 1},
        {"path_tokens", NULL, a->path_tokens, NULL, a->path_entries, 1, 4, !paths},
        {"path_parents", NULL, a->path_parents, NULL, a->path_entries, 1, 4, !paths},
        {"mask_index", NULL, a->mask_index, NULL, rows, 1, 4, 1},
        {"masks", NULL, a->masks, NULL, a->n_masks, words, 4, !masks},
        {"bias_count", NULL, a->bias_count, NULL, rows, 1, 4, 1},
        {"bias_first", NULL, a->bias_first, NULL, rows, 1, 4, !biases},
        {"bias_tokens", NULL, a->bias_tokens, NULL, a->bias_entries, 1, 4, !biases},
        {"bias_values", NULL, a->bias_values, NULL, a->bias_entries, 1, 4, !biases},
        {"tokens", "tokens_stride", a->tokens, &a->tokens_stride, rows, 1, 4, 0},
        {"logprobs", "logprobs_stride", a->logprobs, &a->logprobs_stride, rows, 1, 4, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_sample(const cpa_sample_args *given, cpa_stream *stream) {
    cpa_sample_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("sample", given, cpa_sample_args, tokens, &args, &stream->error));
    CPA_TRY(check_sample(&args, &stream->error));
    return args.rows ? stream->device->nn->sample(&args, stream) : CPA_OK;
}

static cpa_status check_rank_tokens(cpa_rank_tokens_args *a, cpa_error *err) {
    const char *where = "rank_tokens";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "vocabulary", a->vocabulary, 1, CPA_DRAW_MOST_TOKENS, err));
    const int64_t ranks = sizeof *a->ranks / sizeof(float);
    const cpa_nn_tensor tensors[] = {
        {"logits", "logits_stride", a->logits, &a->logits_stride, a->rows, a->vocabulary, 4, 0},
        {"tokens", "tokens_stride", a->tokens, &a->tokens_stride, a->rows, 1, 4, 0},
        {"top", NULL, a->top, NULL, a->rows, 1, 4, 1},
        {"ranks", NULL, a->ranks, NULL, a->rows, ranks, 4, 0},
        {"logprobs", "logprobs_stride", a->logprobs, &a->logprobs_stride, a->rows, 1, 4, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_rank_tokens(const cpa_rank_tokens_args *given, cpa_stream *stream) {
    cpa_rank_tokens_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("rank_tokens", given, cpa_rank_tokens_args, ranks, &args, &stream->error));
    CPA_TRY(check_rank_tokens(&args, &stream->error));
    return args.rows ? stream->device->nn->rank_tokens(&args, stream) : CPA_OK;
}

static cpa_status check_mark_tokens(const cpa_mark_tokens_args *a, cpa_error *err) {
    const char *where = "mark_tokens";
    CPA_TRY(cpa_nn_check_count(where, "vocabulary", a->vocabulary, 1, CPA_DRAW_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "sequences", a->sequences, 0, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "n_restarts", a->n_restarts, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "count", a->count, 0, CPA_MOST_TOKENS, err));
    const int64_t words = words_of(a->vocabulary);
    const cpa_nn_tensor tensors[] = {
        {"in_prompt", NULL, a->in_prompt, NULL, a->sequences, words, 4, 0},
        {"in_output", NULL, a->in_output, NULL, a->sequences, words, 4, 0},
        {"restarts", NULL, a->restarts, NULL, a->n_restarts, 1, 4, 0},
        {"sequence", NULL, a->sequence, NULL, a->count, 1, 4, 0},
        {"tokens", NULL, a->tokens, NULL, a->count, 1, 4, 0},
        {"outputs", NULL, a->outputs, NULL, a->count, 1, 4, 0},
        {"output_counts", NULL, a->output_counts, NULL, a->sequences, a->vocabulary, 4, 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) CPA_TRY(cpa_nn_check_tensor(where, tensors[i], err));
    return CPA_OK;
}

cpa_status cpa_mark_tokens(const cpa_mark_tokens_args *given, cpa_stream *stream) {
    cpa_mark_tokens_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("mark_tokens", given, cpa_mark_tokens_args, outputs, &args, &stream->error));
    CPA_TRY(check_mark_tokens(&args, &stream->error));
    const int nothing = args.sequences == 0 || (args.n_restarts == 0 && args.count == 0);
    return nothing ? CPA_OK : stream->device->nn->mark_tokens(&args, stream);
}
