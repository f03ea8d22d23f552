#include "launcher/network.h"

#include "base/check.h"

static cpa_status observe(const cpa_job *job, cpa_network *network, cpa_error *err) {
    const cpa_settings *settings = &job->settings;
    if (job->kept_logits == 0) return CPA_OK;
    CPA_TRY(cpa_logits_sample_open(job->kept_logits, job->network.vocabulary, (uint64_t)settings->seed,
                                   &network->sample, err));
    cpa_transformer_set_observer(network->loaded.transformer, cpa_logits_sample_take, &network->sample);
    return CPA_OK;
}

cpa_status cpa_network_open(const cpa_job *job, int32_t rank, cpa_workload *workload, cpa_prompt_answer *answer,
                            const cpa_device_options *engine_device, cpa_network *network, cpa_error *err) {
    cpa_transformer_options options = cpa_job_transformer_options(job);
    options.rank = rank;
    *network = (cpa_network){.answer = NULL};
    cpa_status status =
        cpa_folder_model_open(job->settings.model_dir, &job->network, &options, engine_device, &network->loaded, err);
    if (status == CPA_OK) status = observe(job, network, err);
    if (status != CPA_OK) {
        cpa_network_close(network);
        return status == CPA_IO ? CPA_INVALID : status; /* a folder without its files is bad input */
    }
    network->model = cpa_transformer_model(network->loaded.transformer);
    network->answer = answer;
    network->tokens =
        (cpa_vocabulary_tokens){workload, (uint64_t)job->settings.seed, (uint32_t)job->network.vocabulary};
    return CPA_OK;
}

void cpa_network_close(cpa_network *network) {
    cpa_answers_close(&network->answers);
    cpa_logits_sample_close(&network->sample);
    cpa_folder_model_close(&network->loaded);
    *network = (cpa_network){.answer = NULL};
}

/* The lengths of requests are those of the workload: the model's own end tokens do not end them. */
static cpa_sampling most_probable(void) {
    return (cpa_sampling){.size = sizeof(cpa_sampling), .ignore_eos = 1};
}

cpa_status cpa_network_begin(const cpa_job *job, cpa_network *network, cpa_error *err) {
    network->sampling = job->settings.generate ? cpa_prompt_answer_sampling(network->answer) : most_probable();
    return job->settings.check_logits > 0 ? cpa_answers_open(&network->tokens, &network->answers, err) : CPA_OK;
}

void cpa_network_on_finish(cpa_network *network, const cpa_request_result *result) {
    cpa_answers_take(&network->answers, result);
    if (network->answer->most > 0) cpa_prompt_answer_take(network->answer, result);
}

/* Rank 0. */
static cpa_status check(const cpa_job *job, cpa_network *network, cpa_logits_verdict *out, cpa_error *err) {
    const cpa_logits_tokens tokens = {&network->answers, cpa_answers_token, cpa_answers_count};
    cpa_safetensors *files = NULL;
    CPA_TRY(cpa_safetensors_open(job->settings.model_dir, &files, err));
    cpa_status status =
        cpa_logits_check(&job->network, files, job->model.shape.attention.dtype, &network->sample, &tokens, out, err);
    cpa_safetensors_close(files);
    return status;
}

cpa_status cpa_network_end(const cpa_job *job, cpa_network *network, cpa_control *control, cpa_logits_verdict *out,
                           cpa_error *err) {
    if (job->kept_logits == 0) return CPA_OK;
    CPA_TRY(cpa_logits_sample_gather(&network->sample, control, err));
    cpa_status status = CPA_OK;
    if (control->rank == 0) {
        if (job->settings.generate) cpa_prompt_answer_take_logits(network->answer, &network->sample);
        if (job->settings.check_logits > 0) status = check(job, network, out, err);
    }
    return cpa_control_agree(control, status, err);
}
