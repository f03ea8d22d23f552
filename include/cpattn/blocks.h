/* Blocks of a cache in and out of a process: what one job has computed of a prompt, another goes on with, on whatever
 * number of ranks, interleave, block size and layout.
 *
 * What leaves are rows: the keys and values of a token in all heads and some layers, side by side, the same bytes
 * whatever cache they were in. Rows of the tokens of a prompt travel as *parcels*, of CPA_PARCEL_TOKENS consecutive
 * tokens each (the last one of what there is), which are found by the tokens up to their end:
 *
 *     root = SHA-256(what keys and values depend on besides tokens, the model, the salt)
 *     d(j) = SHA-256(d(j-1), tokens of parcel j)
 *
 * A rank has some of the tokens of a parcel, and puts them into a store as a *part* of it. A part says which tokens it
 * has, and ends with a SHA-256 of all that it is: who takes one that was changed on the way, or that belongs to another
 * key, refuses it. The SHA-256 has no secret in it: it detects damage, not a hostile writer. Who may write to a store
 * says what the engines that read it compute with. A store keeps parts by their keys. There are
 * stores in host memory, whose content goes through file descriptors, in a folder, in memory of a device that processes
 * share, over NIXL and in Mooncake's; what else carries bytes by a key is a table of two functions. An engine with a
 * store exports what requests ask it to, and imports likewise (cpattn/engine.h). */
#ifndef CPATTN_BLOCKS_H
#define CPATTN_BLOCKS_H

#include <cpattn/device.h>
#include <cpattn/shared_memory.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- rows of a caller's cache ---- */

/* Bytes of the row of one token in all these layers: of each layer its keys [kv_heads, k_dim], then the scales of these
 * [kv_heads] where each row has its own behind the rows of its block, then its values likewise, which there are none of
 * with v_in_k. 0 for a view that is none. */
CPA_API int64_t cpa_blocks_row_bytes(const cpa_kv_view *layers, int32_t n_layers);

/* Whole blocks by their ids, between caches and rows. The views have one block_size and num_blocks; the rows of block
 * ids[i] are those from i * block_size on, and keep their bits, with the scales that belong to rows; scales of tensors
 * and heads are not looked at. Waits for what is enqueued on the stream before, and for itself. */
typedef struct cpa_blocks_args {
    size_t size;
    const cpa_kv_view *layers; /* [n_layers] */
    int32_t n_layers;
    const int32_t *ids; /* [n], host; of an import no id is there twice */
    int64_t n;
    void *rows; /* [n * block_size, cpa_blocks_row_bytes], host: written by an export, read by an import */
    /* Not 0: `rows` is memory of the stream's device, which may be that of another process (cpa_shared_memory_open, or
     * cudaIpcOpenMemHandle): what one exports there another imports without a copy to the host. Goes block by block. */
    int32_t rows_on_device;
} cpa_blocks_args;
CPA_API cpa_status cpa_blocks_export(const cpa_blocks_args *args, cpa_stream *stream);
CPA_API cpa_status cpa_blocks_import(const cpa_blocks_args *args, cpa_stream *stream);

/* ---- parts in stores ---- */

#define CPA_PARCEL_TOKENS 16

/* What a part is kept by. */
typedef struct cpa_block_key {
    uint8_t digest[32]; /* the parcel: that of the prompt up to its end */
    int32_t group;      /* group of layers: those of one mask, the one that keeps most first */
    int32_t part;       /* of the parcel, 0 to CPA_PARCEL_TOKENS - 1 */
} cpa_block_key;

/* What keeps parts. An engine calls it on every rank, from the thread that runs the engine; *err gets one line. */
typedef struct cpa_block_store {
    size_t size;
    void *ctx;
    /* Keeps a copy of n bytes by that key, in place of what it had by it. What fails is logged, and the rest of the
     * request is not exported. */
    cpa_status (*put)(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err);
    /* Copies what it has by that key to `bytes`, and *n says how many they are; 0: it has none. More than `most` are
     * not copied, and *n is what they are. What fails counts as none, and is logged. */
    cpa_status (*get)(void *ctx, const cpa_block_key *key, void *bytes, int64_t most, int64_t *n, cpa_error *err);
    /* Which model it is, as far as an engine does not know: two with different weights have different names. NULL = "";
     * lives as long as the engine. */
    const char *model;
} cpa_block_store;

/* ---- what can be found in an engine ---- */

/* What requests can find by its prefix in an engine's own cache comes and goes, as routers that send requests to where
 * their prefix is want to know (vLLM's BlockStored and BlockRemoved). */
typedef enum cpa_block_event_kind { CPA_BLOCK_STORED = 0, CPA_BLOCK_REMOVED } cpa_block_event_kind;

typedef struct cpa_block_event {
    cpa_block_event_kind kind;
    int32_t group;       /* group of layers, as in cpa_block_key: each comes and goes by itself */
    uint8_t digest[32];  /* of the prompt up to the end of these tokens, with its salt, and of where it lies */
    uint8_t parent[32];  /* stored: the digest of the tokens before; zeros: they are the first */
    int64_t first_token; /* stored: position of the first of the tokens */
    /* Stored: [n_tokens] the tokens, those of a block, or of one of each rank where the interleave is less than a
     * block; valid during the call. Removed: NULL, 0. */
    const uint32_t *tokens;
    int64_t n_tokens;
} cpa_block_event;

/* Rank 0, from a thread of the engine, while it plans; it calls no function of the engine. Blocks are told as stored
 * when they are about to be computed, and as removed if what is computed is not finite. An engine that ends tells
 * nothing of what it had. */
typedef void (*cpa_block_event_fn)(void *ctx, const cpa_block_event *event);

/* ---- stores ---- */

/* A store in host memory of this process. Any thread may call its functions at any time. */
typedef struct cpa_memory_store cpa_memory_store;

/* Keeps up to most_bytes of parts (0: as many as come), and forgets the oldest for a new one. A part counts with what
 * the store has beside it to find it by, some 100 bytes; one that is longer than most_bytes by itself is refused,
 * CPA_INVALID, and nothing is forgotten for it. */
CPA_API cpa_status cpa_memory_store_create(int64_t most_bytes, cpa_memory_store **out, cpa_error *err);
/* NULL does nothing. No engine may use it any more. */
CPA_API void cpa_memory_store_destroy(cpa_memory_store *store);
/* The store as an engine takes it; its model is NULL. */
CPA_API void cpa_memory_store_table(cpa_memory_store *store, cpa_block_store *out);
/* Bytes of all parts, as they count. */
CPA_API int64_t cpa_memory_store_bytes(cpa_memory_store *store);
/* Writes all parts to a file descriptor, a pipe, a socket or a file, the oldest first, and an end; takes in what the
 * former has written, up to that end. CPA_IO if the other side is gone, or what comes is no such stream, with what came
 * before kept; CPA_INVALID likewise for a part longer than most_bytes. Both block. A part is judged when it is used,
 * not here. Where the other side of a pipe or a socket may go, SIGPIPE is the caller's to ignore. */
CPA_API cpa_status cpa_memory_store_send(cpa_memory_store *store, int fd, cpa_error *err);
CPA_API cpa_status cpa_memory_store_receive(cpa_memory_store *store, int fd, cpa_error *err);

/* A store of files in a folder, which all ranks reach: a part a file, which is there as a whole or not at all. It
 * removes none. Processes and threads may use one folder at a time. */
typedef struct cpa_folder_store cpa_folder_store;

/* CPA_IO if the folder is not there. */
CPA_API cpa_status cpa_folder_store_create(const char *path, cpa_folder_store **out, cpa_error *err);
/* NULL does nothing; the files stay. */
CPA_API void cpa_folder_store_destroy(cpa_folder_store *store);
CPA_API void cpa_folder_store_table(cpa_folder_store *store, cpa_block_store *out);

/* A store in memory of a device that processes of this host share (cpattn/shared_memory.h): parts go from process to
 * process without a file or a socket. The process that has created the memory puts, and forgets the oldest part where
 * there is no room for a new one; any process gets. Of 32 bytes one is for finding parts, and a few are forgotten early
 * where parts are shorter than 2 KiB. Any thread may call the functions of its table at any time; on a CUDA device they
 * copy to and from host memory on a stream of the store's own. */
typedef struct cpa_shared_store cpa_shared_store;

/* Memory that this process has created becomes an empty store; memory that it has opened is taken for a store that
 * another process has made of it. CPA_INVALID for less than 16 KiB. The memory is destroyed after the store. */
CPA_API cpa_status cpa_shared_store_create(cpa_shared_memory *memory, cpa_shared_store **out, cpa_error *err);
/* NULL does nothing. No engine may use it any more. */
CPA_API void cpa_shared_store_destroy(cpa_shared_store *store);
/* put of a store in opened memory: CPA_UNSUPPORTED. get of what is no store: CPA_IO. */
CPA_API void cpa_shared_store_table(cpa_shared_store *store, cpa_block_store *out);

/* A store over NIXL (https://github.com/ai-dynamo/nixl), whose library libnixl_capi.so is opened when one is created:
 * each process puts parts into memory of its own, and reads those of others from memory to memory, by what NIXL's back
 * end has (UCX: RDMA, shared memory, TCP). A process that ends takes its parts with it; reads of one that has gone fail
 * within 10 s, are logged once, and then count as none. Whoever reaches the folder can read them. Any thread may
 * call the functions of its table at any time. */
typedef struct cpa_nixl_store cpa_nixl_store;

typedef struct cpa_nixl_options {
    size_t size;
    const char *folder;  /* that all processes reach, where those that put say how they are reached: a file each */
    int64_t bytes;       /* of parts that this process puts, the oldest forgotten for a new one; 0: it only gets */
    const char *backend; /* of NIXL; NULL: "UCX" */
    const char *library; /* a path, or what the loader looks for; NULL: "libnixl_capi.so" */
    int64_t reserved[4]; /* zero */
} cpa_nixl_options;

/* CPA_UNSUPPORTED without the library, CPA_IO without the folder, CPA_COMM where NIXL refuses. The options' texts are
 * not needed afterwards. */
CPA_API cpa_status cpa_nixl_store_create(const cpa_nixl_options *options, cpa_nixl_store **out, cpa_error *err);
/* NULL does nothing. No engine may use it any more. */
CPA_API void cpa_nixl_store_destroy(cpa_nixl_store *store);
CPA_API void cpa_nixl_store_table(cpa_nixl_store *store, cpa_block_store *out);

/* A store in Mooncake's distributed store (https://github.com/kvcache-ai/Mooncake), by the C interface of its library
 * libmooncake_store.so, which is opened when one is created. A part is an object; of what is there by a key already,
 * Mooncake keeps the first. Any thread may call the functions of its table at any time. */
typedef struct cpa_mooncake_store cpa_mooncake_store;

/* As mooncake_store_setup and Mooncake's configuration files have them. */
typedef struct cpa_mooncake_options {
    size_t size;
    const char *local_hostname;  /* of this client, as others reach it */
    const char *metadata_server; /* "P2PHANDSHAKE", or an address such as "http://HOST:8080/metadata" */
    const char *master_server;   /* HOST:PORT */
    const char *protocol;        /* NULL: "tcp" */
    const char *device_name;     /* of RDMA; NULL: "" */
    int64_t segment_bytes;       /* memory that this client gives to the store; 0: none */
    int64_t buffer_bytes;        /* of what is put and on its way; 0: 64 MiB */
    const char *library;         /* a path, or what the loader looks for; NULL: "libmooncake_store.so" */
    int64_t reserved[4];         /* zero */
} cpa_mooncake_options;

/* CPA_UNSUPPORTED without the library, CPA_COMM where the master is not reached. The options' texts are not needed
 * afterwards. */
CPA_API cpa_status cpa_mooncake_store_create(const cpa_mooncake_options *options, cpa_mooncake_store **out,
                                             cpa_error *err);
/* NULL does nothing. No engine may use it any more. */
CPA_API void cpa_mooncake_store_destroy(cpa_mooncake_store *store);
CPA_API void cpa_mooncake_store_table(cpa_mooncake_store *store, cpa_block_store *out);

#ifdef __cplusplus
}
#endif
#endif
