/* Which rank attends which segment: longest processing time, with the longest cut where that ends sooner. */
#include <math.h>
#include <stdlib.h>

#include "base/struct_size.h"
#include "src/ops/check_args.h"
#include "src/ops/varlen.h"

typedef struct costed_segment {
    double pairs; /* pairs of a query and a key */
    int64_t index;
} costed_segment;

typedef struct deal {
    const cpa_varlen_batch *batch;
    const cpa_varlen_deal_args *args;
    costed_segment *segments; /* the longest first */
    double *loads;            /* [ranks], pairs of each rank */
    double pair_flops;
    double key_bytes; /* bytes of the key and the value of a row */
} deal;

/* Ties keep the order of the segments: the deal is the same on every rank. */
static int longer_first(const void *a, const void *b) {
    const costed_segment *left = a, *right = b;
    if (left->pairs != right->pairs) return left->pairs < right->pairs ? 1 : -1;
    return (left->index > right->index) - (left->index < right->index);
}

static int32_t least_loaded(const deal *d) {
    int32_t least = 0;
    for (int32_t r = 1; r < d->args->ranks; r++)
        if (d->loads[r] < d->loads[least]) least = r;
    return least;
}

/* Deals all but the first `cut` segments whole; the seconds until the last rank is done. owners may be NULL. */
static double deal_with(deal *d, int64_t cut, int32_t *owners) {
    const int32_t ranks = d->args->ranks;
    double pairs = 0, bytes = 0, most = 0;
    for (int64_t i = 0; i < cut; i++) {
        const cpa_varlen_part whole = cpa_varlen_part_of(d->batch, 0, d->segments[i].index, 1, 0);
        pairs += d->segments[i].pairs / ranks;
        bytes += (double)whole.k_count * d->key_bytes * (ranks - 1) / ranks;
        if (owners) owners[d->segments[i].index] = CPA_VARLEN_CUT;
    }
    for (int32_t r = 0; r < ranks; r++) d->loads[r] = 0;
    for (int64_t i = cut; i < d->batch->n_segments; i++) {
        const int32_t rank = least_loaded(d);
        d->loads[rank] += d->segments[i].pairs;
        if (owners) owners[d->segments[i].index] = rank;
    }
    for (int32_t r = 0; r < ranks; r++) most = fmax(most, d->loads[r]);
    if (d->args->flops == 0 || d->args->bandwidth == 0) return most;
    return (most + pairs) * d->pair_flops / d->args->flops + bytes / d->args->bandwidth;
}

/* Segments of up to half a rank's share leave ranks even; there are fewer others than twice the ranks. */
static int64_t most_cuts(const deal *d) {
    double all = 0;
    int64_t n = 0;
    if (d->args->ranks == 1 || d->args->flops == 0 || d->args->bandwidth == 0) return 0;
    for (int64_t i = 0; i < d->batch->n_segments; i++) all += d->segments[i].pairs;
    while (n < d->batch->n_segments && d->segments[n].pairs > 0 && 2 * d->segments[n].pairs * d->args->ranks > all) n++;
    return n;
}

static void deal_segments(deal *d, int32_t *owners) {
    const int64_t n = d->batch->n_segments;
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++) {
        const cpa_varlen_part whole = cpa_varlen_part_of(d->batch, 0, i, 1, 0);
        const double rows = (double)whole.q_count, keys = (double)whole.k_count;
        const double hidden = d->batch->causal ? fmin(rows, keys) / 2 : 0; /* of the keys of a row, on average */
        d->segments[i] = (costed_segment){rows * (keys - hidden), i};
    }
    qsort(d->segments, (size_t)n, sizeof *d->segments, longer_first);
    double soonest = deal_with(d, 0, NULL);
    for (int64_t cut = 1; cut <= most_cuts(d); cut++) {
        const double seconds = deal_with(d, cut, NULL);
        if (seconds < soonest) soonest = seconds, best = cut;
    }
    (void)deal_with(d, best, owners);
}

static cpa_status check_rates(const cpa_varlen_deal_args *args, cpa_error *err) {
    REQUIRE(err, args->ranks >= 1 && args->ranks <= CPA_MOST_RANKS, "varlen deal: ranks is %d, expected 1..%d",
            args->ranks, CPA_MOST_RANKS);
    CPA_TRY(cpa_check_dtype("varlen deal", "dtype", args->dtype, err));
    REQUIRE(err, args->flops >= 0 && args->bandwidth >= 0 && isfinite(args->flops) && isfinite(args->bandwidth),
            "varlen deal: flops is %g and bandwidth is %g, expected 0 or more", args->flops, args->bandwidth);
    return CPA_OK;
}

cpa_status cpa_varlen_deal(const cpa_varlen_batch *given, const cpa_varlen_deal_args *given_args, int32_t *owners,
                           cpa_error *err) {
    cpa_varlen_batch batch;
    cpa_varlen_deal_args args;
    cpa_attention_shape shape;
    CPA_TRY(cpa_varlen_check_batch(NULL, given, &batch, &shape, err));
    CPA_TRY(CPA_STRUCT_TAKE("varlen deal", given_args, cpa_varlen_deal_args, ranks, &args, err));
    CPA_TRY(check_rates(&args, err));
    REQUIRE(err, owners || batch.n_segments == 0, "varlen deal: owners is NULL");
    if (batch.n_segments == 0) return CPA_OK;
    deal d = {
        .batch = &batch,
        .args = &args,
        .segments = malloc((size_t)batch.n_segments * sizeof *d.segments),
        .loads = malloc((size_t)args.ranks * sizeof *d.loads),
        .pair_flops = 2.0 * (shape.k_dim + shape.v_dim) * shape.q_heads,
        .key_bytes = (double)((shape.k_dim + shape.v_dim) * (int64_t)shape.kv_heads * cpa_dtype_bytes(args.dtype))};
    const int enough = d.segments && d.loads;
    if (enough) deal_segments(&d, owners);
    free(d.loads);
    free(d.segments);
    return enough
               ? CPA_OK
               : cpa_fail(err, CPA_NO_MEMORY, "varlen deal: no memory for %lld segments", (long long)batch.n_segments);
}
