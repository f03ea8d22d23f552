/* The model of --model-dir in a run, on one rank: its weights and what its steps need, on the device that the engine
 * will open, and what --check-logits keeps. */
#ifndef CPA_LAUNCHER_NETWORK_H
#define CPA_LAUNCHER_NETWORK_H

#include "comm/comm.h"
#include "launcher/answers.h"
#include "launcher/job.h"
#include "src/llm/folder_model.h"
#include "src/model/logits_check.h"

/* One that was never opened has only zeros. It must not move. */
typedef struct cpa_network {
    cpa_folder_model loaded;
    cpa_model model;
    cpa_vocabulary_tokens tokens; /* rank 0 */
    cpa_prompt_answer *answer;    /* rank 0, the caller's: of `generate`; without a prompt: none */
    cpa_sampling sampling;        /* rank 0: how the tokens of its requests are drawn */
    cpa_logits_sample sample;     /* sample of the tokens whose logits are checked, of the size that the job sets */
    cpa_answers answers;          /* rank 0, with --check-logits */
} cpa_network;

/* Loads the weights of the job's folder to the device that `engine_device` opens. Every rank for itself. The network
 * must outlive the engine, and the workload and the answer, on rank 0, must outlive it. On failure it is as if never
 * opened. */
cpa_status cpa_network_open(const cpa_job *job, int32_t rank, cpa_workload *workload, cpa_prompt_answer *answer,
                            const cpa_device_options *engine_device, cpa_network *network, cpa_error *err);
void cpa_network_close(cpa_network *network);

/* Rank 0, when the workload is known: how its tokens are drawn, and room for its answers if logits will be checked. */
cpa_status cpa_network_begin(const cpa_job *job, cpa_network *network, cpa_error *err);

/* Rank 0: a request has ended. */
void cpa_network_on_finish(cpa_network *network, const cpa_request_result *result);

/* After the run: gathers the logits that were kept; with --check-logits *out is the verdict, on rank 0. Collective;
 * fails on all ranks alike. */
cpa_status cpa_network_end(const cpa_job *job, cpa_network *network, cpa_control *control, cpa_logits_verdict *out,
                           cpa_error *err);

#endif
