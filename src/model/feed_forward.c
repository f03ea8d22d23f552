#include "src/model/feed_forward.h"

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/nn.h"
#include "src/model/mixture_gathered.h"
#include "src/model/mixture_sent.h"
#include "src/model/sliced_linear.h"

int64_t cpa_feed_forward_inner(const cpa_model_config *c) {
    return cpa_max64(c->intermediate, c->moe.shared);
}

/* What shared experts give goes there too. */
int64_t cpa_feed_forward_wide(const cpa_model_config *c) {
    return cpa_max64(2 * cpa_feed_forward_inner(c), c->moe.shared ? c->hidden : 0);
}

typedef struct dense_rows {
    int64_t rows;
    const cpa_slices *slices;
    const void *x;
    void *out;
} dense_rows;

static cpa_linear_args product(const cpa_feed_forward *f, int64_t rows, const void *x, int32_t inputs,
                               const void *weight, const void *bias, int32_t outputs, void *out) {
    return (cpa_linear_args){
        .size = sizeof(cpa_linear_args),
        .rows = rows,
        .inputs = inputs,
        .outputs = outputs,
        .dtype = f->dtype,
        .out_dtype = f->dtype,
        .x = x,
        .weight = weight,
        .bias = bias,
        .out = out,
    };
}

static cpa_status activate(const cpa_feed_forward *f, int64_t rows, int64_t width, cpa_stream *stream) {
    const cpa_swiglu_args args = {
        .size = sizeof args,
        .rows = rows,
        .width = (int32_t)width,
        .dtype = f->dtype,
        .gate_up = f->wide,
        .out = f->inner,
    };
    return cpa_swiglu(&args, stream);
}

/* inner = what the gates among the product's outputs make of the others, by the product itself where that can. */
static cpa_status multiply_gates(const cpa_feed_forward *f, const cpa_linear_args *gate_up, cpa_stream *stream) {
    const cpa_nn_table *nn = stream->device->nn;
    const int32_t width = gate_up->outputs / 2;
    const cpa_linear_fusion gated = {.gated = 1};
    cpa_linear_args args = *gate_up;
    if (args.rows == 0 || args.rows > nn->fused_rows || args.dtype == CPA_F32) {
        CPA_TRY(cpa_linear(gate_up, stream));
        return activate(f, gate_up->rows, width, stream);
    }
    args.x_stride = args.weight_stride = args.inputs;
    args.out = f->inner;
    args.out_stride = width;
    return nn->linear_fused(&args, &gated, stream);
}

/* The gates of this rank's slice, and beside them what they scale. */
static cpa_status sliced_gate_up(const cpa_feed_forward *f, const cpa_feed_forward_weights *w, const dense_rows *at,
                                 cpa_slice own, cpa_stream *stream) {
    const cpa_model_config *c = f->config;
    const int64_t bytes = cpa_dtype_bytes(f->dtype);
    for (int up = 0; up < 2; up++) {
        const int64_t first = w->is_slice ? up * own.count : up * (int64_t)c->intermediate + own.begin;
        const char *weight = (const char *)w->gate_up + first * c->hidden * bytes;
        const char *bias = w->gate_up_bias ? (const char *)w->gate_up_bias + first * bytes : NULL;
        cpa_linear_args args = product(f, at->rows, at->x, c->hidden, weight, bias, (int32_t)own.count,
                                       (char *)f->wide + up * own.count * bytes);
        args.out_stride = 2 * own.count;
        CPA_TRY(cpa_linear(&args, stream));
    }
    return CPA_OK;
}

static cpa_status dense(const cpa_feed_forward *f, const cpa_feed_forward_weights *w, const dense_rows *at,
                        cpa_stream *stream) {
    const cpa_model_config *c = f->config;
    const cpa_linear_args gate_up =
        product(f, at->rows, at->x, c->hidden, w->gate_up, w->gate_up_bias, 2 * c->intermediate, f->wide);
    const cpa_linear_args down =
        product(f, at->rows, f->inner, c->intermediate, w->down, w->down_bias, c->hidden, at->out);
    if (!at->slices) {
        CPA_TRY(multiply_gates(f, &gate_up, stream));
        return cpa_linear(&down, stream);
    }
    const cpa_slice own = cpa_slice_of(c->intermediate, at->slices->ranks, at->slices->rank);
    CPA_TRY(sliced_gate_up(f, w, at, own, stream));
    CPA_TRY(activate(f, at->rows, own.count, stream));
    return cpa_sliced_inputs(at->slices, &down, own, w->is_slice, f->wide, stream);
}

/* The products of the shared experts, of the normed rows x. */
static cpa_shared_products shared_products(const cpa_feed_forward *f, const cpa_feed_forward_weights *w, int64_t rows,
                                           const void *x, void *out, int adds) {
    const int32_t hidden = f->config->hidden, inner = f->config->moe.shared;
    cpa_shared_products shared = {
        .gate_up = product(f, rows, x, hidden, w->shared_gate_up, NULL, 2 * inner, f->inner),
        .down = product(f, rows, f->inner, inner, w->shared_down, NULL, hidden, out),
        .adds = adds,
    };
    shared.gate_up.x_stride = shared.gate_up.weight_stride = hidden;
    shared.gate_up.out_stride = inner;
    shared.down.x_stride = shared.down.weight_stride = inner;
    shared.down.out_stride = hidden;
    return shared;
}

/* What the experts that every token has give, to the out of the last product. */
static cpa_status run_shared(const cpa_feed_forward *f, const cpa_shared_products *shared, cpa_stream *stream) {
    const cpa_linear_fusion adds = {.adds = 1};
    cpa_linear_args gate_up = shared->gate_up;
    gate_up.out = f->wide;
    gate_up.out_stride = gate_up.outputs;
    CPA_TRY(multiply_gates(f, &gate_up, stream));
    return shared->adds ? stream->device->nn->linear_fused(&shared->down, &adds, stream)
                        : cpa_linear(&shared->down, stream);
}

cpa_status cpa_feed_forward_mix(const cpa_feed_forward *f, const cpa_feed_forward_weights *w,
                                const cpa_mixture_rows *rows, cpa_stream *stream) {
    if (f->mixture.spread_over == 1 || rows->step->slices) return cpa_mixture_run(&f->mixture, w, rows, stream);
    return f->mixture.gathers ? cpa_mixture_run_gathered(&f->mixture, w, rows, stream)
                              : cpa_mixture_run_sent(&f->mixture, w, rows, stream);
}

/* A mixture, and what shared experts give, which is added to `added`, or is all that is added. */
static cpa_status mix_shared(const cpa_feed_forward *f, const cpa_feed_forward_weights *w, cpa_mixture_rows rows,
                             void *added, int adds, cpa_stream *stream) {
    const cpa_shared_products shared = shared_products(f, w, rows.step->rows.count, rows.x, added, adds);
    rows.added = added;
    if (cpa_mixture_takes(&f->mixture, rows.step, stream)) {
        rows.beside = &shared;
    } else {
        CPA_TRY(run_shared(f, &shared, stream));
    }
    return cpa_feed_forward_mix(f, w, &rows, stream);
}

cpa_status cpa_feed_forward_run(const cpa_feed_forward *f, const cpa_feed_forward_weights *w,
                                const cpa_model_step *step, const void *x, void *out, cpa_stream *stream) {
    if (w->router) {
        const cpa_mixture_rows rows = {.step = step, .x = x, .out = out, .part = f->wide};
        return w->shared_down ? mix_shared(f, w, rows, f->wide, 0, stream) : cpa_feed_forward_mix(f, w, &rows, stream);
    }
    const dense_rows rows = {step->rows.count, step->slices, x, out};
    return dense(f, w, &rows, stream);
}

cpa_status cpa_feed_forward_add(const cpa_feed_forward *f, const cpa_feed_forward_weights *w,
                                const cpa_model_step *step, const void *x, void *residual, cpa_stream *stream) {
    const cpa_mixture_rows rows = {.step = step, .x = x, .out = residual, .added = residual};
    return w->shared_down ? mix_shared(f, w, rows, residual, 1, stream) : cpa_feed_forward_mix(f, w, &rows, stream);
}
