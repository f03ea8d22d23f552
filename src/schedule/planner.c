#include "src/schedule/planner.h"

#include <math.h>

#include "base/struct_size.h"

/* e: bytes of an element of keys and values; of latents, where values lie in keys, those of a row by the columns that both
 * have. */
static double element_bytes(const cpa_planner *p) {
    const cpa_attention_shape *shape = &p->shape;
    if (!shape->v_in_k) return (double)cpa_dtype_bytes(shape->kv_dtype);
    return (double)cpa_shape_row_bytes(shape, CPA_KEYS) / ((double)shape->k_dim + shape->v_dim);
}

double cpa_planner_overlap_tokens(const cpa_planner *p) {
    return (double)p->cp_size * p->flops * p->shape.kv_heads * element_bytes(p) /
           (2.0 * p->shape.q_heads * p->bandwidth);
}

/* The share of new tokens from which pass-KV moves fewer bytes in its exposed time; T new tokens. */
static double bytes_share(const cpa_planner *p, double new_tokens) {
    return 2.0 * p->shape.kv_heads / p->shape.q_heads -
           4.0 * new_tokens * p->bandwidth / ((double)p->cp_size * p->flops * element_bytes(p));
}

static double on_line(cpa_planner_line line, double cached) {
    return line.first_s + line.each_s * (cached - CPA_PLANNER_PROBE_CACHED);
}

static double probe_seconds(const cpa_planner_probe *probe, cpa_algorithm algorithm, double cached) {
    return on_line(algorithm == CPA_PASS_Q ? probe->pass_q : probe->pass_kv, cached);
}

/* Seconds by the probes, between two of them in proportion; 0 where they say nothing. */
static double timed_seconds(const cpa_planner *p, cpa_algorithm algorithm, int64_t new_tokens, int64_t cached_tokens) {
    const double cached = (double)cached_tokens;
    int32_t next = 0;
    while (next < p->n_probes && p->probes[next].new_tokens < new_tokens) next++;
    if (cached_tokens < CPA_PLANNER_PROBE_CACHED || next == p->n_probes) return 0;
    const cpa_planner_probe *above = &p->probes[next];
    if (above->new_tokens == new_tokens) return probe_seconds(above, algorithm, cached);
    if (next == 0) return 0;
    const cpa_planner_probe *below = above - 1;
    const double share = (double)(new_tokens - below->new_tokens) / (double)(above->new_tokens - below->new_tokens);
    return (1 - share) * probe_seconds(below, algorithm, cached) + share * probe_seconds(above, algorithm, cached);
}

cpa_planner_choice cpa_planner_choose(const cpa_planner *p, int64_t new_tokens, int64_t cached_tokens, int decode) {
    double t = (double)new_tokens, cached = (double)cached_tokens;
    if (p->forced != CPA_AUTO) return (cpa_planner_choice){p->forced, CPA_REASON_FORCED};
    if (p->cp_size == 1) return (cpa_planner_choice){CPA_PASS_KV, CPA_REASON_LOCAL};
    if (decode) return (cpa_planner_choice){CPA_PASS_Q, CPA_REASON_DECODE};
    const double kv_s = timed_seconds(p, CPA_PASS_KV, new_tokens, cached_tokens);
    if (kv_s > 0) {
        const double q_s = timed_seconds(p, CPA_PASS_Q, new_tokens, cached_tokens);
        return (cpa_planner_choice){q_s < kv_s ? CPA_PASS_Q : CPA_PASS_KV, CPA_REASON_MEASURED};
    }
    if (t >= cpa_planner_overlap_tokens(p)) return (cpa_planner_choice){CPA_PASS_KV, CPA_REASON_OVERLAP};
    if (t / (t + cached) >= bytes_share(p, t)) return (cpa_planner_choice){CPA_PASS_KV, CPA_REASON_BYTES};
    return (cpa_planner_choice){CPA_PASS_Q, CPA_REASON_PREFIX};
}

/* Bytes of one token in one layer of the cache: Hkv * (dk + dv) * e. */
static double token_bytes(const cpa_planner *p) {
    return p->shape.kv_heads * ((double)p->shape.k_dim + p->shape.v_dim) * element_bytes(p);
}

/* With T new and P cached tokens, head widths dk and dv, and every count spread evenly over the N ranks, the longer of
 *     2 * T * (P + T/2) * Hq * (dk + dv) / (N * C)         two products over the causal pairs
 *     (P + T) * Hkv * (dk + dv) * e / (N * R)              every rank reads its share of the cache; where R is known */
static double attention_seconds(const cpa_planner *p, double new_tokens, double cached) {
    double n = p->cp_size, width = (double)p->shape.k_dim + p->shape.v_dim;
    double products = 2 * new_tokens * (cached + new_tokens / 2) * p->shape.q_heads * width / (n * p->flops);
    if (!(p->memory_bandwidth > 0)) return products;
    return fmax(products, (cached + new_tokens) * token_bytes(p) / (n * p->memory_bandwidth));
}

/* Exchanges, likewise:
 *     pass-KV     (N-1)/N * (P + T) * Hkv * (dk + dv) * e / W              every rank sends its shard to all others
 *     pass-Q      (N-1)/N * T * Hq * (dk * e + dv * s + 4) / W             queries out, O of s bytes an element and LSE back
 * That of pass-KV overlaps its attention; pass-Q needs all queries first and all states last. */
double cpa_planner_predict(const cpa_planner *p, cpa_algorithm algorithm, int64_t new_tokens, int64_t cached_tokens) {
    double n = p->cp_size, t = (double)new_tokens, cached = (double)cached_tokens, others = (n - 1) / n;
    const double timed = timed_seconds(p, algorithm, new_tokens, cached_tokens);
    if (timed > 0) return timed;
    double attention = attention_seconds(p, t, cached);
    if (algorithm == CPA_PASS_Q) {
        const double q_element = (double)cpa_dtype_bytes(p->shape.v_in_k ? p->shape.dtype : p->shape.kv_dtype);
        const double state_bytes = p->shape.v_dim * (double)cpa_dtype_bytes(p->state_dtype) + sizeof(float);
        double row_bytes = p->shape.q_heads * (p->shape.k_dim * q_element + state_bytes);
        return attention + others * t * row_bytes / p->bandwidth;
    }
    return fmax(attention, others * (cached + t) * token_bytes(p) / p->bandwidth);
}

double cpa_planner_predict_decode(const cpa_planner *p, int64_t cached_tokens) {
    return attention_seconds(p, 1, (double)cached_tokens);
}

cpa_planner cpa_planner_on_rank(const cpa_planner *planner) {
    cpa_planner local = *planner;
    local.cp_size = 1;
    local.n_probes = 0;
    return local;
}

/* Seconds of one layer over the life of a sequence, for P prompt tokens of which F are found, and D output tokens:
 *     prefill   the attention of P - F new tokens over P, as above, on n ranks
 *     decode    D * (P + D/2) * Hkv * (dk + dv) * e / (n * R)      every rank reads its share of the cache
 *               D * x / (1 + running), if n > 1                    a step exchanges once for all its sequences */
static double life_seconds(const cpa_planner *p, int64_t prompt, int64_t output, int64_t found, int64_t running) {
    double d = (double)output, tokens = (double)prompt + d / 2;
    double prefill = cpa_planner_predict(p, CPA_PASS_KV, prompt - found, found);
    double exchange = p->cp_size > 1 ? p->exchange_s / (1.0 + (double)running) : 0;
    return prefill + d * (tokens * token_bytes(p) / (p->cp_size * p->memory_bandwidth) + exchange);
}

int64_t cpa_planner_local_tokens(const cpa_planner *p) {
    return p->cp_size == 1 || !(p->exchange_s > 0) || p->forced != CPA_AUTO ? 0 : CPA_PLANNER_LOCAL_TOKENS;
}

int cpa_planner_prefers_local(const cpa_planner *p, int64_t prompt_tokens, int64_t output_tokens, int64_t found_local,
                              int64_t found_sharded, int64_t running) {
    cpa_planner local = cpa_planner_on_rank(p);
    return life_seconds(&local, prompt_tokens, output_tokens, found_local, running) <
           life_seconds(p, prompt_tokens, output_tokens, found_sharded, running);
}

cpa_algorithm cpa_algorithm_choose(const cpa_algorithm_question *question) {
    cpa_algorithm_question q;
    if (CPA_STRUCT_TAKE("algorithm", question, cpa_algorithm_question, cached_tokens, &q, NULL) != CPA_OK)
        return CPA_AUTO;
    const int known = q.flops > 0 && q.bandwidth > 0, unknown = q.flops == 0 && q.bandwidth == 0;
    if (q.ranks < 1 || q.shape.q_heads < 1 || q.shape.kv_heads < 1 || !cpa_dtype_traits_of(q.shape.kv_dtype) ||
        q.new_tokens < 1 || q.cached_tokens < 0 || !(known || unknown))
        return CPA_AUTO;
    const cpa_planner planner = {
        .cp_size = q.ranks,
        .shape = q.shape,
        .flops = known ? q.flops : INFINITY, /* nothing hides an exchange, and its bytes are all that counts */
        .bandwidth = known ? q.bandwidth : 1,
    };
    return cpa_planner_choose(&planner, q.new_tokens, q.cached_tokens, q.new_tokens == 1).algorithm;
}

const char *cpa_planner_reason_name(cpa_planner_reason reason) {
    switch (reason) {
        case CPA_REASON_FORCED: return "forced";
        case CPA_REASON_LOCAL: return "one rank";
        case CPA_REASON_DECODE: return "decode";
        case CPA_REASON_OVERLAP: return "exchange hides under attention";
        case CPA_REASON_BYTES: return "keys and values are fewer bytes";
        case CPA_REASON_MEASURED: return "faster as measured at the start";
        case CPA_REASON_PREFIX: return "few new tokens, long prefix";
        case CPA_REASON_COUNT: break;
    }
    return "unknown";
}
