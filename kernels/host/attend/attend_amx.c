/* The inner loops of attend for AMX, of bf16 queries over bf16 keys and values. TDPBF16PS adds to a tile of up to 16 x
 * 16 sums in fp32 the products of 16 pairs: the first elements of all pairs in one chain, the second ones in another,
 * each from zero in ascending order, then both chains' sum to the tile's; it takes denormals for zeros and gives none
 * (Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS). A sum does not depend on how many rows a
 * tile has. */
#include <sys/syscall.h>
#include <unistd.h>

#include <cpuid.h>

#include "kernels/host/isa/isa_avx512.h"

#define ISA_ROWS 32
#define ISA_PAIRS
#define SCALES_LATE 1 /* stores of tiles have to leave for memory before others can load what they stored */

#include "kernels/host/attend/attend_vector.h"

/* Tiles, by number: instructions name them as constants. A group is up to two tiles of rows, UPPER and LOWER, and goes
 * through a panel, two tiles of words, LEFT and RIGHT, which are read half as often as with one. */
#define UPPER_LEFT 0
#define UPPER_RIGHT 1
#define LOWER_LEFT 2
#define LOWER_RIGHT 3
#define UPPER 4
#define LOWER 5
#define LEFT 6
#define RIGHT 7
enum { TILE_ROWS = 16, TILES = 8 };

/* Operand of LDTILECFG. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* sums += rows of pairs, `stride` words apart, times WORDS x PANEL words. */
INLINE void multiply(const int rows, const float *pairs, int64_t stride, const float *words) {
    const size_t bytes = (size_t)stride * sizeof(float);
    _tile_loadd(LEFT, words, PANEL * sizeof(float));
    _tile_loadd(UPPER, pairs, bytes);
    _tile_loadd(RIGHT, words + ISA_LANES, PANEL * sizeof(float));
    _tile_dpbf16ps(UPPER_LEFT, UPPER, LEFT);
    _tile_dpbf16ps(UPPER_RIGHT, UPPER, RIGHT);
    if (rows <= TILE_ROWS) return;
    _tile_loadd(LOWER, pairs + TILE_ROWS * stride, bytes);
    _tile_dpbf16ps(LOWER_LEFT, LOWER, LEFT);
    _tile_dpbf16ps(LOWER_RIGHT, LOWER, RIGHT);
}

INLINE void store_tiles(const int rows, float *to, int64_t stride) {
    const size_t bytes = (size_t)stride * sizeof(float);
    _tile_stored(UPPER_LEFT, to, bytes);
    _tile_stored(UPPER_RIGHT, to + ISA_LANES, bytes);
    if (rows <= TILE_ROWS) return;
    _tile_stored(LOWER_LEFT, to + TILE_ROWS * stride, bytes);
    _tile_stored(LOWER_RIGHT, to + TILE_ROWS * stride + ISA_LANES, bytes);
}

INLINE void load_tiles(const int rows, const float *from, int64_t stride) {
    const size_t bytes = (size_t)stride * sizeof(float);
    _tile_loadd(UPPER_LEFT, from, bytes);
    _tile_loadd(UPPER_RIGHT, from + ISA_LANES, bytes);
    if (rows <= TILE_ROWS) return;
    _tile_loadd(LOWER_LEFT, from + TILE_ROWS * stride, bytes);
    _tile_loadd(LOWER_RIGHT, from + TILE_ROWS * stride + ISA_LANES, bytes);
}

INLINE void score_words(const int rows, const float *q, const float *k, int32_t words, float scale, float *s,
                        coming *next) {
    (void)scale;
    _tile_zero(UPPER_LEFT);
    _tile_zero(UPPER_RIGHT);
    _tile_zero(LOWER_LEFT);
    _tile_zero(LOWER_RIGHT);
    for (int32_t word = 0; word < words; word += WORDS) {
        if (next) request(next, WORDS);
        multiply(rows, q + word, Q_WORDS, k + word * PANEL);
    }
    store_tiles(rows, s, TILE);
}

INLINE void weigh_words(const int rows, const float *p, const float *v, int32_t pairs, float *o, int64_t o_stride,
                        coming *next) {
    load_tiles(rows, o, o_stride);
    for (int32_t pair = 0; pair < pairs; pair += WORDS) {
        if (next) request(next, WORDS);
        multiply(rows, p + pair, P_STRIDE, v + pair * PANEL);
    }
    store_tiles(rows, o, o_stride);
}

/* The caller's thread may use tiles for something else before and after. */
static void attend_group(const cpa_attend_tile *tile, const cpa_attend_group *group) {
    tile_config config = {.palette = 1};
    const int32_t upper = group->rows < TILE_ROWS ? group->rows : TILE_ROWS, lower = group->rows - upper;
    const int32_t rows[TILES] = {upper, upper, lower, lower, upper, lower, WORDS, WORDS};
    for (int i = 0; i < TILES; i++) {
        config.row_bytes[i] = LINE;
        config.rows[i] = (uint8_t)(rows[i] > 0 ? rows[i] : 1);
    }
    /* GCC's _tile_loadconfig says that it reads the first 8 bytes alone. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    attend_rows(group->rows, tile, group);
    _tile_release();
}

/* The kernel saves the tiles' state for processes that have asked for it alone. */
static int supported(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    return cpa_attend_avx512.supported() && __builtin_cpu_supports("avx512bf16") &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

const cpa_attend_isa cpa_attend_amx = {
    .name = "AMX",
    .rows = ISA_ROWS,
    .lanes = PANEL,
    .pairs = 1,
    .supported = supported,
    .pack = pack_tile,
    .attend = attend_group,
};
