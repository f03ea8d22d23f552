/* Block tables of a plan that lie on the device: the entries of its items become tables of its own, one behind the
 * other, once a setting and stream. An entry that is no block of the cache becomes the nearest that is: the kernels of
 * attend read what they find. */
#include "kernels/cuda/attend/attend.h"

namespace {

constexpr int THREADS = 256, EACH = 4; /* entries that a thread reads at once */
constexpr int MOST_PARTS = 65535;      /* CTAs of an item */

struct take_args {
    const int32_t *from;
    const cpa_cuda_item *items;
    const cpa_cuda_table_source *sources;
    int32_t *tables, *place_tables, *listed_blocks;
    int32_t block_size;
    int64_t num_blocks;
};

__device__ int32_t block_of(const take_args &a, int32_t entry) {
    return entry < 0 ? 0 : (int32_t)min((int64_t)entry, a.num_blocks - 1);
}

__global__ void __launch_bounds__(THREADS) take_tables(const __grid_constant__ take_args a) {
    const cpa_attend_item &item = a.items[blockIdx.x].item;
    const cpa_cuda_table_source source = a.sources[blockIdx.x];
    const int64_t entries = (item.k_count + a.block_size - 1) / a.block_size;
    const int32_t ratio = cpa_cuda_wide_block(a.block_size) / a.block_size;
    const cpa_cuda_key_place to = source.to;
    const int64_t places = to.place < 0 ? 0 : cpa_cuda_wide_places(a.block_size, entries);
    for (int64_t first = (int64_t)blockIdx.y * THREADS * EACH; first < max(entries, places);
         first += (int64_t)gridDim.y * THREADS * EACH) {
        int32_t read[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int64_t e = first + i * THREADS + threadIdx.x;
            if (e < entries) read[i] = __ldg(a.from + source.from + e);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int64_t e = first + i * THREADS + threadIdx.x;
            const int32_t block = e < entries ? block_of(a, read[i]) : -1;
            if (e < entries) a.tables[item.table + e] = block;
            if (e < places) a.listed_blocks[to.place + e] = block;
            if (e < places && e % ratio == 0)
                a.place_tables[item.table + e / ratio] = (int32_t)((to.at + e % to.part) / ratio);
        }
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_take_tables(const cpa_cuda_plan *plan, cpa_stream *stream) {
    char *image = plan->memory->image;
    const int64_t parts = (plan->most_entries + THREADS * EACH - 1) / (THREADS * EACH);
    const take_args args = {
        plan->device_tables,
        (const cpa_cuda_item *)(image + plan->items_at),
        (const cpa_cuda_table_source *)(image + plan->sources_at),
        (int32_t *)(image + plan->tables_at),
        (int32_t *)(image + plan->place_tables_at),
        (int32_t *)(image + plan->listed_blocks_at),
        plan->base.block_size,
        plan->num_blocks,
    };
    const dim3 grid((unsigned)plan->base.n_items, (unsigned)(parts < 1 ? 1 : parts > MOST_PARTS ? MOST_PARTS : parts));
    take_tables<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(args);
    return cpa_cuda_launched(stream, "attend plan");
}
