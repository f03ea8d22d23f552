#include "src/model/sampler.h"

#include <cpattn/nn.h>

#include "base/check.h"

static int64_t bitmap_bytes(int64_t vocabulary, int64_t sequences) {
    return sequences * ((vocabulary + 31) / 32) * (int64_t)sizeof(uint32_t);
}

static int64_t count_bytes(int64_t vocabulary, int64_t sequences) {
    return sequences * vocabulary * (int64_t)sizeof(uint32_t);
}

int64_t cpa_sampler_bytes(int64_t vocabulary, int64_t sequences) {
    return 2 * bitmap_bytes(vocabulary, sequences) + count_bytes(vocabulary, sequences);
}

cpa_status cpa_sampler_open(cpa_device *device, int64_t vocabulary, int64_t sequences, cpa_sampler *out,
                            cpa_error *err) {
    const int64_t bytes = bitmap_bytes(vocabulary, sequences), counts = count_bytes(vocabulary, sequences);
    cpa_sampler sampler = {.device = device, .vocabulary = vocabulary, .sequences = sequences};
    cpa_status status = cpa_device_alloc(device, bytes, (void **)&sampler.in_prompt, err);
    if (status == CPA_OK) status = cpa_device_alloc(device, bytes, (void **)&sampler.in_output, err);
    if (status == CPA_OK) status = cpa_device_alloc(device, counts, (void **)&sampler.output_counts, err);
    if (status != CPA_OK) {
        cpa_sampler_close(&sampler);
        return status;
    }
    *out = sampler;
    return CPA_OK;
}

void cpa_sampler_close(cpa_sampler *sampler) {
    if (!sampler->device) return;
    cpa_device_free(sampler->device, sampler->in_prompt);
    cpa_device_free(sampler->device, sampler->in_output);
    cpa_device_free(sampler->device, sampler->output_counts);
    *sampler = (cpa_sampler){.device = NULL};
}

cpa_status cpa_sampler_begin(const cpa_sampler *sampler, const cpa_model_step *step, cpa_stream *stream) {
    const cpa_history *history = &step->history;
    if (history->count == 0 && history->n_restarts == 0) return CPA_OK;
    const cpa_mark_tokens_args args = {
        .size = sizeof args,
        .vocabulary = sampler->vocabulary,
        .sequences = sampler->sequences,
        .in_prompt = sampler->in_prompt,
        .in_output = sampler->in_output,
        .output_counts = sampler->output_counts,
        .n_restarts = history->n_restarts,
        .restarts = history->restarts,
        .count = history->count,
        .sequence = history->seqs,
        .tokens = history->tokens,
        .outputs = history->outputs,
    };
    return cpa_mark_tokens(&args, stream);
}

/* Of the tokens that were drawn; their log-probabilities come from here, too. */
static cpa_status rank(const cpa_model_step *step, int64_t first, const cpa_sample_args *of, cpa_drawn *drawn,
                       cpa_stream *stream) {
    const cpa_rank_tokens_args args = {
        .size = sizeof args,
        .rows = of->rows,
        .vocabulary = of->vocabulary,
        .logits = of->logits,
        .tokens = of->tokens,
        .tokens_stride = of->tokens_stride,
        .top = step->top_logprobs + first,
        .ranks = step->ranks + first,
        .logprobs = &drawn[first].logprob,
        .logprobs_stride = of->logprobs_stride,
    };
    return cpa_rank_tokens(&args, stream);
}

/* What nobody in the step wants is left out: NULL is none for cpa_sample. */
cpa_status cpa_sampler_draw(const cpa_sampler *sampler, const cpa_model_step *step, int64_t first, int64_t count,
                            const float *logits, cpa_drawn *drawn, cpa_stream *stream) {
    const cpa_sample_rows *rows = &step->emissions.sample;
    const cpa_draw_limits *limits = &step->limits;
    const uint32_t wants = step->emissions.wants;
    cpa_sample_args args = {
        .size = sizeof args,
        .rows = count,
        .vocabulary = sampler->vocabulary,
        .logits = logits,
        .seed = rows->seed + first,
        .position = rows->position + first,
        .given = rows->given + first,
        .tokens = &drawn[first].id,
        .tokens_stride = sizeof *drawn / sizeof drawn->id,
        .logprobs =
            (wants & (CPA_WANTS_LOGPROBS | CPA_WANTS_RANKS)) == CPA_WANTS_LOGPROBS ? &drawn[first].logprob : NULL,
        .logprobs_stride = sizeof *drawn / sizeof drawn->logprob,
    };
    if (wants & CPA_WANTS_TEMPERATURE) args.temperature = rows->temperature + first;
    if (wants & CPA_WANTS_FILTERS) {
        args.top_k = rows->top_k + first;
        args.top_p = rows->top_p + first;
        args.min_p = rows->min_p + first;
    }
    if (wants & CPA_WANTS_PENALTIES) {
        args.repetition = rows->repetition_penalty + first;
        args.presence = rows->presence_penalty + first;
        args.frequency = step->frequency_penalty + first;
        args.in_prompt = sampler->in_prompt;
        args.in_output = sampler->in_output;
        args.output_counts = sampler->output_counts;
        args.sequence = rows->seq + first;
        args.sequences = sampler->sequences;
    }
    if (wants & CPA_WANTS_BIASES) {
        args.bias_tokens = limits->bias_tokens;
        args.bias_values = limits->bias_values;
        args.bias_first = limits->bias_first + first;
        args.bias_count = limits->bias_count + first;
        args.bias_entries = limits->bias_entries;
    }
    if (wants & CPA_WANTS_MASKS) {
        args.masks = limits->masks;
        args.mask_index = limits->mask_index + first;
        args.n_masks = limits->n_masks;
    }
    if (wants & CPA_WANTS_PENALTIES && step->paths.ends) {
        args.path_ends = step->paths.ends + first;
        args.path_tokens = step->history.tokens;
        args.path_parents = step->paths.parents;
        args.path_entries = step->history.count;
    }
    CPA_TRY(cpa_sample(&args, stream));
    return wants & CPA_WANTS_RANKS ? rank(step, first, &args, drawn, stream) : CPA_OK;
}
