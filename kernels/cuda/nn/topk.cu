/* topk: a team of CTAs takes a row, each a part of its columns, and as a rule reads it once:
 *
 *     1. a sample of the row says from which score on there are more than k entries, but no more than a list has
 *     2. what has that score or a larger one goes to lists in shared memory, in the order of its columns
 *     3. a search in the lists of the team gives what is chosen (topk_search.cuh), which each CTA writes of its own
 *
 * Where the sample misled, or many equal scores overflow the list, the search reads the row. Few rows have teams of
 * more CTAs, so that all multiprocessors read. */
#include <math.h>

#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/cuda/nn/topk_search.cuh"

namespace {

constexpr int LISTED = 8192, MOST_CTAS = 8, CTAS_OF_MULTIPROCESSOR = 2;
constexpr int LEAST_COLUMNS = 2048; /* of a CTA in a team of several */

/* For __launch_bounds__: before 9.0 registers for two CTAs would be some too few. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int LEAST_CTAS = 1;
#else
constexpr int LEAST_CTAS = CTAS_OF_MULTIPROCESSOR;
#endif

/* Units of a thread in a tile of the row: as many on their way at once as registers for two CTAs leave room for. */
constexpr int ROW_UNITS = 3;
/* The least order of what may be chosen at all. */
constexpr uint32_t LEAST_ORDER = CPA_TOPK_NEVER + 1;

struct shared_memory {
    search_memory search;
    alignas(16) uint32_t orders[LISTED]; /* the sample's, the list's, or sums of the search in the row */
    int32_t columns[LISTED];
    cpa_topk_row row;
};

/* Of a CTA in a team of several. */
struct team_memory {
    shared_memory own;
    alignas(16) uint32_t orders[LISTED]; /* of the lists of all */
};

/* The part of a row that a CTA has, from a column on that is a multiple of 4, which may lie in front of the row's
 * first. */
struct row_source {
    using unit = float4;
    const float *logits;                                         /* of the part */
    int32_t begin, size, counted_from, plain_from, plain_until; /* plain entries count and are not forced */
    bool in_vectors;

    template <typename Team>
    __device__ row_source(const cpa_topk_args &a, int index, const Team &cta, const cpa_topk_row &row) {
        const int32_t first = row.first / UNIT_ENTRIES * UNIT_ENTRIES, span = row.end - first;
        const int32_t units = (span + UNIT_ENTRIES - 1) / UNIT_ENTRIES;
        const int32_t part = (units + cta.size() - 1) / cta.size() * UNIT_ENTRIES;
        begin = first + cta.rank() * part;
        size = row.end - begin < part ? row.end - begin : part;
        logits = a.logits + index * a.logits_stride + begin;
        in_vectors = (uintptr_t)logits % sizeof(unit) == 0;
        counted_from = row.first - begin;
        plain_from = row.forced_until - begin;
        plain_until = row.forced_from - begin < size ? row.forced_from - begin : size;
    }
    __device__ unit load_unit(int32_t at) const {
        const float none = -INFINITY;
        if (in_vectors && at + UNIT_ENTRIES <= size) return *(const unit *)(logits + at);
        return {at < size ? logits[at] : none, at + 1 < size ? logits[at + 1] : none,
                at + 2 < size ? logits[at + 2] : none, at + 3 < size ? logits[at + 3] : none};
    }
    template <int N>
    __device__ void load(int32_t at, unit (&to)[N]) const {
        if (in_vectors && at + (N - 1) * WARP_UNIT + UNIT_ENTRIES <= size) {
#pragma unroll
            for (int u = 0; u < N; u++) to[u] = *(const unit *)(logits + at + u * WARP_UNIT);
        } else {
#pragma unroll
            for (int u = 0; u < N; u++) to[u] = load_unit(at + u * WARP_UNIT);
        }
    }
    /* Starts to bring what is read first, a line for each thread, to the second cache. */
    __device__ void prefetch() const {
        constexpr int LINE = 128 / sizeof(float);
        const int32_t at = (int32_t)threadIdx.x * LINE;
        if (at < size) asm volatile("prefetch.global.L2 [%0];" : : "l"(logits + at));
    }
    __device__ bool is_plain(int32_t at) const { return at >= plain_from && at + UNIT_ENTRIES <= plain_until; }
    __device__ uint32_t order(float score, int32_t at) const {
        if (at < counted_from || at >= size) return CPA_TOPK_NEVER;
        return at < plain_from || at >= plain_until ? CPA_TOPK_FORCED : cpa_topk_order(score);
    }
    __device__ void orders(const unit &of, int32_t at, uint32_t (&out)[UNIT_ENTRIES]) const {
        const float scores[UNIT_ENTRIES] = {of.x, of.y, of.z, of.w};
        const bool plain = is_plain(at);
#pragma unroll
        for (int e = 0; e < UNIT_ENTRIES; e++) out[e] = plain ? cpa_topk_order(scores[e]) : order(scores[e], at + e);
    }
    __device__ int32_t column(int32_t at) const { return begin + at; }
};

/* Orders in shared memory, told apart by their places. */
struct list_source {
    using unit = uint4;
    const uint32_t *list;
    int32_t size;

    __device__ uint32_t entry(int32_t at) const { return at < size ? list[at] : CPA_TOPK_NEVER; }
    template <int N>
    __device__ void load(int32_t at, unit (&to)[N]) const {
#pragma unroll
        for (int u = 0; u < N; u++, at += WARP_UNIT)
            to[u] = at + UNIT_ENTRIES <= size ? *(const unit *)(list + at)
                                              : unit{entry(at), entry(at + 1), entry(at + 2), entry(at + 3)};
    }
    __device__ void orders(const unit &of, int32_t, uint32_t (&out)[UNIT_ENTRIES]) const {
        out[0] = of.x, out[1] = of.y, out[2] = of.z, out[3] = of.w;
    }
    __device__ int32_t column(int32_t at) const { return at; }
};

/* ---- the cut: the order from which on entries are listed ---- */

/* Units that each thread takes of a sample of n entries. The number of a sample's entries among the best m of n has
 * about the deviation of its own root, so that k and LISTED lie DEVIATIONS of their sum apart if the sample has this
 * many entries. */
constexpr int MOST_SAMPLED = LISTED / (THREADS * UNIT_ENTRIES);
static_assert(CPA_MOST_TOPK < LISTED, "room for more than k");

__device__ int sampled_units(float n, float k) {
    const float deviations = 6, apart = sqrtf(LISTED) - sqrtf(k);
    const float entries = deviations * deviations * n / (apart * apart), units = entries / (THREADS * UNIT_ENTRIES);
    return units > MOST_SAMPLED - 1 ? MOST_SAMPLED : 1 + (int)units;
}

/* The orders of the sample, one unit of each of as many equal parts of the row, at a place in its part that looks
 * random so that no period of the scores meets it; returns their number. What the CTA lists first is brought nearer
 * meanwhile. */
__device__ int32_t take_sample(const row_source &row, const row_source &part, int own, uint32_t *orders) {
    const uint32_t golden = 0x9e3779b9u, stride = (uint32_t)(row.size / (own * THREADS * UNIT_ENTRIES));
    float4 units[MOST_SAMPLED];
    int32_t at[MOST_SAMPLED];
#pragma unroll
    for (int u = 0; u < MOST_SAMPLED; u++) {
        const uint32_t i = u * THREADS + threadIdx.x;
        at[u] = (int32_t)(i * stride + __umulhi(i * golden, stride)) * UNIT_ENTRIES;
        if (u < own) units[u] = row.load_unit(at[u]);
    }
    part.prefetch();
#pragma unroll
    for (int u = 0; u < MOST_SAMPLED; u++) {
        if (u >= own) break;
        uint32_t of_unit[UNIT_ENTRIES];
        row.orders(units[u], at[u], of_unit);
        *(uint4 *)(orders + (u * THREADS + threadIdx.x) * UNIT_ENTRIES) = {of_unit[0], of_unit[1], of_unit[2],
                                                                          of_unit[3]};
    }
    return own * THREADS * UNIT_ENTRIES;
}

/* The order from which on a row has about as many times k entries as LISTED is times that: its upper bits, which all
 * CTAs of a team find alike. A row that the list has room for is listed as a whole. */
__device__ uint32_t find_cut(const row_source &row, const row_source &part, int32_t k, shared_memory &shared) {
    if (row.size <= LISTED) return LEAST_ORDER;
    auto order_itself = [](uint32_t order, int32_t) { return order; };
    const float n = (float)row.size;
    const list_source sample = {shared.orders, take_sample(row, part, sampled_units(n, (float)k), shared.orders)};
    const float rank = sqrtf((float)k * LISTED) * (float)sample.size / n;
    search at = {0, rank < 1 ? 1 : (uint32_t)rank, 0, false};
    count_bins<MIDDLE_BITS + LOWER_BITS, UPPER_BITS>(sample, order_itself, at.found, shared.search);
    find_bin<UPPER_BITS>(lone_cta(), at, shared.search);
    if (at.all) return LEAST_ORDER;
    count_bins<LOWER_BITS, MIDDLE_BITS>(sample, order_itself, at.found, shared.search);
    find_bin<MIDDLE_BITS>(lone_cta(), at, shared.search);
    return at.found << LOWER_BITS;
}

/* ---- the list ---- */

/* The score of an order; NaN for that of forced entries and those next to it. */
__device__ float score_of(uint32_t order) {
    const uint32_t sign = 0x80000000u;
    return __uint_as_float(order & sign ? order ^ sign : ~order);
}

/* Lists what has an order from `cut` on; returns its number, or one above LISTED. */
__device__ uint32_t list_from(const cpa_topk_args &a, int index, const team &cta, uint32_t cut,
                              shared_memory &shared) {
    const row_source row(a, index, cta, shared.row);
    const float least = score_of(cut);
    const auto taken = [&](const float4 &of, int32_t at) {
        const float scores[UNIT_ENTRIES] = {of.x, of.y, of.z, of.w};
        uint32_t bits = 0;
        if (row.is_plain(at)) {
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++) bits |= scores[e] >= least ? 1u << e : 0;
        } else {
#pragma unroll
            for (int e = 0; e < UNIT_ENTRIES; e++) bits |= row.order(scores[e], at + e) >= cut ? 1u << e : 0;
        }
        return bits;
    };
    const auto put = [&](int32_t entry, const float4 &of, int e, uint32_t place) {
        const float scores[UNIT_ENTRIES] = {of.x, of.y, of.z, of.w};
        shared.orders[place] = __float_as_uint(scores[e]); /* its order later: here there are few such threads */
        shared.columns[place] = row.column(entry);
    };
    const uint32_t listed = for_taken<ROW_UNITS>(row, taken, 0, LISTED, shared.search, put);
    __syncthreads();
    for (uint32_t i = threadIdx.x; listed <= LISTED && i < listed; i += THREADS)
        shared.orders[i] = cpa_topk_column_order(shared.row, shared.columns[i], __uint_as_float(shared.orders[i]));
    return listed;
}

/* The lists of a team, one behind the other. */
struct team_lists {
    uint32_t counts[MOST_CTAS], before, total; /* before: of those in front of this CTA's */

    /* Of a team whose CTAs have their numbers in `count`. */
    __device__ team_lists(const team &cta, const uint32_t &count) : before(0), total(0) {
#pragma unroll
        for (int c = 0; c < MOST_CTAS; c++) {
            counts[c] = c < cta.size() ? cta.read(count, c) : 0;
            before += c < cta.rank() ? counts[c] : 0;
            total += counts[c];
        }
    }
    /* The orders of all lists; what each thread reads of several CTAs is on its way at once. */
    __device__ void gather(const team &cta, const uint32_t *orders, uint32_t *to) const {
        uint32_t most = 0;
#pragma unroll
        for (int c = 0; c < MOST_CTAS; c++) most = counts[c] > most ? counts[c] : most;
        for (uint32_t i = threadIdx.x; i < most; i += THREADS) {
            uint32_t order[MOST_CTAS], begin = 0;
#pragma unroll
            for (int c = 0; c < MOST_CTAS; c++)
                if (i < counts[c]) order[c] = cta.read(orders[i], c);
#pragma unroll
            for (int c = 0; c < MOST_CTAS; c++) {
                if (i < counts[c]) to[begin + i] = order[c];
                begin += counts[c];
            }
        }
    }
};

/* ---- what is written ---- */

/* An entry of the lists of a row; column -1: none. */
__device__ void write_entry(const cpa_topk_args &a, int64_t row, uint32_t place, int32_t column) {
    const float none = -INFINITY;
    const int64_t to = cpa_topk_out_row(a.out_rows, row);
    a.indices[to * a.indices_stride + place] = column < 0 ? -1 : cpa_topk_index(&a, row, column);
    if (a.scores)
        a.scores[to * a.scores_stride + place] =
            column < 0 ? none : cpa_topk_score(a.logits[row * a.logits_stride + column]);
}

/* What comes behind the chosen entries of a row, how many it has, and what it leaves empty. */
__device__ void write_end(const cpa_topk_args &a, int row, uint32_t count) {
    const int32_t tail = cpa_topk_tail(a.tails, row);
    const int64_t to = cpa_topk_out_row(a.out_rows, row);
    if (threadIdx.x == 0 && tail >= 0) a.indices[to * a.indices_stride + count] = tail;
    count += tail >= 0;
    if (threadIdx.x == 0 && a.counts) a.counts[to] = (int32_t)count;
    for (uint32_t at = count + threadIdx.x; at < (uint32_t)cpa_topk_list_width(a.k, a.tails); at += THREADS)
        write_entry(a, row, at, -1);
}

/* Chooses from the lists of the team; false, alike for all of it, if these may lack some of what is chosen. */
__device__ bool choose_listed(const cpa_topk_args &a, int row, const team &cta, uint32_t cut, uint32_t listed,
                              team_memory &shared) {
    if (threadIdx.x == 0) shared.own.search.count = listed;
    cta.sync();
    const team_lists lists(cta, shared.own.search.count);
    if (lists.total > LISTED || (lists.total < (uint32_t)a.k && cut > LEAST_ORDER)) return false;
    if (cta.size() > 1) lists.gather(cta, shared.own.orders, shared.orders);
    const list_source all = {cta.size() > 1 ? shared.orders : shared.own.orders, (int32_t)lists.total};
    const chosen_rule rule = find_rule(lone_cta(), all, (uint32_t)a.k, shared.own.search);
    const uint32_t count = for_chosen(all, rule, 0, shared.own.search, [&](int32_t entry, uint32_t place) {
        const uint32_t own = (uint32_t)entry - lists.before;
        if (own < listed) write_entry(a, row, place, shared.own.columns[own]);
    });
    if (cta.rank() == cta.size() - 1) write_end(a, row, count);
    return true;
}

/* Chooses from the row itself; each CTA writes behind what those before it have. */
__device__ void choose_read(const cpa_topk_args &a, int row, const team &cta, shared_memory &shared) {
    const row_source part(a, row, cta, shared.row);
    const chosen_rule rule = find_rule(summing_team{cta, shared.orders}, part, (uint32_t)a.k, shared.search);
    uint32_t place = 0;
    if (cta.size() > 1) {
        const uint32_t count = count_chosen(part, rule);
        if (threadIdx.x == 0) shared.search.count = count;
        cta.sync();
        for (int c = 0; c < cta.rank(); c++) place += cta.read(shared.search.count, c);
    }
    place = for_chosen(part, rule, place, shared.search,
                       [&](int32_t entry, uint32_t at) { write_entry(a, row, at, part.column(entry)); });
    if (cta.rank() == cta.size() - 1) write_end(a, row, place);
}

__global__ void __launch_bounds__(THREADS, LEAST_CTAS) topk(const __grid_constant__ cpa_topk_args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    team_memory &shared = *(team_memory *)memory; /* `own` alone where a row has one CTA */
    const team cta;
    const int row = (int)blockIdx.x / cta.size();
    if (cpa_topk_out_row(a.out_rows, row) < 0) return; /* alike for the team */
    if (threadIdx.x == 0) shared.own.row = cpa_topk_row_of(&a, row);
    __syncthreads();
    const row_source whole(a, row, lone_cta(), shared.own.row), part(a, row, cta, shared.own.row);
    const uint32_t cut = find_cut(whole, part, a.k, shared.own);
    const uint32_t listed = list_from(a, row, cta, cut, shared.own);
    if (!choose_listed(a, row, cta, cut, listed, shared)) choose_read(a, row, cta, shared.own);
    cta.sync(); /* the others may still read this CTA's shared memory */
}

/* The CTAs of a row: as many as find room at once. */
int ctas_of_row(const cpa_cuda_device *device, const cpa_topk_args *args) {
    const int64_t room = (int64_t)CTAS_OF_MULTIPROCESSOR * device->multiprocessors;
    int ctas = device->path == CPA_CUDA_HOPPER ? MOST_CTAS : 1;
    while (ctas > 1 && (args->rows * ctas > room || args->width < (int64_t)ctas * LEAST_COLUMNS)) ctas /= 2;
    return ctas;
}

} // namespace

extern "C" cpa_status cpa_cuda_topk(const cpa_topk_args *args, cpa_stream *stream) {
    static uint64_t prepared;
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    const int most_shared = (int)(device->path == CPA_CUDA_HOPPER ? sizeof(team_memory) : sizeof(shared_memory));
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status == CPA_OK)
        status = cpa_cuda_shared_memory(stream, (const void *)topk, most_shared, &prepared);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "topk: more rows than a grid has CTAs", args->rows);
    const int ctas = ctas_of_row(device, args);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)ctas, attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(args->rows * ctas));
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = ctas > 1 ? sizeof(team_memory) : sizeof(shared_memory);
    config.stream = cpa_cuda_handle(stream);
    config.attrs = &attribute;
    config.numAttrs = ctas > 1 ? 1 : 0;
    return cpa_cuda_check(&stream->error, cudaLaunchKernelEx(&config, topk, *args), "topk");
}
