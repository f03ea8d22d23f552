/* An llm from its opening to its end, and the thread that runs its engine. */
#include <cpattn/llm.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/llm/bound_vocabulary.h"
#include "src/llm/llm_internal.h"

/* ---- the thread of the engine ---- */

static void *serve(void *ctx) {
    cpa_llm *llm = ctx;
    cpa_error failure = {CPA_OK, ""};
    while (sem_wait(&llm->begin) != 0) {}
    if (!llm->all_agree) return NULL;
    const cpa_status status =
        cpa_engine_serve(llm->engine, cpa_request_table_on_finish, cpa_request_table_on_step, &llm->requests);
    if (status != CPA_OK && status != CPA_STOPPED) cpa_fail(&failure, status, "%s", cpa_engine_error(llm->engine));
    cpa_request_table_end(&llm->requests, &failure);
    return NULL;
}

/* Signals of the process are for its other threads. */
static cpa_status start_thread(cpa_llm *llm, cpa_error *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&llm->thread, NULL, serve, llm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) return cpa_fail(err, CPA_NO_MEMORY, "no thread for the engine: %s", strerror(error));
    llm->has_thread = 1;
    return CPA_OK;
}

/* ---- opening: each step is collective and fails on all ranks alike, create_engine as cpa_engine_create says ---- */

static cpa_status find_comm(cpa_llm *llm, const cpa_llm_options *options, cpa_error *err) {
    const size_t known = CPA_STRUCT_THROUGH(cpa_llm_options, comm);
    llm->comm = options && options->size >= known ? options->comm : NULL;
    if (!llm->comm) CPA_TRY(cpa_comm_alone(&llm->own_comm, err));
    if (!llm->comm) llm->comm = llm->own_comm;
    llm->rank = cpa_comm_rank(llm->comm);
    return CPA_OK;
}

static cpa_status open_source(cpa_llm *llm, cpa_error *err) {
    const cpa_llm_setup *setup = &llm->setup;
    cpa_status status = CPA_OK;
    if (llm->rank == 0)
        status = cpa_prompt_source_open(setup->folder, setup->options.chat_template, setup->config.vocabulary,
                                        &llm->source, err);
    if (llm->rank == 0 && status == CPA_OK)
        status = cpa_bound_vocabulary_open(llm->source.tokenizer, setup->config.vocabulary, setup->config.end_ids,
                                           setup->config.n_end_ids, &llm->constraints, err);
    return cpa_comm_agree(llm->comm, status, err);
}

static cpa_status load(cpa_llm *llm, cpa_error *err) {
    const cpa_llm_setup *setup = &llm->setup;
    const cpa_status status = cpa_folder_model_open(setup->folder, &setup->config, &setup->transformer,
                                                    &setup->engine.device, &llm->loaded, err);
    CPA_TRY(cpa_comm_agree(llm->comm, status, err));
    llm->network = cpa_transformer_model(llm->loaded.transformer);
    return CPA_OK;
}

/* Keys of the store are made on rank 0. */
static cpa_status name_model(cpa_llm *llm, cpa_error *err) {
    const cpa_block_store *given = llm->setup.engine.block_store;
    if (!given) return CPA_OK;
    CPA_TRY(CPA_STRUCT_TAKE("block_store", given, cpa_block_store, get, &llm->store, err));
    llm->setup.engine.block_store = &llm->store;
    if (llm->store.model || llm->rank > 0) return CPA_OK;
    llm->store.model = llm->model_name;
    return cpa_model_name(llm->setup.folder, llm->model_name, err);
}

static cpa_status create_engine(cpa_llm *llm, cpa_error *err) {
    cpa_engine_options options = llm->setup.engine;
    options.network = &llm->network;
    cpa_transformer_give_forms(llm->loaded.transformer, &options.model);
    options.token_at = cpa_request_table_token_at;
    options.token_ctx = &llm->requests;
    options.on_token = cpa_request_table_on_token;
    options.on_ranks = cpa_request_table_on_ranks;
    return cpa_engine_create(llm->comm, &options, &llm->engine, err);
}

/* The thread is there before all ranks agree that theirs is, and uses the communicator after it. */
static cpa_status begin_to_serve(cpa_llm *llm, cpa_error *err) {
    const cpa_status status = cpa_comm_agree(llm->comm, start_thread(llm, err), err);
    llm->all_agree = status == CPA_OK;
    sem_post(&llm->begin);
    return status;
}

static cpa_status open_llm(const char *folder, const cpa_llm_options *options, cpa_llm *llm, cpa_error *err) {
    CPA_TRY(find_comm(llm, options, err));
    CPA_TRY(cpa_llm_setup_find(folder, options, llm->comm, &llm->setup, err));
    CPA_TRY(open_source(llm, err));
    CPA_TRY(load(llm, err));
    CPA_TRY(cpa_comm_agree(llm->comm, name_model(llm, err), err));
    CPA_TRY(create_engine(llm, err));
    return begin_to_serve(llm, err);
}

cpa_status cpa_llm_open(const char *folder, const cpa_llm_options *options, cpa_llm **out, cpa_error *err) {
    if (!folder || !out) return cpa_fail(err, CPA_INVALID, "cpa_llm_open: folder and out, expected not to be NULL");
    cpa_error why = {CPA_OK, ""};
    cpa_llm *llm = calloc(1, sizeof *llm);
    if (!llm) return cpa_fail(err, CPA_NO_MEMORY, "no memory for an llm");
    cpa_request_table_open(&llm->requests);
    sem_init(&llm->begin, 0, 0);
    const cpa_status status = open_llm(folder, options, llm, &why);
    if (status == CPA_OK) {
        llm->setup.folder = NULL; /* the caller's, as are the options */
        llm->setup.options = (cpa_llm_options){.size = 0};
        *out = llm;
        return CPA_OK;
    }
    cpa_llm_close(llm);
    return cpa_fail(err, status, "%s", why.message);
}

void cpa_llm_stop(cpa_llm *llm) {
    if (!llm) return;
    cpa_request_table_stop(&llm->requests);
    if (llm->rank == 0 && llm->engine) cpa_engine_stop(llm->engine);
}

void cpa_llm_close(cpa_llm *llm) {
    if (!llm) return;
    cpa_llm_stop(llm);
    if (llm->has_thread) pthread_join(llm->thread, NULL);
    cpa_engine_destroy(llm->engine);
    cpa_folder_model_close(&llm->loaded);
    cpa_request_table_close(&llm->requests);
    cpa_constraints_close(llm->constraints);
    cpa_prompt_source_close(&llm->source);
    cpa_comm_destroy(llm->own_comm);
    sem_destroy(&llm->begin);
    free(llm);
}

cpa_status cpa_llm_get_info(const cpa_llm *llm, cpa_llm_info *out, size_t size) {
    if (!llm) return CPA_INVALID;
    const cpa_llm_info info = {.max_model_len = llm->setup.lengths.max_model_len,
                               .vocabulary = llm->setup.config.vocabulary,
                               .num_blocks = llm->setup.lengths.num_blocks,
                               .has_text = llm->source.tokenizer != NULL,
                               .has_chat = llm->source.chat != NULL};
    return cpa_struct_give(&info, sizeof info, out, size);
}

const cpa_engine *cpa_llm_engine(const cpa_llm *llm) {
    return llm ? llm->engine : NULL;
}
