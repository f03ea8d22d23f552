#include "src/text/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "src/text/utf8.h"

/* U+2581, which stands for a space in vocabularies that are not byte-level. */
enum { SPACE_BYTES = 3 };
static const char SPACE[] = "\xe2\x96\x81";

static int begins_with_space(const char *text, size_t bytes) {
    return bytes >= SPACE_BYTES && memcmp(text, SPACE, SPACE_BYTES) == 0;
}

static int ends_with_space(const char *text, size_t bytes) {
    return bytes >= SPACE_BYTES && memcmp(text + bytes - SPACE_BYTES, SPACE, SPACE_BYTES) == 0;
}

/* ---- Reading ---- */

static cpa_status read_vocabulary(const cpa_json *model, cpa_bpe *bpe, cpa_error *err) {
    cpa_json_part part;
    CPA_TRY(cpa_json_part_of(model, "vocab", CPA_JSON_NO_INDEX, &part, err));
    if (!part.json.object) return cpa_json_refuse(model, "vocab", "an object of ids", err);
    for (void *at = json_object_iter((json_t *)(uintptr_t)part.json.object); at;
         at = json_object_iter_next((json_t *)(uintptr_t)part.json.object, at)) {
        const char *token = json_object_iter_key(at);
        const json_t *id = json_object_iter_value(at);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= CPA_MAX_IDS)
            return cpa_fail(err, CPA_INVALID, "%s: %s'%.40s': expected an id from 0 to %d", model->path, part.prefix,
                            token, CPA_MAX_IDS - 1);
        if (!cpa_vocabulary_put(&bpe->vocabulary, token, strlen(token), (uint32_t)json_integer_value(id)))
            return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a vocabulary", model->path);
    }
    return CPA_OK;
}

/* The two tokens of a merge: "a b" or ["a", "b"]. */
static int merge_tokens(const json_t *merge, const char *token[2], size_t bytes[2]) {
    if (json_is_string(merge)) {
        token[0] = json_string_value(merge);
        const char *space = strchr(token[0], ' ');
        if (!space || strchr(space + 1, ' ')) return 0;
        token[1] = space + 1;
        bytes[0] = (size_t)(space - token[0]);
        bytes[1] = strlen(token[1]);
        return 1;
    }
    if (json_array_size(merge) != 2) return 0;
    for (size_t i = 0; i < 2; i++) {
        if (!json_is_string(json_array_get(merge, i))) return 0;
        token[i] = json_string_value(json_array_get(merge, i));
        bytes[i] = strlen(token[i]);
    }
    return 1;
}

static cpa_status read_merge(const cpa_json *model, const json_t *merge, uint32_t rank, cpa_bytes *joined, cpa_bpe *bpe,
                             cpa_error *err) {
    const char *token[2];
    size_t bytes[2];
    uint32_t id[3] = {CPA_NO_ID, CPA_NO_ID, CPA_NO_ID};
    if (merge_tokens(merge, token, bytes)) {
        joined->count = 0;
        if (!cpa_bytes_add(joined, token[0], bytes[0]) || !cpa_bytes_add(joined, token[1], bytes[1]))
            return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for merges", model->path);
        id[0] = cpa_vocabulary_find(&bpe->vocabulary, token[0], bytes[0]);
        id[1] = cpa_vocabulary_find(&bpe->vocabulary, token[1], bytes[1]);
        id[2] = cpa_vocabulary_find(&bpe->vocabulary, joined->data, (size_t)joined->count);
    }
    if (id[0] == CPA_NO_ID || id[1] == CPA_NO_ID || id[2] == CPA_NO_ID) {
        char key[40];
        snprintf(key, sizeof key, "merges[%u]", (unsigned)rank);
        return cpa_fail(err, CPA_INVALID, "%s: %s%s: expected two tokens of the vocabulary that join to a third",
                        model->path, model->prefix, key);
    }
    bpe->crosses_spaces |= begins_with_space(token[1], bytes[1]) && !ends_with_space(token[0], bytes[0]);
    if (!cpa_pair_table_put(&bpe->merges, id[0], id[1], rank, id[2]))
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for merges", model->path);
    return CPA_OK;
}

static cpa_status read_merges(const cpa_json *model, cpa_bpe *bpe, cpa_error *err) {
    const json_t *merges = NULL;
    cpa_bytes joined = {.count = 0};
    cpa_status status = cpa_json_list(model, "merges", &merges, err);
    if (status == CPA_OK && !merges) status = cpa_json_refuse(model, "merges", "a list", err);
    for (size_t i = 0; status == CPA_OK && i < json_array_size(merges); i++)
        status = read_merge(model, json_array_get(merges, i), (uint32_t)i, &joined, bpe, err);
    cpa_bytes_release(&joined);
    return status;
}

/* Options that change the ids in ways that are not here. */
static cpa_status refuse_options(const cpa_json *model, cpa_error *err) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        const char *affix = "";
        CPA_TRY(cpa_json_text(model, affixes[i], CPA_JSON_OPTIONAL, &affix, err));
        if (*affix) return cpa_json_unsupported(model, affixes[i], "nothing", err);
    }
    double dropout = 0;
    CPA_TRY(cpa_json_number(model, "dropout", CPA_JSON_OPTIONAL, 0, 1, &dropout, err));
    return dropout > 0 ? cpa_json_unsupported(model, "dropout", "none", err) : CPA_OK;
}

static cpa_status read_unknown(const cpa_json *model, cpa_bpe *bpe, cpa_error *err) {
    const char *unknown = NULL;
    bpe->unknown_id = CPA_NO_ID;
    CPA_TRY(cpa_json_text(model, "unk_token", CPA_JSON_OPTIONAL, &unknown, err));
    CPA_TRY(cpa_json_flag(model, "fuse_unk", &bpe->fuse_unknown, err));
    CPA_TRY(cpa_json_flag(model, "byte_fallback", &bpe->has_byte_fallback, err));
    CPA_TRY(cpa_json_flag(model, "ignore_merges", &bpe->ignore_merges, err));
    if (unknown) {
        bpe->unknown_id = cpa_vocabulary_find(&bpe->vocabulary, unknown, strlen(unknown));
        if (bpe->unknown_id == CPA_NO_ID) return cpa_json_refuse(model, "unk_token", "a token of the vocabulary", err);
    }
    bpe->space_id = cpa_vocabulary_find(&bpe->vocabulary, SPACE, SPACE_BYTES);
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", byte);
        bpe->byte_ids[byte] = cpa_vocabulary_find(&bpe->vocabulary, name, 6);
    }
    return CPA_OK;
}

cpa_status cpa_bpe_read(const cpa_json *file, cpa_bpe *out, cpa_error *err) {
    cpa_json_part model;
    CPA_TRY(cpa_json_part_of(file, "model", CPA_JSON_NO_INDEX, &model, err));
    if (!model.json.object) return cpa_json_refuse(file, "model", "an object", err);
    /* Old files name no type; those of other models have no merges. */
    if (strcmp(model.type, "BPE") != 0 && (model.type[0] || !cpa_json_get(&model.json, "merges")))
        return cpa_json_unsupported(&model.json, "type", "BPE", err);
    CPA_TRY(refuse_options(&model.json, err));
    CPA_TRY(read_vocabulary(&model.json, out, err));
    CPA_TRY(read_unknown(&model.json, out, err));
    return read_merges(&model.json, out, err);
}

void cpa_bpe_release(cpa_bpe *bpe) {
    cpa_vocabulary_release(&bpe->vocabulary);
    cpa_pair_table_release(&bpe->merges);
}

/* ---- Encoding ---- */

#define NOBODY UINT32_MAX

/* A part of the word. The parts are a list, since they are joined anywhere. */
struct cpa_bpe_symbol {
    uint32_t id;
    uint32_t previous, next; /* NOBODY at the ends */
    int is_gone;             /* joined to the one before */
};

/* Two neighbours that might be joined: a heap of them, the lowest rank first, and of one rank the leftmost. */
struct cpa_bpe_merge {
    uint64_t order; /* rank, then position of the left neighbour */
    uint32_t id;    /* id of both joined */
};

typedef struct word {
    const cpa_bpe *bpe;
    cpa_bpe_memory *memory;
    int64_t symbols, merges; /* how many there are */
} word;

static int add_symbol(word *w, uint32_t id) {
    cpa_bpe_memory *m = w->memory;
    if (!cpa_array_reserve(&m->symbols, &m->symbols_capacity, w->symbols + 1, sizeof *m->symbols)) return 0;
    const uint32_t at = (uint32_t)w->symbols++;
    m->symbols[at] = (struct cpa_bpe_symbol){.id = id, .previous = at > 0 ? at - 1 : NOBODY, .next = at + 1};
    return 1;
}

/* The bytes of a character that has no id; 0 if one of them has none either. */
static int add_bytes(word *w, const char *text, size_t bytes, int *ok) {
    for (size_t i = 0; i < bytes; i++) {
        if (w->bpe->byte_ids[(unsigned char)text[i]] == CPA_NO_ID) return 0;
    }
    for (size_t i = 0; i < bytes && *ok; i++) *ok = add_symbol(w, w->bpe->byte_ids[(unsigned char)text[i]]);
    return 1;
}

/* An id for each character. */
static int add_characters(word *w, const char *text, size_t bytes) {
    const cpa_bpe *bpe = w->bpe;
    int ok = 1, has_unknown = 0; /* an unknown character waits, so that more of them join it */
    for (size_t at = 0, length; ok && at < bytes; at += length) {
        length = cpa_utf8_length(text[at]);
        const uint32_t id = cpa_vocabulary_find(&bpe->vocabulary, text + at, length);
        if (id != CPA_NO_ID) {
            if (has_unknown) ok = add_symbol(w, bpe->unknown_id);
            has_unknown = 0;
            ok = ok && add_symbol(w, id);
        } else if (!(bpe->has_byte_fallback && add_bytes(w, text + at, length, &ok)) && bpe->unknown_id != CPA_NO_ID) {
            if (has_unknown && !bpe->fuse_unknown) ok = add_symbol(w, bpe->unknown_id);
            has_unknown = 1;
        }
    }
    if (has_unknown) ok = ok && add_symbol(w, bpe->unknown_id);
    if (w->symbols > 0) w->memory->symbols[w->symbols - 1].next = NOBODY;
    return ok;
}

/* Puts what the symbol at `left` and the next might become on the heap. */
static int propose(word *w, uint32_t left) {
    cpa_bpe_memory *m = w->memory;
    const struct cpa_bpe_symbol *symbols = m->symbols;
    const cpa_pair *pair = cpa_pair_table_find(&w->bpe->merges, symbols[left].id, symbols[symbols[left].next].id);
    if (!pair) return 1;
    if (!cpa_array_reserve(&m->heap, &m->heap_capacity, w->merges + 1, sizeof *m->heap)) return 0;
    const struct cpa_bpe_merge merge = {.order = (uint64_t)pair->first << 32 | left, .id = pair->second};
    int64_t at = w->merges++;
    for (; at > 0 && m->heap[(at - 1) / 2].order > merge.order; at = (at - 1) / 2) m->heap[at] = m->heap[(at - 1) / 2];
    m->heap[at] = merge;
    return 1;
}

static struct cpa_bpe_merge take_first(word *w) {
    struct cpa_bpe_merge *heap = w->memory->heap, first = heap[0], last = heap[--w->merges];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < w->merges; at = child) {
        if (child + 1 < w->merges && heap[child + 1].order < heap[child].order) child++;
        if (heap[child].order >= last.order) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return first;
}

/* Joins neighbours until no merge is left. A merge that was proposed for symbols that have changed since is dropped,
 * unless what is there now makes the same id. */
static int join(word *w) {
    struct cpa_bpe_symbol *symbols = w->memory->symbols;
    for (uint32_t i = 0; i + 1 < w->symbols; i++) {
        if (!propose(w, i)) return 0;
    }
    while (w->merges > 0) {
        const struct cpa_bpe_merge merge = take_first(w);
        const uint32_t left = (uint32_t)merge.order, right = symbols[left].next;
        if (symbols[left].is_gone || right == NOBODY) continue;
        const cpa_pair *pair = cpa_pair_table_find(&w->bpe->merges, symbols[left].id, symbols[right].id);
        if (!pair || pair->second != merge.id) continue;
        symbols[left].id = merge.id;
        symbols[left].next = symbols[right].next;
        symbols[right].is_gone = 1;
        if (symbols[left].next != NOBODY) symbols[symbols[left].next].previous = left;
        if (symbols[left].previous != NOBODY && !propose(w, symbols[left].previous)) return 0;
        if (symbols[left].next != NOBODY && !propose(w, left)) return 0;
    }
    return 1;
}

void cpa_bpe_memory_release(cpa_bpe_memory *memory) {
    free(memory->symbols);
    free(memory->heap);
    *memory = (cpa_bpe_memory){.symbols = NULL};
}

/* Where the part of a word ends that begins at `from`: in front of spaces, if no merge reaches over that, since short
 * parts take less time. */
static size_t part_end(const cpa_bpe *bpe, const char *text, size_t bytes, size_t from) {
    const char *at = text + from, *end = text + bytes;
    if (bpe->crosses_spaces || bpe->space_id == CPA_NO_ID) return bytes;
    while (at < end && begins_with_space(at, (size_t)(end - at))) at += SPACE_BYTES;
    at = at < end ? memmem(at, (size_t)(end - at), SPACE, SPACE_BYTES) : NULL;
    return at ? (size_t)(at - text) : bytes;
}

static int encode_part(const cpa_bpe *bpe, const char *text, size_t bytes, cpa_bpe_memory *memory,
                       cpa_token_list *out) {
    word w = {.bpe = bpe, .memory = memory};
    int ok = add_characters(&w, text, bytes) && join(&w);
    for (uint32_t i = 0; ok && w.symbols > 0 && i != NOBODY; i = memory->symbols[i].next)
        ok = cpa_token_list_add(out, memory->symbols[i].id);
    return ok;
}

cpa_status cpa_bpe_encode(const cpa_bpe *bpe, const char *text, size_t bytes, cpa_bpe_memory *memory,
                          cpa_token_list *out, cpa_error *err) {
    const uint32_t whole = bpe->ignore_merges ? cpa_vocabulary_find(&bpe->vocabulary, text, bytes) : CPA_NO_ID;
    int ok = whole == CPA_NO_ID || cpa_token_list_add(out, whole);
    for (size_t at = 0, end; ok && whole == CPA_NO_ID && at < bytes; at = end) {
        end = part_end(bpe, text, bytes, at);
        ok = encode_part(bpe, text + at, end - at, memory, out);
    }
    return ok ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for the ids of a word of %zu bytes", bytes);
}
