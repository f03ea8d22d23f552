/* index_logits by wgmma of compute capability 9.0. A CTA has the heads of a few rows in shared memory as B, and streams
 * a chunk of keys past them, 64 of which are A. Of these thread t of a warpgroup then holds 16 (t / 32) + t % 32 / 4
 * and the one 8 behind it, by the heads 8 n + 2 (t % 4) and 8 n + 2 (t % 4) + 1 for all n: it sums over its heads, and four
 * threads over all.
 *
 * Two warpgroups multiply. Of many rows each has its own, and all keys: one product is under way while the sums of the
 * one before are made. Of few rows (split) both have the same, and keys in turn: memory is what they wait for. */
#include "kernels/cuda/indexer/index_boxes.cuh"
#include "kernels/cuda/indexer/index_wgmma.cuh"

namespace {

constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
constexpr int GROUP = 32;  /* columns with one sum: rows have 32, 64 or 128, of which some may be of no head */
constexpr int QUERIES = 3; /* the named barrier of queries; those of the warpgroups' turns are 1 and 2 */

/* Heads of rows as B, zeros where there are none: `tiles` tiles of N columns, by the consumers. */
template <typename Element, int DIM, int N, int COLUMNS>
__device__ void load_queries(const cpa_cuda_index_work &w, const index_tile &tile, char *to, int tiles) {
    using lines = index_lines<Element, DIM>;
    for (int i = threadIdx.x; i < tiles * N * lines::VECTORS; i += CONSUMERS * WARPGROUP) {
        const int column = i / lines::VECTORS, vector = i % lines::VECTORS, head = column % COLUMNS;
        const int32_t row = column / COLUMNS;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (row < tile.rows && head < w.heads)
            value = *(const uint4 *)(w.q + (tile.item->q_row + tile.first + row) * w.q_row_stride + head * lines::ROW +
                                     vector * 16);
        *(uint4 *)(to + column / N * N * lines::ROW + lines::place(N, column % N, vector)) = value;
    }
}

/* Where a thread stores its part of the results: of rows `row` and, with 32 columns a row, `row` + 2. */
struct row_results {
    float *out[2];
    int32_t seen[2], end[2]; /* keys that the row sees, and those that have a column: 0 where there is no such row */

    /* Of a warpgroup that has the rows [first, first + own) of the CTA's. */
    __device__ row_results(const cpa_cuda_index_work &w, const index_tile &tile, int32_t first, int32_t own) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t place = (int)threadIdx.x % 2 + 2 * i, row = first + place;
            out[i] = NULL, seen[i] = end[i] = 0;
            if (place >= own || row >= tile.rows) continue;
            out[i] = w.logits + (tile.item->q_row + tile.first + row) * w.row_stride;
            seen[i] = (int32_t)cpa_index_keys_seen(&w.items, tile.item, tile.first + row);
            end[i] = (int32_t)(w.width << w.unit_shift);
        }
    }
};

/* Sums over the four threads that have a key and the one 8 behind it, of two rows: each of the four gets one, row
 * t % 2 and key half t / 2 % 2. */
__device__ inline float sum_of_four(const float (&a)[2], const float (&b)[2]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    float kept[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        kept[i] = (odd ? b[i] : a[i]) + __shfl_xor_sync(0xffffffff, odd ? a[i] : b[i], 1);
    return (high ? kept[1] : kept[0]) + __shfl_xor_sync(0xffffffff, high ? kept[0] : kept[1], 2);
}

/* One L of this thread; with units the largest of those beside it: keys are lanes in fours, then the other half. */
__device__ inline void store_result(const cpa_cuda_index_work &w, const row_results &rows, int i, int32_t key,
                                    float value) {
    float result = key < rows.seen[i] ? value : -INFINITY;
    if (w.unit_shift == 0) {
        if (key < rows.end[i]) rows.out[i][key] = result;
        return;
    }
    const int units = 1 << w.unit_shift;
    for (int step = 1; step < units; step *= 2)
        result = fmaxf(result, __shfl_xor_sync(0xffffffff, result, step < 8 ? 4 * step : 2));
    if (key < rows.end[i] && (key & (units - 1)) == 0) rows.out[i][key >> w.unit_shift] = result;
}

/* Descriptors of tiles differ in the low word alone, the address, which products count on in registers of a half. */
template <int LINE>
__device__ inline uint32_t descriptor_word(uint32_t address) {
    return (uint32_t)wgmma_descriptor<LINE>(address, 0);
}
template <int LINE>
__device__ inline uint64_t descriptor_of(uint32_t word) {
    return wgmma_descriptor<LINE>(0, 0) | word;
}

/* A consumer: its columns' weights, and where its results go. */
template <typename Element, int DIM, int N, int COLUMNS>
struct index_consumer {
    using ring = index_ring<Element, DIM, N>;
    using lines = typename ring::lines;
    using place = typename ring::place;
    static constexpr int ROWS = N / COLUMNS; /* of a product */
    const cpa_cuda_index_work &w;
    ring &keys;
    const int group;    /* which of the two */
    uint32_t q, stages; /* words of descriptors */
    row_results results;
    float weights[N / 4];
    int key; /* of this thread's results, in a block */

    __device__ index_consumer(const cpa_cuda_index_work &w, ring &keys, int group, uint32_t tiles_at,
                              const index_tile &tile)
        : w(w), keys(keys), group(group),
          q(descriptor_word<lines::LINE>(tiles_at + (w.split ? 0 : group) * ring::Q_BYTES)),
          stages(descriptor_word<lines::LINE>(tiles_at + CONSUMERS * ring::Q_BYTES)),
          results(w, tile, w.split ? 0 : group * ROWS, ROWS),
          key((int)threadIdx.x % WARPGROUP / WARP_LANES * 16 + (int)threadIdx.x / 4 % 8 +
              (int)threadIdx.x / 2 % 2 * 8) {
        const int32_t first = w.split ? 0 : group * ROWS, head = (int)threadIdx.x % 4 * 2;
        const float *from = w.weights + (tile.item->q_row + tile.first + first) * w.weight_row_stride + head;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const int row = i / 2 * 8 / COLUMNS, step = i / 2 * 8 % COLUMNS + i % 2;
            const bool is_there = first + row < tile.rows && head + step < w.heads;
            weights[i] = is_there ? 1 : 0;
            if (is_there && w.weights) weights[i] = __ldg(from + row * w.weight_row_stride + step);
        }
    }

    /* The products of a block of a stage. */
    __device__ void multiply(float (&d)[N / 2], place at, int block) {
        const uint32_t a =
            stages + ((uint32_t)at.stage * ring::KEY_BYTES + (uint32_t)block * BLOCK_KEYS * lines::LINE) / 16;
        keys.wait_full(at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < lines::ROW / STEP; step++)
            index_wgmma<Element>::multiply(d, descriptor_of<lines::LINE>(a + lines::step(KEYS, step) / 16),
                                           descriptor_of<lines::LINE>(q + lines::step(N, step) / 16), step > 0);
        wgmma_commit();
    }

    /* The results of a block of a stage whose keys begin at `first`. */
    __device__ void finish(float (&d)[N / 2], place at, int block, int32_t first) {
        float sums[N / GROUP][2] = {};
        const int in_stage = block * BLOCK_KEYS + key;
        const float scale = keys.scales[at.stage][in_stage] * w.keys.scale;
        wgmma_hold(d);
#pragma unroll
        for (int c = 0; c < N / 4; c++) {
            float(&sum)[2] = sums[c / (GROUP / 4)];
#pragma unroll
            for (int half = 0; half < 2; half++)
                sum[half] = fmaf(fmaxf(d[c / 2 * 4 + half * 2 + c % 2], 0), weights[c], sum[half]);
        }
        fold(sums);
        store_result(w, results, 0, first + in_stage, sum_of_four(sums[0], sums[1]) * scale);
        if constexpr (ROWS > 2) store_result(w, results, 1, first + in_stage, sum_of_four(sums[2], sums[3]) * scale);
    }

    /* Groups of the same row become one: sums[r] is that of row r. */
    static __device__ void fold(float (&sums)[N / GROUP][2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if constexpr (COLUMNS > GROUP) sums[0][half] += sums[1][half];
            if constexpr (COLUMNS > GROUP && N / GROUP > 2) sums[1][half] = sums[2][half] + sums[3][half];
            if constexpr (COLUMNS > 2 * GROUP) sums[0][half] += sums[1][half];
        }
    }

    /* Two products at a time, of the blocks of a stage or, with `split`, of one's own block of two stages: the sums of
     * the first are made under the second. (With a product on its way from one turn to the next ptxas makes them wait
     * for each other.) Warpgroups issue products in turns, so that sums of one are made under products of the other: in
     * step both would wait for products, and then leave tensor cores idle. Where there is no second stage the first is
     * multiplied once more: a loop without branches around products. */
    __device__ void run(int32_t first, int32_t stages_used) {
        const bool split = w.split;
        const int even_block = split ? group : 0, odd_block = split ? group : 1, step = split ? 2 : 1;
        const int turn = 1 + group, turn_of_other = 2 - group;
        place at;
        if (group == 1) named_arrive(turn_of_other, CONSUMERS * WARPGROUP);
        for (int32_t n = 0; n < stages_used; n += step, first += step * KEYS) {
            float even[N / 2], odd[N / 2];
            const bool has_odd = !split || n + 1 < stages_used;
            place second = at;
            if (split && has_odd) second.advance();
            named_sync(turn, CONSUMERS * WARPGROUP);
            multiply(even, at, even_block);
            multiply(odd, second, odd_block);
            named_arrive(turn_of_other, CONSUMERS * WARPGROUP);
            wgmma_wait<1>();
            finish(even, at, even_block, first);
            if (split && has_odd) keys.give_back(at);
            wgmma_wait<0>();
            if (has_odd) finish(odd, second, odd_block, split ? first + KEYS : first);
            keys.give_back(second);
            at = second;
            at.advance();
        }
        if (group == 0) named_sync(turn, CONSUMERS * WARPGROUP); /* whose turn would be next */
    }
};

/* Columns of a chunk behind the keys that rows of the CTA see, by the consumers. */
__device__ inline void fill_columns(const cpa_cuda_index_work &w, const index_tile &tile, int64_t begin, int64_t end) {
    const int64_t last = min(end >> w.unit_shift, w.width);
    for (int32_t r = 0; r < tile.rows; r++) {
        float *out = w.logits + (tile.item->q_row + tile.first + r) * w.row_stride;
        for (int64_t c = (begin >> w.unit_shift) + threadIdx.x; c < last; c += CONSUMERS * WARPGROUP)
            out[c] = -INFINITY;
    }
}

template <typename Element, int DIM, int N, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 1) index_logits_hopper(const __grid_constant__ index_launch launch) {
    using ring_of_keys = index_ring<Element, DIM, N>;
    extern __shared__ char shared[];
    const cpa_cuda_index_work &w = launch.work;
    const uint32_t at = shared_address(shared), skipped = (TILE_ALIGNMENT - at % TILE_ALIGNMENT) % TILE_ALIGNMENT;
    ring_of_keys &ring = *(ring_of_keys *)(shared + skipped + ring_of_keys::TILES_BYTES);
    const index_tile tile = find_index_tile(w, blockIdx.x);
    const int64_t first = (int64_t)blockIdx.y * w.chunk;
    const int32_t end = (int32_t)min((int64_t)tile.keys, first + w.chunk);
    const int32_t stages = first < end ? (end - (int32_t)first + KEYS - 1) / KEYS : 0;
    const int group = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) ring.start(launch.boxes ? WARP_LANES + 1 : WARPGROUP / WARP_LANES);
    if (!w.keys.scales)
        for (int i = threadIdx.x; i < ring_of_keys::STAGES * KEYS; i += THREADS) ring.scales[i / KEYS][i % KEYS] = 1;
    __syncthreads();
    if (group == CONSUMERS) {
        registers_shrink<PRODUCER_REGISTERS>();
        const uint32_t stages_at = at + skipped + CONSUMERS * ring_of_keys::Q_BYTES;
        if (stages > 0 && !launch.boxes)
            fill_ring(w, ring, stages_at, tile.item, (int32_t)first, end);
        else if (stages > 0 && threadIdx.x < CONSUMERS * WARPGROUP + WARP_LANES)
            fill_ring_by_boxes<Element>(launch, ring, stages_at, tile.item, (int32_t)first, end);
        return;
    }
    registers_grow<CONSUMER_REGISTERS>();
    if (stages > 0) {
        load_queries<Element, DIM, N, COLUMNS>(w, tile, shared + skipped, w.split ? 1 : CONSUMERS);
        async_proxy_fence();
        named_sync(QUERIES, CONSUMERS * WARPGROUP);
        index_consumer<Element, DIM, N, COLUMNS> consumer(w, ring, group, at + skipped, tile);
        consumer.run((int32_t)first, stages);
    }
    fill_columns(w, tile, first + (int64_t)stages * KEYS, first + w.chunk);
}

/* Chunks of keys by which CTAs of equal work fill the multiprocessors best; beginning a chunk costs as much as some
 * keys. */
int32_t choose_chunk(const cpa_cuda_index_work &w, int64_t multiprocessors) {
    const int64_t beginning = 512, least = 512, most = 1024; /* keys, keys, chunks */
    const int64_t columns = w.width << w.unit_shift, keys = w.most_keys > KEYS ? w.most_keys : KEYS;
    int64_t best = 0, best_cost = INT64_MAX;
    for (int64_t chunks = 1; chunks == 1 || (chunks <= most && keys / chunks >= least); chunks++) {
        const int64_t chunk = ((keys + chunks - 1) / chunks + KEYS - 1) / KEYS * KEYS;
        const int64_t waves = (w.tiles * chunks + multiprocessors - 1) / multiprocessors;
        const int64_t cost = waves * (chunk + beginning);
        if (cost < best_cost) best = chunk, best_cost = cost;
    }
    const int64_t most_chunks = 65535, floor = ((columns + most_chunks - 1) / most_chunks + KEYS - 1) / KEYS * KEYS;
    return (int32_t)(best > floor ? best : floor);
}

template <typename Element, int DIM, int N, int COLUMNS>
cpa_status launch_kernel(const cpa_cuda_index_work &w, cpa_stream *stream) {
    static uint64_t prepared;
    constexpr int bytes = index_ring<Element, DIM, N>::bytes();
    const void *kernel = (const void *)index_logits_hopper<Element, DIM, N, COLUMNS>;
    index_launch launch = {w, {}, index_has_boxes(w)};
    launch.work.chunk = choose_chunk(w, cpa_cuda_device_of(stream)->multiprocessors);
    const dim3 grid((unsigned)w.tiles, (unsigned)index_chunks(w, launch.work.chunk));
    cpa_status status = cpa_cuda_shared_memory(stream, kernel, bytes, &prepared);
    if (status == CPA_OK && launch.boxes) status = encode_index_keys<Element, DIM>(w, &launch.keys, stream);
    if (status != CPA_OK) return status;
    index_logits_hopper<Element, DIM, N, COLUMNS><<<grid, THREADS, bytes, cpa_cuda_handle(stream)>>>(launch);
    return cpa_cuda_launched(stream, "index_logits");
}

/* By the columns of a product, and those of a row. */
template <typename Element, int DIM>
cpa_status launch_columns(const cpa_cuda_index_work &w, int32_t columns, cpa_stream *stream) {
    const bool few = w.heads <= GROUP;
    if (columns == 64)
        return few ? launch_kernel<Element, DIM, 64, 32>(w, stream) : launch_kernel<Element, DIM, 64, 64>(w, stream);
    if (w.heads > 2 * GROUP) return launch_kernel<Element, DIM, 128, 128>(w, stream);
    return few ? launch_kernel<Element, DIM, 128, 32>(w, stream) : launch_kernel<Element, DIM, 128, 64>(w, stream);
}

template <typename Element>
cpa_status launch_width(const cpa_cuda_index_work &w, int32_t columns, cpa_stream *stream) {
    if (w.dim == 32) return launch_columns<Element, 32>(w, columns, stream);
    if (w.dim == 64) return launch_columns<Element, 64>(w, columns, stream);
    return launch_columns<Element, 128>(w, columns, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_index_logits_hopper(const cpa_cuda_index_work *w, int32_t columns, cpa_stream *stream) {
    return w->dtype == CPA_BF16 ? launch_width<__nv_bfloat16>(*w, columns, stream)
                                : launch_width<__nv_fp8_e4m3>(*w, columns, stream);
}
