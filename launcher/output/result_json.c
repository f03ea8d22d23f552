#include "launcher/output/result_json.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <time.h>

#include "base/check.h"
#include "launcher/output/figures.h"
#include "launcher/ranks/signals.h"
#include "launcher/settings/settings_table.h"
#include "program/json_put.h"
#include "program/links.h"
#include "program/metrics_json.h"

/* How requests ended that were not completed. */
static int add_ends(json_t *root, const cpa_outcome *outcome) {
    const cpa_metrics *done = outcome->metrics;
    return cpa_json_put_int(root, "failed_alone", done->failed) | cpa_json_put_int(root, "cancelled", done->cancelled) |
           cpa_json_put_int(root, "expired", done->expired);
}

/* The figures of the engine that are in an object. */
static int put_figures(json_t *object, cpa_figure_object which, const cpa_outcome *outcome) {
    int bad = 0;
    for (int i = 0; i < cpa_n_figures; i++) {
        const cpa_figure *f = &cpa_figures[i];
        if (f->object != which) continue;
        bad |= f->is_real ? cpa_json_put_real(object, f->key, cpa_figure_value(f, &outcome->stats) * f->scale)
                          : cpa_json_put_int(object, f->key, cpa_figure_count(f, &outcome->stats));
    }
    return bad;
}

static int fill_verify(json_t *object, const cpa_outcome *outcome) {
    return put_figures(object, CPA_FIGURE_VERIFY, outcome);
}

static int fill_logits(json_t *object, const cpa_outcome *outcome) {
    const cpa_logits_verdict *logits = &outcome->logits;
    return cpa_json_put_int(object, "tokens", logits->tokens) |
           cpa_json_put_int(object, "violations", logits->violations) |
           cpa_json_put_int(object, "other_experts", logits->turned) |
           cpa_json_put_real(object, "max_error", logits->max_error);
}

/* How many rows, and the first. */
static int fill_nonfinite(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    json_t *first = stats->nonfinite_rows > 0 ? json_object() : json_null();
    int bad = cpa_json_put_int(object, "rows", stats->nonfinite_rows);
    if (stats->nonfinite_rows > 0)
        bad |= cpa_json_put_int(first, "request", (int64_t)stats->nonfinite_request) |
               cpa_json_put_int(first, "token", stats->nonfinite_position) |
               cpa_json_put_int(first, "layer", stats->nonfinite_layer);
    return bad | json_object_set_new(object, "first", first);
}

static int fill_cp(json_t *object, const cpa_outcome *outcome) {
    return cpa_json_put_int(object, "size", outcome->cp_size) | put_figures(object, CPA_FIGURE_CP, outcome) |
           cpa_json_put_text(object, "decode_kernels", outcome->stats.decode_kernels) |
           cpa_json_put_text(object, "prefill_kernels", outcome->stats.prefill_kernels);
}

static int fill_drafts(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    const int bad = put_figures(object, CPA_FIGURE_DRAFTS, outcome);
    return bad | cpa_json_put_real(
                     object, "acceptance_rate",
                     stats->draft_tokens > 0 ? (double)stats->accepted_tokens / (double)stats->draft_tokens : NAN);
}

/* Several groups of layers, those that keep most first. */
static int put_groups(json_t *object, const cpa_engine_stats *stats) {
    json_t *list = json_array();
    for (int32_t g = 0; g < stats->kv_groups; g++) {
        const cpa_engine_kv_group *group = &stats->kv_group[g];
        json_t *one = json_object();
        if (cpa_json_put_int(one, "layers", group->layers) | cpa_json_put_int(one, "window", group->window) |
            cpa_json_put_int(one, "sinks", group->sinks) | cpa_json_put_int(one, "blocks", group->blocks) |
            cpa_json_put_int(one, "peak", group->peak) | cpa_json_put_int(one, "block_bytes", group->block_bytes) |
            json_array_append_new(list, one)) {
            json_decref(list);
            return -1;
        }
    }
    return json_object_set_new(object, "groups", list);
}

/* The layers whose cache is not quantised, if there are some. */
static int put_unquantised(json_t *object, const cpa_outcome *outcome) {
    const cpa_model_shape shape = cpa_model_shape_of(outcome->model);
    if (!shape.unquantised_layers) return 0;
    json_t *list = json_array();
    int failed = 0;
    for (int32_t layer = 0; layer < shape.layers; layer++)
        if (cpa_model_leaves_layer(&shape, layer)) failed |= json_array_append_new(list, json_integer(layer));
    return json_object_set_new(object, "unquantised_layers", list) | failed;
}

/* What the cache has of one token in one layer, on average. */
static int64_t token_layer_bytes(const cpa_outcome *outcome) {
    return outcome->block_bytes / outcome->model->shape.layers / outcome->settings->block_size;
}

static int fill_kv(json_t *object, const cpa_outcome *outcome) {
    const cpa_engine_stats *stats = &outcome->stats;
    const cpa_cache_bytes_used bytes = cpa_outcome_cache_bytes(outcome);
    return cpa_json_put_int(object, "bytes", bytes.all) | cpa_json_put_int(object, "peak_bytes", bytes.peak) |
           (stats->kv_groups > 1 && put_groups(object, stats)) | put_unquantised(object, outcome) |
           put_figures(object, CPA_FIGURE_KV, outcome) | cpa_json_put_int(object, "block_bytes", outcome->block_bytes) |
           cpa_json_put_int(object, "token_layer_bytes", token_layer_bytes(outcome)) |
           cpa_json_put_text(object, "dtype", cpa_dtype_name(outcome->model->shape.attention.kv_dtype));
}

static int fill_model(json_t *object, const cpa_outcome *outcome) {
    const cpa_model_shape *shape = &outcome->model->shape;
    return cpa_json_put_text(object, "name", outcome->model->name) | cpa_json_put_int(object, "layers", shape->layers) |
           cpa_json_put_int(object, "q_heads", shape->attention.q_heads) |
           cpa_json_put_int(object, "kv_heads", shape->attention.kv_heads) |
           cpa_json_put_int(object, "head_dim", shape->attention.k_dim) |
           cpa_json_put_int(object, "v_head_dim", shape->attention.v_dim) |
           cpa_json_put_text(object, "attention", shape->attention.v_in_k ? "latent" : "heads") |
           cpa_json_put_text(object, "dtype", cpa_dtype_name(shape->attention.dtype)) |
           json_object_set_new(object, "causal", json_boolean(shape->mask.causal)) |
           cpa_json_put_int(object, "window", shape->mask.window) |
           cpa_json_put_int(object, "sinks", shape->mask.sinks);
}

/* Every setting as it was in effect. */
static int fill_settings(json_t *object, const cpa_outcome *outcome) {
    int bad = 0;
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        const cpa_field *row = &cpa_settings_rows[f];
        if (!cpa_setting_is_action(row)) bad |= cpa_json_put_field(object, row, outcome->settings);
    }
    return bad;
}

/* A list of pairs of ranks. */
static json_t *pairs_to_json(const cpa_outcome *outcome) {
    json_t *pairs = json_array();
    for (int32_t a = 0; a < outcome->cp_size; a++) {
        for (int32_t b = a + 1; b < outcome->cp_size; b++) {
            const cpa_link *link = &outcome->links[a * outcome->cp_size + b];
            json_t *pair =
                json_pack("{s[ii] ss so so}", "ranks", a, b, "kind", cpa_link_kind_name(link->kind), "nvlinks",
                          link->nvlinks > 0 ? json_integer(link->nvlinks) : json_null(), "gbytes_per_s",
                          link->bandwidth > 0 ? json_real(link->bandwidth / 1e9) : json_null());
            if (json_array_append_new(pairs, pair) == 0) continue;
            json_decref(pairs);
            return NULL;
        }
    }
    return pairs;
}

/* What carries tensors, the variables that tell it how, and what joins the ranks; null where no engine was made. */
static int add_links(json_t *root, const cpa_outcome *outcome) {
    if (!outcome->links) return json_object_set_new(root, "links", json_null());
    json_t *environment = json_object(), *links = json_object();
    const char *name, *value;
    int bad = 0;
    for (int i = 0; (name = cpa_links_variable(outcome->transport, i, &value)) != NULL; i++)
        bad |= cpa_json_put_text(environment, name, value);
    bad |= cpa_json_put_text(links, "transport", outcome->transport);
    bad |= json_object_set_new(links, "environment", environment);
    bad |= json_object_set_new(links, "pairs", pairs_to_json(outcome));
    return json_object_set_new(root, "links", links) | bad;
}

/* Everything in one object; NULL when memory runs out. */
static json_t *pack(const cpa_outcome *outcome) {
    static const struct {
        const char *key;
        int (*fill)(json_t *object, const cpa_outcome *outcome);
        int known; /* not 0: a run that was given up has this part too */
    } parts[] = {{"verify", fill_verify, 0},
                 {"nonfinite", fill_nonfinite, 0},
                 {"cp", fill_cp, 0},
                 {"kv", fill_kv, 0},
                 {"spec_decode", fill_drafts, 0},
                 {"model", fill_model, 1},
                 {"settings", fill_settings, 1}};
    char date[32], digest[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    snprintf(digest, sizeof digest, "%016" PRIx64, outcome->stats.output_digest);

    json_t *root = json_object();
    int bad = add_ends(root, outcome) | cpa_metrics_put(root, outcome->metrics, outcome->workload->count,
                                                        outcome->stats.duration_s, !outcome->settings->dry_run);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        int known = parts[i].known || !outcome->given_up;
        json_t *object = known ? json_object() : json_null();
        if (known) bad |= parts[i].fill(object, outcome);
        bad |= json_object_set_new(root, parts[i].key, object);
    }
    bad |= add_links(root, outcome);
    if (outcome->checked_logits) {
        json_t *logits = json_object();
        bad |= fill_logits(logits, outcome) | json_object_set_new(root, "logits", logits);
    }
    bad |= outcome->stopped_by ? cpa_json_put_text(root, "stopped_by", cpa_signals_name(outcome->stopped_by))
                               : json_object_set_new(root, "stopped_by", json_null());
    bad |= outcome->failure.status != CPA_OK ? cpa_json_put_text(root, "error", outcome->failure.message)
                                             : json_object_set_new(root, "error", json_null());
    bad |= outcome->given_up ? json_object_set_new(root, "output_digest", json_null())
                             : cpa_json_put_text(root, "output_digest", digest);
    bad |= cpa_json_put_text(root, "device", outcome->device) |
           json_object_set_new(root, "dry_run", json_boolean(outcome->settings->dry_run)) |
           cpa_json_put_text(root, "version", cpa_version()) | cpa_json_put_text(root, "date", date);
    if (!bad) return root;
    json_decref(root);
    return NULL;
}

cpa_status cpa_result_json_write(const char *path, const cpa_outcome *outcome, cpa_error *err) {
    json_t *root = pack(outcome);
    if (!root) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the results", path);
    cpa_status status = cpa_json_write(path, root, err);
    json_decref(root);
    return status;
}
