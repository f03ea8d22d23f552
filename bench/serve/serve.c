#include "bench/serve/serve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/serve/drive.h"
#include "bench/serve/interrupt.h"
#include "bench/serve/result.h"
#include "program/exit_code.h"
#include "program/output_file.h"

static cpa_workload_options workload_options(const cpa_serve_options *options) {
    return (cpa_workload_options){
        .trace = options->trace,
        .requests = options->requests,
        .length_scale = options->length_scale,
        .time_scale = options->time_scale,
        .request_rate = options->request_rate,
        .input_len = options->input_len,
        .output_len = options->output_len,
        .seed = options->seed,
        .cache_salt = "",
    };
}

/* What is wrong with files is known before the server is asked for anything. */
static cpa_status check_files(const cpa_serve_options *options, cpa_workload *workload, cpa_error *err) {
    const cpa_workload_options asked = workload_options(options);
    if (options->result_json[0]) CPA_TRY(cpa_output_check("bench serve: --result-json", options->result_json, err));
    return cpa_workload_load(&asked, workload, err);
}

/* Says one line of what went wrong. */
static cpa_exit_code explain(cpa_status status, const cpa_error *err) {
    if (status != CPA_OK) fprintf(stderr, "cp_attn: %s\n", err->message);
    return cpa_exit_code_of(status);
}

/* The code of what is worse. */
static cpa_exit_code conclude(const cpa_serve_result *result, cpa_exit_code code) {
    if (result->stopped_by) return (cpa_exit_code)(CPA_EXIT_SIGNAL + result->stopped_by);
    if (code != CPA_EXIT_DONE) return code;
    return result->metrics->failed > 0 ? CPA_EXIT_CHECK_FAILED : CPA_EXIT_DONE;
}

static cpa_exit_code measure(const cpa_target *target, cpa_workload *workload, cpa_metrics *metrics,
                             cpa_serve_tenants *tenants) {
    const char *path = target->options->result_json;
    cpa_serve_result result = {.target = target, .workload = workload, .metrics = metrics, .tenants = tenants};
    cpa_error err;
    cpa_status status = path[0] ? cpa_output_retire(path, &err) : CPA_OK;
    if (status != CPA_OK) return explain(status, &err);
    cpa_serve_print_preamble(&result, stdout);
    fflush(stdout);
    status = cpa_serve_drive(target, workload, metrics, tenants, &result.duration_s, &err);
    cpa_exit_code code = explain(status, &err);
    result.stopped_by = cpa_interrupt_received();
    cpa_serve_print_report(&result, stdout);
    status = cpa_output_flush(&err);
    if (code == CPA_EXIT_DONE) code = explain(status, &err);
    cpa_serve_print_failures(metrics, stderr);
    if (path[0]) {
        status = cpa_serve_write_json(&result, path, &err);
        const cpa_exit_code lost = explain(status, &err);
        if (code == CPA_EXIT_DONE) code = lost;
    }
    return conclude(&result, code);
}

static cpa_exit_code run(const cpa_serve_options *options) {
    cpa_workload workload = {0};
    cpa_metrics metrics = {.options = options->metrics};
    cpa_serve_tenants tenants = {0};
    cpa_target target;
    cpa_error err;
    cpa_status status = check_files(options, &workload, &err);
    if (status == CPA_OK) status = cpa_serve_tenants_find(&workload, &options->metrics, &tenants, &err);
    if (status != CPA_OK) {
        cpa_workload_release(&workload);
        return explain(status, &err);
    }
    cpa_interrupt_install();
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        status = cpa_fail(&err, CPA_IO, "bench serve: libcurl does not start");
    if (status == CPA_OK) status = cpa_target_open(options, &target, &err);
    cpa_exit_code code = explain(status, &err);
    if (status == CPA_OK) {
        code = measure(&target, &workload, &metrics, &tenants);
        cpa_target_close(&target);
    }
    curl_global_cleanup();
    cpa_serve_tenants_release(&tenants);
    cpa_metrics_release(&metrics);
    cpa_workload_release(&workload);
    return code;
}

int cpa_bench_serve_main(int argc, char **argv, const char *api_key) {
    cpa_error err;
    cpa_serve_options *options = malloc(sizeof *options);
    if (!options) return CPA_EXIT_FAULT;
    cpa_exit_code code = explain(cpa_serve_options_parse(argc, argv, api_key, options, &err), &err);
    if (code == CPA_EXIT_DONE && options->help) {
        cpa_serve_options_print_help();
        code = explain(cpa_output_flush(&err), &err);
    } else if (code == CPA_EXIT_DONE) {
        code = run(options);
    }
    free(options);
    return (int)code;
}
