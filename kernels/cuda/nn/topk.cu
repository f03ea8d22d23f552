/* topk: a team of CTAs takes a row, each a part of its columns, and as a rule reads it twice:
 *
 *     1. a histogram of the upper bits of all scores says in which bin the best k end
 *     2. what lies in that bin or above it goes to a list in shared memory, in the order of its columns
 *     3. histograms of the further bits of the list's entries in that bin give the score at which the best k end, and,
 *        where more equal it than are wanted, others the column
 *     4. what is chosen is written from the list to places that are counted before
 *
 * A CTA whose list would be too long counts the further bits in the row as well, until it is not. Few rows have teams
 * of more CTAs, so that all multiprocessors read. */
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

struct shared_memory {
    uint32_t orders[LISTED];
    int32_t columns[LISTED];
    search_memory search;
    cpa_topk_row row;
};

/* The part of a row that a CTA has, from a column on that is a multiple of 4, which may lie in front of the row's
 * first. */
struct row_source {
    using unit = float4;
    const float *logits;     /* of the part */
    const cpa_topk_row &row; /* in shared memory */
    int32_t begin, size, plain_from, plain_until; /* entries that lie in the row and are not forced */
    bool in_vectors;

    __device__ row_source(const cpa_topk_args &a, int index, const team &cta, const cpa_topk_row &of) : row(of) {
        const int32_t first = row.first / UNIT_ENTRIES * UNIT_ENTRIES, span = row.end - first;
        const int32_t units = (span + UNIT_ENTRIES - 1) / UNIT_ENTRIES;
        const int32_t part = (units + cta.size() - 1) / cta.size() * UNIT_ENTRIES;
        begin = first + cta.rank() * part;
        size = row.end - begin < part ? row.end - begin : part;
        logits = a.logits + index * a.logits_stride + begin;
        in_vectors = (uintptr_t)logits % sizeof(unit) == 0;
        plain_from = row.forced_until - begin;
        plain_until = row.forced_from - begin < size ? row.forced_from - begin : size;
    }
    __device__ unit load(int32_t at) const {
        const float none = -INFINITY;
        if (in_vectors && at + UNIT_ENTRIES <= size) return *(const unit *)(logits + at);
        return {at < size ? logits[at] : none, at + 1 < size ? logits[at + 1] : none,
                at + 2 < size ? logits[at + 2] : none, at + 3 < size ? logits[at + 3] : none};
    }
    __device__ void orders(const unit &of, int32_t at, uint32_t (&out)[UNIT_ENTRIES]) const {
        const float scores[UNIT_ENTRIES] = {of.x, of.y, of.z, of.w};
        const bool is_plain = at >= plain_from && at + UNIT_ENTRIES <= plain_until;
#pragma unroll
        for (int e = 0; e < UNIT_ENTRIES; e++) {
            out[e] = cpa_topk_order(scores[e]);
            if (is_plain) continue;
            const bool counts = begin + at + e >= row.first && at + e < size;
            out[e] = counts ? cpa_topk_column_order(row, begin + at + e, scores[e]) : CPA_TOPK_NEVER;
        }
    }
    __device__ int32_t column(int32_t at) const { return begin + at; }
};

struct list_source {
    using unit = uint4;
    const shared_memory &shared;
    int32_t size;

    __device__ unit load(int32_t at) const {
        const uint32_t none = CPA_TOPK_NEVER;
        if (at + UNIT_ENTRIES <= size) return *(const unit *)(shared.orders + at);
        return {at < size ? shared.orders[at] : none, at + 1 < size ? shared.orders[at + 1] : none,
                at + 2 < size ? shared.orders[at + 2] : none, at + 3 < size ? shared.orders[at + 3] : none};
    }
    __device__ void orders(const unit &of, int32_t, uint32_t (&out)[UNIT_ENTRIES]) const {
        out[0] = of.x, out[1] = of.y, out[2] = of.z, out[3] = of.w;
    }
    /* Behind the last entry nothing is asked for that is looked at. */
    __device__ int32_t column(int32_t at) const { return shared.columns[at < LISTED ? at : 0]; }
};

/* What a CTA has: its part of the row and, once that has room for what may be chosen, the list. */
struct candidates {
    row_source row;
    list_source list;
    bool is_listed;
    uint32_t above; /* entries whose upper bits are larger than those that were found */
};

/* One level of the search, and the list if what may be chosen fits. */
template <int SHIFT, int BITS>
__device__ void search_level(const team &cta, candidates &of, search &at, shared_memory &shared) {
    auto order_itself = [](uint32_t order, int32_t) { return order; };
    if (of.is_listed) {
        count_bins<SHIFT, BITS>(of.list, order_itself, at.found, shared.search);
    } else {
        count_bins<SHIFT, BITS>(of.row, order_itself, at.found, shared.search);
    }
    find_bin<BITS>(cta, at, shared.search);
    if (of.is_listed) return;
    const uint32_t in_bin = at.all ? 0 : shared.search.bins[at.found & ((1u << BITS) - 1)];
    const uint32_t kept = of.above + count_from<BITS>(at, shared.search);
    of.above = kept - in_bin;
    if (!at.all && kept > LISTED) return;
    chosen_rule rule = all_chosen();
    if (!at.all && at.found << SHIFT > rule.order) rule.order = at.found << SHIFT;
    const auto list_entry = [&](int32_t entry, uint32_t order, uint32_t place) {
        shared.orders[place] = order;
        shared.columns[place] = of.row.column(entry);
    };
    of.list.size = (int32_t)for_chosen(of.row, rule, 0, shared.search, list_entry);
    of.is_listed = true;
    __syncthreads();
}

/* An entry of the lists of a row; column -1: none. */
__device__ void write_entry(const cpa_topk_args &a, int64_t row, uint32_t place, int32_t column) {
    const float none = -INFINITY;
    const int64_t to = cpa_topk_out_row(a.out_rows, row);
    a.indices[to * a.indices_stride + place] = column < 0 ? -1 : cpa_topk_index(&a, row, column);
    if (a.scores)
        a.scores[to * a.scores_stride + place] =
            column < 0 ? none : cpa_topk_score(a.logits[row * a.logits_stride + column]);
}

/* Writes what a CTA has of what is chosen, behind what those before it have; the last one also what is left empty. */
template <typename Source>
__device__ void write_chosen(const cpa_topk_args &a, int row, const team &cta, const Source &source,
                             const chosen_rule &rule, search_memory &memory) {
    uint32_t place = 0;
    if (cta.size() > 1) {
        const uint32_t count = count_chosen(source, rule);
        if (threadIdx.x == 0) memory.count = count;
        cta.sync();
        for (int c = 0; c < cta.rank(); c++) place += cta.read(memory.count, c);
    }
    place = for_chosen(source, rule, place, memory, [&](int32_t entry, uint32_t, uint32_t at) {
        write_entry(a, row, at, source.column(entry));
    });
    if (cta.rank() < cta.size() - 1) return;
    if (threadIdx.x == 0 && a.counts) a.counts[cpa_topk_out_row(a.out_rows, row)] = (int32_t)place;
    for (uint32_t at = place + threadIdx.x; at < (uint32_t)a.k; at += THREADS) write_entry(a, row, at, -1);
}

__global__ void __launch_bounds__(THREADS, LEAST_CTAS) topk(const __grid_constant__ cpa_topk_args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    shared_memory &shared = *(shared_memory *)memory;
    const team cta;
    const int row = (int)blockIdx.x / cta.size();
    if (cpa_topk_out_row(a.out_rows, row) < 0) return; /* alike for the team */
    if (threadIdx.x == 0) shared.row = cpa_topk_row_of(&a, row);
    __syncthreads();
    candidates of = {row_source(a, row, cta, shared.row), {shared, 0}, false, 0};
    search at = {0, (uint32_t)a.k, 0, false};
    search_level<MIDDLE_BITS + LOWER_BITS, UPPER_BITS>(cta, of, at, shared);
    if (!at.all) { /* alike for the team */
        search_level<LOWER_BITS, MIDDLE_BITS>(cta, of, at, shared);
        search_level<0, LOWER_BITS>(cta, of, at, shared);
    }
    if (of.is_listed) {
        const chosen_rule rule = at.all ? all_chosen() : rule_of(cta, of.list, at, shared.search);
        write_chosen(a, row, cta, of.list, rule, shared.search);
    } else {
        const chosen_rule rule = rule_of(cta, of.row, at, shared.search);
        write_chosen(a, row, cta, of.row, rule, shared.search);
    }
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
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status == CPA_OK)
        status = cpa_cuda_shared_memory(stream, (const void *)topk, (int)sizeof(shared_memory), &prepared);
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
    config.dynamicSmemBytes = sizeof(shared_memory);
    config.stream = cpa_cuda_handle(stream);
    config.attrs = &attribute;
    config.numAttrs = ctas > 1 ? 1 : 0;
    return cpa_cuda_check(&stream->error, cudaLaunchKernelEx(&config, topk, *args), "topk");
}
