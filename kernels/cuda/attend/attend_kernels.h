/* The kernels of attend as rows of a table: what each takes, how its work is cut, and how it is launched. A plan asks
 * the rows in their order, the fastest first, and keeps what they answer. C and CUDA C++.
 *
 * A kernel more is a row in a file of its own and a line of CPA_CUDA_ATTEND_KERNELS. */
#ifndef CPA_CUDA_ATTEND_KERNELS_H
#define CPA_CUDA_ATTEND_KERNELS_H

#include "kernels/cuda/attend/attend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- what is asked for ---- */

/* Kinds of pieces: of few rows, of many, and over keys that rows of several items share. */
typedef enum cpa_cuda_pieces {
    CPA_CUDA_DECODE,
    CPA_CUDA_PREFILL,
    CPA_CUDA_SHARED,
    CPA_CUDA_PIECE_KINDS
} cpa_cuda_pieces;

/* How a cache lies, as a set of one. */
typedef enum cpa_cuda_cache {
    CPA_CUDA_ELEMENTS = 1,       /* of any dtype that is not quantised */
    CPA_CUDA_ELEMENTS_APART = 2, /* in blocks of fewer tokens than decode kernels load at once */
    CPA_CUDA_CODES = 4,          /* of a quantised dtype */
    CPA_CUDA_RUNS = 8,           /* elements whose rows lie in runs, CPA_VLLM_X */
    CPA_CUDA_RUN_CODES = 16,     /* codes that do so */
    CPA_CUDA_TURBOQUANT = 32,    /* codes of CPA_TQ_ */
    CPA_CUDA_ROWS = CPA_CUDA_ELEMENTS | CPA_CUDA_ELEMENTS_APART,
    CPA_CUDA_ALL_CACHES = 63
} cpa_cuda_cache;

/* What is done to scores (cpattn/score.h), and which keys are attended (cpattn/selection.h), as a set. Sinks are part of
 * every kernel. */
typedef enum cpa_cuda_rules {
    CPA_CUDA_SOFTCAP = 1,
    CPA_CUDA_TEMPERATURE = 2,
    CPA_CUDA_ALIBI = 4,
    CPA_CUDA_BITS = 8,
    CPA_CUDA_BIAS = 16,
    CPA_CUDA_ALL_RULES = 31, /* those that kernels compiled with rules know */
    CPA_CUDA_LISTS = 32,
    CPA_CUDA_BLOCKS = 64
} cpa_cuda_rules;

/* What is not as kernels like it best, or is what a few are for, as a set. */
typedef enum cpa_cuda_oddities {
    CPA_CUDA_UNALIGNED = 1,      /* inputs do not move 16 bytes at a time */
    CPA_CUDA_PARTED_BLOCKS = 2,  /* nor do blocks as they lie, at distances of 32 bits */
    CPA_CUDA_NO_BLOCKS = 4,      /* the cache has none that maps could name */
    CPA_CUDA_FAR_ROWS = 8,       /* queries are 2^31 elements from row to row, or more */
    CPA_CUDA_SCALE_BELOW_0 = 16, /* or 0, or NaN: the largest raw score is not the largest scaled one */
    CPA_CUDA_SCALE_TINY = 32,    /* ALiBi is divided by it in prefill */
    CPA_CUDA_STATE = 64,         /* results go to a state, or go on from one */
    CPA_CUDA_OUT_CODES = 128,    /* `out` is fp8 */
    CPA_CUDA_GAP = 256,          /* a window and sinks, between which rows see no keys */
    CPA_CUDA_FULL = 512,         /* rows see keys behind them */
    CPA_CUDA_ROW_SCALES = 1024,  /* rows of the cache have scales of their own, behind those of a block */
    CPA_CUDA_TILES_SKIP = 2048,  /* tiles of keys may be left out (skip_tiles of cpa_attend_args) */
    CPA_CUDA_ODD_ROWS = 4096,    /* rows of a head, or scales, lie at distances off 16 bytes, or of 64 MiB and more */
    CPA_CUDA_RESUMED = 8192      /* results go on from a state */
} cpa_cuda_oddities;

/* Widths of heads that kernels are compiled for, each wide enough for those before it. */
typedef enum cpa_cuda_width { CPA_CUDA_64, CPA_CUDA_128, CPA_CUDA_192_128, CPA_CUDA_256, CPA_CUDA_576 } cpa_cuda_width;
static inline cpa_cuda_width cpa_cuda_width_of(int32_t k_dim, int32_t v_dim) {
    if (v_dim > 256 || k_dim > 256) return CPA_CUDA_576;
    if (v_dim > 128 || k_dim > 192) return CPA_CUDA_256;
    if (k_dim > 128) return CPA_CUDA_192_128;
    return k_dim > 64 || v_dim > 64 ? CPA_CUDA_128 : CPA_CUDA_64;
}

/* Whether a cache has latents, or heads so wide, that kernels of their own take them, in tiles of CPA_CUDA_WIDE_ROWS. */
enum { CPA_CUDA_WIDE_ROWS = 64 };
static inline int cpa_cuda_is_wide(const cpa_attention_shape *shape) {
    return shape->v_in_k || cpa_cuda_width_of(shape->k_dim, shape->v_dim) == CPA_CUDA_576;
}

/* What a call says that its plan does not know; choices are kept by it. */
typedef struct cpa_cuda_attend_call {
    cpa_cuda_path path;
    cpa_dtype q_dtype, kv_dtype;
    cpa_cuda_cache cache;
    int32_t rules, oddities; /* sets */
} cpa_cuda_attend_call;

/* A call and what its plan knows. */
typedef struct cpa_cuda_attend_spec {
    cpa_cuda_attend_call call;
    const cpa_attention_shape *shape;
    int32_t block_size;
    cpa_cuda_width width;
    int32_t heads;     /* KV heads that a CTA of decode takes */
    int32_t pieces;    /* set of 1 << cpa_cuda_pieces that the plan has */
    int32_t no_memory; /* not 0: kernels asked before need more shared memory than a CTA has */
    int32_t prepared;  /* not 0: a workspace is there for prepared keys */
    int32_t reserved;  /* not 0: the plan is reserved, and may have fewer pieces than are launched */
    int32_t cp_size;   /* ranks */
    int32_t tile_rows; /* packed rows of a prefill tile */
    int32_t row_tiles; /* tiles of CPA_CUDA_DECODE_ROWS packed rows that a CTA of decode takes */
    int64_t rows;      /* rows of queries */
    int64_t most_keys; /* keys of an item with prefill pieces, at most */
} cpa_cuda_attend_spec;

static inline int cpa_cuda_has_codes(const cpa_cuda_attend_spec *spec) {
    return (spec->call.cache & (CPA_CUDA_CODES | CPA_CUDA_RUN_CODES | CPA_CUDA_TURBOQUANT)) != 0;
}
static inline int cpa_cuda_in_runs(const cpa_cuda_attend_spec *spec) {
    return (spec->call.cache & (CPA_CUDA_RUNS | CPA_CUDA_RUN_CODES)) != 0;
}

/* ---- who takes it ---- */

/* Which tiles of keys are left out, for kernels that take such calls. */
typedef struct cpa_cuda_tile_skip {
    float below;                /* distance of raw scores from the largest so far; 0: none are left out */
    unsigned long long *counts; /* [2], device: a cpa_tile_counts; NULL: they are not counted */
} cpa_cuda_tile_skip;

/* What a launch is told. */
typedef struct cpa_cuda_attend_launch {
    const struct cpa_cuda_attend_kernel *kernel; /* the row */
    const cpa_cuda_plan *plan;
    const cpa_cuda_attend_spec *spec;
    const cpa_cuda_attend_args *args;
    const cpa_kv_view *kv; /* resolved: the cache, or what was prepared of it */
    /* Pieces; of decode CTAs for each KV head, of the plain kernel the whole plan. 0: nothing is enqueued, and
     * CPA_UNSUPPORTED, without a message, says that the device has not the shared memory that the kernel takes; of
     * kernels for devices before 9.0 alone. */
    int32_t count;
    const cpa_key_selection *selection; /* lists and blocks; bits are among the arguments; NULL: none */
    cpa_cuda_pieces pieces; /* the kind of them; CPA_CUDA_DECODE where the plain kernel has the whole plan */
    cpa_cuda_tile_skip skip;
} cpa_cuda_attend_launch;
typedef cpa_status cpa_cuda_attend_launcher(const cpa_cuda_attend_launch *launch, cpa_stream *stream);
cpa_cuda_attend_launcher cpa_cuda_attend_decode_blocks, cpa_cuda_attend_decode, cpa_cuda_attend_decode_ruled,
    cpa_cuda_attend_decode_ruled_caches, cpa_cuda_attend_decode_skip, cpa_cuda_attend_decode_packed,
    cpa_cuda_attend_decode_turboquant, cpa_cuda_attend_portable, cpa_cuda_attend_portable_ruled_codes,
    cpa_cuda_attend_simple;

/* How work is cut for a kernel: before the plan knows what calls ask for. */
typedef struct cpa_cuda_attend_geometry {
    int32_t rows;  /* packed rows of a tile, at most; of an item of decode */
    int32_t heads; /* KV heads that a CTA takes */
    int32_t ctas;  /* CTAs that share a multiprocessor */
    int32_t wide;  /* not 0: there are CTAs of twice as many warps, each with a multiprocessor to itself */
} cpa_cuda_attend_geometry;
typedef cpa_cuda_attend_geometry cpa_cuda_attend_cut(const cpa_attention_shape *shape, int32_t block_size);
cpa_cuda_attend_cut cpa_cuda_decode_geometry;

/* What is done to keys and values before a kernel attends them. Which cache it is for, a kernel's row says. */
typedef struct cpa_cuda_preparation {
    /* Bytes of the workspace for a key and its value, all heads; 0: not for this shape. */
    int64_t (*token_bytes)(const cpa_attention_shape *shape);
    /* Enqueues it for blocks listed on the device, entries below 0 left out, which take `memory` from its beginning in
     * their order. The arguments become those of what lies there, its block tables excepted, and *kv its view. */
    cpa_status (*prepare)(const cpa_cuda_attend_launch *launch, const int32_t *blocks, int64_t n_blocks, char *memory,
                          cpa_cuda_attend_args *args, cpa_kv_view *kv, cpa_stream *stream);
} cpa_cuda_preparation;
extern const cpa_cuda_preparation cpa_cuda_widen;

typedef struct cpa_cuda_attend_kernel {
    const char *name; /* as its file is called */
    /* What it is for: sets of 1 << cpa_cuda_pieces, of cpa_cuda_cache and of cpa_cuda_rules; the path that a device has
     * to have, or a better one; the widest heads. The plain kernel takes latents as well. */
    struct {
        int32_t pieces, caches, rules;
        cpa_cuda_path path;
        cpa_cuda_width width;
        int32_t latents;          /* 1: caches whose keys hold their values (v_in_k), and no others; 0: others alone */
        cpa_cuda_width narrowest; /* the narrowest heads */
        int32_t skips; /* 1: calls of which tiles may be left out, and no others; 0: all, without leaving any out */
    } takes;
    /* What of that it does not take, in words; NULL: nothing. Without a function it takes all of it. */
    const char *(*refuses)(const cpa_cuda_attend_spec *spec);
    cpa_cuda_attend_cut *geometry;
    cpa_cuda_attend_launcher *launch;
    int32_t whole;        /* not 0: takes the whole plan at once, whatever its pieces, with selected keys alone */
    int32_t leaves_units; /* decode: not 0: the states of pieces are left to cpa_cuda_attend_combine_units */
    /* NULL; or what is done to the keys first, and the kernel for whose sake, which has its say before this one, then
     * cuts and runs. Such a row has no launch (attend_source.h). */
    const cpa_cuda_preparation *prepares;
    const struct cpa_cuda_attend_kernel *over;
} cpa_cuda_attend_kernel;

#define CPA_CUDA_ATTEND_KERNELS(KERNEL)                                                                                \
    KERNEL(lists_latent)                                                                                               \
    KERNEL(lists)                                                                                                      \
    KERNEL(blocks)                                                                                                     \
    KERNEL(latent)                                                                                                     \
    KERNEL(wide)                                                                                                       \
    KERNEL(decode_blocks)                                                                                              \
    KERNEL(decode_packed)                                                                                              \
    KERNEL(decode_turboquant)                                                                                          \
    KERNEL(decode_skip)                                                                                                \
    KERNEL(decode)                                                                                                     \
    KERNEL(decode_ruled)                                                                                               \
    KERNEL(decode_ruled_caches)                                                                                        \
    KERNEL(hopper_skip)                                                                                                \
    KERNEL(persistent)                                                                                                 \
    KERNEL(hopper)                                                                                                     \
    KERNEL(widen_hopper)                                                                                               \
    KERNEL(portable_ruled_codes)                                                                                       \
    KERNEL(portable)                                                                                                   \
    KERNEL(widen_portable)                                                                                             \
    KERNEL(simple)
#define CPA_CUDA_DECLARE_KERNEL(id) extern const cpa_cuda_attend_kernel cpa_cuda_kernel_##id;
CPA_CUDA_ATTEND_KERNELS(CPA_CUDA_DECLARE_KERNEL)
extern const cpa_cuda_attend_kernel *const cpa_cuda_attend_kernels[]; /* in their order, NULL after the last */

/* Why the kernel does not take the call, for pieces and a cache that it is for; NULL: it does. A literal. */
const char *cpa_cuda_kernel_refuses(const cpa_cuda_attend_kernel *kernel, const cpa_cuda_attend_spec *spec);

/* Widths of the tiles of kernels of latents; and what these do not take of codes. */
enum { CPA_CUDA_LATENT_K_DIM = 576, CPA_CUDA_LATENT_V_DIM = 512 };
const char *cpa_cuda_latent_codes_refuse(const cpa_cuda_attend_spec *spec);

/* What is chosen for the pieces of a kind. */
typedef struct cpa_cuda_chosen {
    const cpa_cuda_attend_kernel *kernel;  /* NULL: there are no such pieces */
    const cpa_cuda_attend_kernel *fastest; /* the fastest kernel for these pieces and this cache */
    const char *why;                       /* why `fastest` refused; NULL: it is the kernel */
} cpa_cuda_chosen;
typedef struct cpa_cuda_attend_choice {
    cpa_cuda_attend_spec spec;
    cpa_cuda_chosen of[CPA_CUDA_PIECE_KINDS];
    const char *plain; /* why the plain kernel takes the whole call; NULL: it does not */
} cpa_cuda_attend_choice;
/* Pure. If the plain kernel takes pieces of one kind it takes all. */
cpa_cuda_attend_choice cpa_cuda_choose_attend(const cpa_cuda_attend_spec *spec);

/* Bytes that a prepared key and its value take, all heads, where kernels of prefill are for caches of this shape only
 * when it is prepared; else 0. */
static inline int64_t cpa_cuda_prepared_token_bytes(const cpa_attention_shape *shape) {
    return cpa_cuda_widen.token_bytes(shape);
}

/* ---- of a plan (attend_choice.c) ---- */

/* Of the plan as it is set, for the calls that came last. */
enum { CPA_CUDA_KEPT_CHOICES = 4 };
struct cpa_cuda_attend_choices {
    cpa_cuda_attend_choice of[CPA_CUDA_KEPT_CHOICES];
    int32_t n, next;
};
/* What a call asks for, and one that asks for nothing beside what a plan is told. */
cpa_cuda_attend_call cpa_cuda_call_of(cpa_cuda_path path, const cpa_cuda_attend_args *args, const cpa_kv_view *kv,
                                      const cpa_key_selection *selection);
cpa_cuda_attend_call cpa_cuda_planned_call(const cpa_device *device, const cpa_attention_shape *shape,
                                           int32_t block_size, cpa_attend_fusion fusion);
/* What the plan has for such calls: until it is set again, or many others came. */
const cpa_cuda_attend_choice *cpa_cuda_plan_choice(const cpa_cuda_plan *plan, const cpa_cuda_attend_call *call);
/* Rows of the tiles of the prefill kernel that a plan is cut for, whose calls may turn out to be others. */
int32_t cpa_cuda_plan_tile_rows(const cpa_device *device, const cpa_attention_shape *shape, int32_t block_size);

#ifdef __cplusplus
}
#endif
#endif
