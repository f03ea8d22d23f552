/* kv_write, kv_copy, kv_swap, kv_move, kv_convert and kv_pack: every argument is checked here, then the table of the
 * back end runs. */
#include <stdlib.h>

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/kv_piece.h"

/* ---- kv_write ---- */

/* No two of n slots, `stride` apart, are the same, but for those that are none. Brings them to the host. */
static cpa_status check_slots(const char *where, const char *array, const int64_t *on_device, int64_t n, int64_t stride,
                              cpa_stream *stream) {
    cpa_status status;
    cpa_error *err = &stream->error;
    int64_t *slots = malloc((size_t)(n * stride + 1) * sizeof *slots);
    cpa_checked_range *ranges = malloc((size_t)(n + 1) * sizeof *ranges);
    if (!slots || !ranges) {
        status = cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the check of %lld slots", where, (long long)n);
        goto done;
    }
    const int64_t bytes = n > 0 ? ((n - 1) * stride + 1) * (int64_t)sizeof *slots : 0;
    CPA_TRY_GOTO(stream->device->table->copy(slots, on_device, bytes, stream), done);
    CPA_TRY_GOTO(stream->device->table->stream_sync(stream), done);
    int64_t used = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = slots[i * stride];
        if (slot >= 0 && slot < INT64_MAX) ranges[used++] = (cpa_checked_range){slot, slot + 1, i};
    }
    status = cpa_check_disjoint(where, array, "slot", ranges, used, err);
done:
    free(ranges);
    free(slots);
    return status;
}

static cpa_status check_kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    cpa_error *err = &stream->error;
    REQUIRE(err, args->tokens >= 0 && args->tokens <= CPA_MOST_TOKENS, "kv_write: tokens is %lld, expected 0 to 2^44",
            (long long)args->tokens);
    CPA_TRY(cpa_check_dtype("kv_write", "dtype", args->dtype, err));
    CPA_TRY(cpa_check_view("kv_write", &args->kv, err));
    const int has_v = args->v || args->kv.v_in_k;
    REQUIRE(err, args->tokens == 0 || (args->k && has_v && args->slot_mapping), "kv_write: %s is NULL",
            !args->k ? "k"
            : !has_v ? "v"
                     : "slot_mapping");
    const int64_t bytes = cpa_dtype_bytes(args->dtype);
    const cpa_checked_heads k = {"k_row_stride",      "k_head_stride", args->tokens,      args->k_row_stride,
                                 args->k_head_stride, bytes,           args->kv.kv_heads, args->kv.k_dim};
    const cpa_checked_heads v = {"v_row_stride",      "v_head_stride", args->tokens,      args->v_row_stride,
                                 args->v_head_stride, bytes,           args->kv.kv_heads, args->kv.v_dim};
    CPA_TRY(cpa_check_aligned("kv_write", "k", args->k, bytes, err));
    CPA_TRY(cpa_check_aligned("kv_write", "v", args->v, bytes, err));
    CPA_TRY(cpa_check_aligned("kv_write", "slot_mapping", args->slot_mapping, sizeof *args->slot_mapping, err));
    CPA_TRY(cpa_check_heads_of_rows("kv_write", &k, err));
    CPA_TRY(cpa_check_heads_of_rows("kv_write", &v, err));
    if (!stream->device->debug_checks) return CPA_OK;
    return check_slots("kv_write", "slot_mapping", args->slot_mapping, args->tokens, 1, stream);
}

cpa_status cpa_kv_write(const cpa_kv_write_args *given, cpa_stream *stream) {
    cpa_kv_write_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_write", given, cpa_kv_write_args, kv, &args, &stream->error));
    CPA_TRY(check_kv_write(&args, stream));
    return stream->device->operators->kv_write(&args, stream);
}

/* ---- kv_copy ---- */

/* The blocks of a copy or a conversion, which is named `where`. */
typedef struct block_pairs {
    const char *where;
    const cpa_kv_view *src, *dst;
    const int64_t (*pairs)[2];
    int64_t n;
} block_pairs;

/* The name of a pool that is that of both; NULL: there is none. */
static const char *shared_pool(const cpa_kv_view *a, const cpa_kv_view *b) {
    return a->k == b->k ? "key" : !a->v_in_k && a->v == b->v ? "value" : NULL;
}

/* Every block is written once, and none is read that is written. */
static cpa_status check_once(const block_pairs *p, cpa_error *err) {
    const int one_pool = shared_pool(p->src, p->dst) != NULL;
    cpa_checked_range *written = malloc((size_t)(p->n + 1) * sizeof *written);
    if (!written)
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the check of %lld pairs", p->where, (long long)p->n);
    for (int64_t i = 0; i < p->n; i++) {
        const int64_t dst = p->pairs[i][1];
        written[i] = (cpa_checked_range){dst, dst + 1, i};
    }
    cpa_status status = cpa_check_disjoint(p->where, "pairs", "the destination", written, p->n, err);
    for (int64_t i = 0; i < p->n && one_pool && status == CPA_OK; i++) {
        const int64_t src = p->pairs[i][0];
        int64_t low = 0, high = p->n;
        while (low < high) { /* the first that is written and not below src */
            const int64_t middle = low + (high - low) / 2;
            if (written[middle].begin < src)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == p->n || written[low].begin != src) continue;
        status =
            cpa_fail(err, CPA_INVALID, "%s: pairs[%lld] reads block %lld, which pairs[%lld] writes in the same pool",
                     p->where, (long long)i, (long long)src, (long long)written[low].index);
    }
    free(written);
    return status;
}

static cpa_status check_pairs(const block_pairs *p, cpa_error *err) {
    REQUIRE(err, p->n >= 0 && p->n <= INT32_MAX && (p->n == 0 || p->pairs), "%s: n_pairs is %lld and pairs is %s",
            p->where, (long long)p->n, p->pairs ? "set" : "NULL");
    CPA_TRY(cpa_check_aligned(p->where, "pairs", p->pairs, sizeof **p->pairs, err));
    for (int64_t i = 0; i < p->n; i++) {
        int64_t src = p->pairs[i][0], dst = p->pairs[i][1];
        REQUIRE(err, src >= 0 && src < p->src->num_blocks && dst >= 0 && dst < p->dst->num_blocks,
                "%s: pairs[%lld] copies block %lld of %lld to block %lld of %lld", p->where, (long long)i,
                (long long)src, (long long)p->src->num_blocks, (long long)dst, (long long)p->dst->num_blocks);
    }
    return check_once(p, err);
}

static cpa_status check_kv_copy(const cpa_kv_copy_args *args, cpa_error *err) {
    CPA_TRY(cpa_check_view("kv_copy: src", &args->src, err));
    CPA_TRY(cpa_check_view("kv_copy: dst", &args->dst, err));
    CPA_TRY(cpa_check_same_shape("kv_copy", &args->src, &args->dst, err));
    return check_pairs(&(block_pairs){"kv_copy", &args->src, &args->dst, args->pairs, args->n_pairs}, err);
}

cpa_status cpa_kv_copy(const cpa_kv_copy_args *given, cpa_stream *stream) {
    cpa_kv_copy_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_copy", given, cpa_kv_copy_args, n_pairs, &args, &stream->error));
    CPA_TRY(check_kv_copy(&args, &stream->error));
    return stream->device->operators->kv_copy(&args, stream);
}

/* ---- kv_swap ---- */

static cpa_status check_kv_swap(const cpa_kv_swap_args *args, cpa_error *err) {
    const cpa_kv_view *a = &args->src, *b = &args->dst;
    CPA_TRY(cpa_check_view("kv_swap: src", a, err));
    CPA_TRY(cpa_check_view("kv_swap: dst", b, err));
    CPA_TRY(cpa_check_same_shape("kv_swap", a, b, err));
    const char *shared = shared_pool(a, b);
    REQUIRE(err, args->n_pairs == 0 || !shared, "kv_swap: src and dst have the same %s pool, expected two", shared);
    CPA_TRY(check_pairs(&(block_pairs){"kv_swap", a, b, args->pairs, args->n_pairs}, err));
    const cpa_kv_view src = cpa_kv_view_resolve(*a), dst = cpa_kv_view_resolve(*b);
    for (int part = CPA_KEYS; part < cpa_kv_parts(a); part++) {
        const cpa_kv_pool from = cpa_kv_pool_of(&src, (cpa_kv_part)part), to = cpa_kv_pool_of(&dst, (cpa_kv_part)part);
        if (!cpa_kv_piece_bytes(&src, (cpa_kv_part)part) || from.token_stride != to.token_stride ||
            from.head_stride != to.head_stride)
            return cpa_fail(
                err, CPA_UNSUPPORTED,
                "kv_swap: blocks of %s have strides of tokens and heads of %lld and %lld bytes in src, %lld "
                "and %lld in dst; expected the same, of blocks in one piece",
                part == CPA_KEYS ? "keys" : "values", (long long)from.token_stride, (long long)from.head_stride,
                (long long)to.token_stride, (long long)to.head_stride);
    }
    return CPA_OK;
}

/* Copies one pool of a swap, blocks that are neighbours on both sides at once. */
static cpa_status swap_pool(const cpa_kv_swap_args *args, cpa_kv_part part, cpa_stream *stream) {
    const cpa_kv_view src = cpa_kv_view_resolve(args->src), dst = cpa_kv_view_resolve(args->dst);
    const cpa_kv_pool from = cpa_kv_pool_of(&src, part), to = cpa_kv_pool_of(&dst, part);
    const int64_t bytes = cpa_kv_piece_bytes(&src, part);
    const int dense = from.block_stride == bytes && to.block_stride == bytes;
    for (int64_t i = 0, n = 1; i < args->n_pairs; i += n, n = 1) {
        const int64_t *pair = args->pairs[i];
        while (dense && i + n < args->n_pairs && pair[2 * n] == pair[0] + n && pair[2 * n + 1] == pair[1] + n) n++;
        CPA_TRY(stream->device->table->copy(to.memory + pair[1] * to.block_stride,
                                            from.memory + pair[0] * from.block_stride, n * bytes, stream));
    }
    return CPA_OK;
}

cpa_status cpa_kv_swap(const cpa_kv_swap_args *given, cpa_stream *stream) {
    cpa_kv_swap_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_swap", given, cpa_kv_swap_args, n_pairs, &args, &stream->error));
    CPA_TRY(check_kv_swap(&args, &stream->error));
    for (int part = CPA_KEYS; part < cpa_kv_parts(&args.src); part++)
        CPA_TRY(swap_pool(&args, (cpa_kv_part)part, stream));
    return CPA_OK;
}

/* ---- kv_move ---- */

static cpa_status check_kv_move(const cpa_kv_move_args *args, cpa_stream *stream) {
    cpa_error *err = &stream->error;
    CPA_TRY(cpa_check_view("kv_move: src", &args->src, err));
    CPA_TRY(cpa_check_view("kv_move: dst", &args->dst, err));
    CPA_TRY(cpa_check_same_shape("kv_move", &args->src, &args->dst, err));
    REQUIRE(err, args->n >= 0 && args->n <= CPA_KV_MOVE_MOST, "kv_move: n is %lld, expected 0 to %d",
            (long long)args->n, CPA_KV_MOVE_MOST);
    REQUIRE(err, args->n == 0 || args->slots, "kv_move: slots is NULL");
    CPA_TRY(cpa_check_aligned("kv_move", "slots", args->slots, sizeof **args->slots, err));
    if (!stream->device->debug_checks || args->n == 0) return CPA_OK;
    return check_slots("kv_move", "slots", &args->slots[0][1], args->n, 2, stream);
}

cpa_status cpa_kv_move(const cpa_kv_move_args *given, cpa_stream *stream) {
    cpa_kv_move_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_move", given, cpa_kv_move_args, n, &args, &stream->error));
    CPA_TRY(check_kv_move(&args, stream));
    return args.n > 0 ? stream->device->operators->kv_move(&args, stream) : CPA_OK;
}

/* ---- kv_convert ---- */

static cpa_status check_kv_convert(const cpa_kv_convert_args *args, cpa_error *err) {
    const cpa_kv_view *a = &args->src, *b = &args->dst;
    CPA_TRY(cpa_check_view("kv_convert: src", a, err));
    CPA_TRY(cpa_check_view("kv_convert: dst", b, err));
    const cpa_cache_form src = cpa_cache_form_of("src", a), dst = cpa_cache_form_of("dst", b);
    CPA_TRY(cpa_check_same_cache("kv_convert", &src, &dst, 1, err));
    const char *shared = shared_pool(a, b);
    REQUIRE(err, args->n_pairs == 0 || !shared, "kv_convert: src and dst have the same %s pool, expected two", shared);
    return check_pairs(&(block_pairs){"kv_convert", a, b, args->pairs, args->n_pairs}, err);
}

cpa_status cpa_kv_convert(const cpa_kv_convert_args *given, cpa_stream *stream) {
    cpa_kv_convert_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_convert", given, cpa_kv_convert_args, n_pairs, &args, &stream->error));
    CPA_TRY(check_kv_convert(&args, &stream->error));
    return stream->device->operators->kv_convert(&args, stream);
}

/* ---- kv_pack ---- */

/* Raises *filled by the staging blocks that the range fills. */
static cpa_status check_span(const cpa_kv_pack_args *args, int64_t index, cpa_checked_range *filled, cpa_error *err) {
    cpa_kv_range range = args->ranges[index];
    const int64_t block_size = args->src.block_size, entries = args->n_table_entries;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(range), "kv_pack: the reserved bytes of ranges[%lld] are not zero",
            (long long)index);
    REQUIRE(err, range.table >= 0 && range.count >= 0 && range.first >= 0 && range.first % block_size == 0,
            "kv_pack: ranges[%lld] has table %lld, first %lld, count %lld; expected none negative and first a multiple "
            "of block_size, %lld",
            (long long)index, (long long)range.table, (long long)range.first, (long long)range.count,
            (long long)block_size);
    const int64_t before = range.first / block_size, blocks = range.count / block_size + (range.count % block_size > 0);
    REQUIRE(err, range.dst_block >= 0 && range.dst_block <= args->dst.num_blocks - blocks,
            "kv_pack: ranges[%lld] fills %lld staging blocks from %lld on of %lld", (long long)index, (long long)blocks,
            (long long)range.dst_block, (long long)args->dst.num_blocks);
    REQUIRE(err, range.table <= entries && before <= entries - range.table && blocks <= entries - range.table - before,
            "kv_pack: ranges[%lld] reads %lld table entries from %lld + %lld on of %lld", (long long)index,
            (long long)blocks, (long long)range.table, (long long)before, (long long)entries);
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t entry = range.table + before + i;
        REQUIRE(err, args->block_tables[entry] >= 0 && args->block_tables[entry] < args->src.num_blocks,
                "kv_pack: ranges[%lld] reads block %d through table entry %lld, expected 0..%lld", (long long)index,
                args->block_tables[entry], (long long)entry, (long long)args->src.num_blocks - 1);
    }
    *filled = (cpa_checked_range){range.dst_block, range.dst_block + blocks, index};
    return CPA_OK;
}

static cpa_status check_spans(const cpa_kv_pack_args *args, cpa_error *err) {
    cpa_status status = CPA_OK;
    int64_t n = 0;
    cpa_checked_range *filled = malloc((size_t)(args->n_ranges + 1) * sizeof *filled);
    if (!filled)
        return cpa_fail(err, CPA_NO_MEMORY, "kv_pack: no memory for the check of %lld ranges",
                        (long long)args->n_ranges);
    for (int64_t i = 0; i < args->n_ranges; i++) {
        CPA_TRY_GOTO(check_span(args, i, &filled[n], err), done);
        n += filled[n].end > filled[n].begin;
    }
    status = cpa_check_disjoint("kv_pack", "ranges", "staging block", filled, n, err);
done:
    free(filled);
    return status;
}

static cpa_status check_kv_pack(const cpa_kv_pack_args *args, cpa_error *err) {
    CPA_TRY(cpa_check_view("kv_pack: src", &args->src, err));
    CPA_TRY(cpa_check_view("kv_pack: dst", &args->dst, err));
    CPA_TRY(cpa_check_same_shape("kv_pack", &args->src, &args->dst, err));
    REQUIRE(err, args->n_ranges >= 0 && args->n_ranges <= INT32_MAX, "kv_pack: n_ranges is %lld, expected 0..%d",
            (long long)args->n_ranges, INT32_MAX);
    REQUIRE(err, args->n_table_entries >= 0, "kv_pack: n_table_entries is %lld, expected at least 0",
            (long long)args->n_table_entries);
    REQUIRE(err, args->n_ranges == 0 || (args->ranges && args->block_tables), "kv_pack: %s is NULL",
            args->ranges ? "block_tables" : "ranges");
    CPA_TRY(cpa_check_aligned("kv_pack", "ranges", args->ranges, sizeof args->ranges->first, err));
    CPA_TRY(cpa_check_aligned("kv_pack", "block_tables", args->block_tables, sizeof *args->block_tables, err));
    const char *shared = shared_pool(&args->src, &args->dst);
    REQUIRE(err, args->n_ranges == 0 || !shared, "kv_pack: src and dst have the same %s pool, expected two", shared);
    return check_spans(args, err);
}

cpa_status cpa_kv_pack(const cpa_kv_pack_args *given, cpa_stream *stream) {
    cpa_kv_pack_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_pack", given, cpa_kv_pack_args, n_ranges, &args, &stream->error));
    CPA_TRY(check_kv_pack(&args, &stream->error));
    return stream->device->operators->kv_pack(&args, stream);
}
