/* Byte pair encoding: a word becomes ids of its characters, and neighbours are joined by the merges of lowest rank
 * first, from left to right. As the model "BPE" of the package tokenizers does. */
#ifndef CPA_TEXT_BPE_H
#define CPA_TEXT_BPE_H

#include "src/text/json_part.h"
#include "src/text/pair_table.h"
#include "src/text/token_list.h"
#include "src/text/vocabulary.h"

/* One of zeros is closed. Does not change once it is read. */
typedef struct cpa_bpe {
    cpa_vocabulary vocabulary;
    cpa_pair_table merges;  /* pairs of ids: the rank, and the id of the joined pair */
    int crosses_spaces;     /* a merge joins a U+2581, which stands for a space, to something else before it */
    int ignore_merges;      /* a word with an id of its own is that id, whatever the merges say */
    int fuse_unknown;       /* unknown characters side by side are one id */
    uint32_t space_id;      /* id of U+2581; CPA_NO_ID: none */
    uint32_t unknown_id;    /* CPA_NO_ID: unknown characters are left out */
    uint32_t byte_ids[256]; /* ids of "<0x00>" and so on, for bytes of characters that have no id */
    int has_byte_fallback;
} cpa_bpe;

/* Reads the object under "model". CPA_UNSUPPORTED for models of other types and options. */
cpa_status cpa_bpe_read(const cpa_json *file, cpa_bpe *out, cpa_error *err);
void cpa_bpe_release(cpa_bpe *bpe);

/* Memory that words of one text share; one of zeros is empty. */
typedef struct cpa_bpe_memory {
    struct cpa_bpe_symbol *symbols;
    struct cpa_bpe_merge *heap;
    int64_t symbols_capacity, heap_capacity;
} cpa_bpe_memory;

void cpa_bpe_memory_release(cpa_bpe_memory *memory);

/* Adds the ids of a word, of valid UTF-8 and at most 1 GiB. Time grows with bytes * log(bytes). */
cpa_status cpa_bpe_encode(const cpa_bpe *bpe, const char *word, size_t bytes, cpa_bpe_memory *memory,
                          cpa_token_list *out, cpa_error *err);

#endif
