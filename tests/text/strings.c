#include "tests/text/strings.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/hash.h"
#include "src/text/utf8.h"

typedef struct block {
    uint32_t first, count; /* code points */
} block;

typedef struct fragment {
    char text[64];
    size_t bytes;
} fragment;

enum { MAX_BLOCKS = 80, MAX_FRAGMENTS = 128 };

struct cpa_test_strings {
    uint64_t n_blocks, n_fragments;
    block blocks[MAX_BLOCKS];
    fragment fragments[MAX_FRAGMENTS];
};

static void need(int done) {
    if (done) return;
    fprintf(stderr, CPA_TEST_DATA "/text/strings.json: not as expected\n");
    abort();
}

static void read_blocks(cpa_test_strings *s, const json_t *blocks) {
    s->n_blocks = json_array_size(blocks);
    need(s->n_blocks > 0 && s->n_blocks <= MAX_BLOCKS);
    for (size_t b = 0; b < s->n_blocks; b++) {
        const json_t *ends = json_array_get(blocks, b);
        const json_int_t first = json_integer_value(json_array_get(ends, 0));
        const json_int_t last = json_integer_value(json_array_get(ends, 1));
        need(first > 0 && last >= first);
        s->blocks[b] = (block){(uint32_t)first, (uint32_t)(last - first + 1)};
    }
}

static void read_fragments(cpa_test_strings *s, const json_t *fragments) {
    s->n_fragments = json_array_size(fragments);
    need(s->n_fragments > 0 && s->n_fragments <= MAX_FRAGMENTS);
    for (size_t i = 0; i < s->n_fragments; i++) {
        const json_t *text = json_array_get(fragments, i);
        fragment *f = &s->fragments[i];
        f->bytes = json_string_length(text);
        need(f->bytes > 0 && f->bytes < sizeof f->text);
        memcpy(f->text, json_string_value(text), f->bytes);
    }
}

cpa_test_strings *cpa_test_strings_open(void) {
    cpa_test_strings *s = calloc(1, sizeof *s);
    json_t *json = json_load_file(CPA_TEST_DATA "/text/strings.json", JSON_ALLOW_NUL, NULL);
    need(s && json);
    read_blocks(s, json_object_get(json, "blocks"));
    read_fragments(s, json_object_get(json, "fragments"));
    json_decref(json);
    return s;
}

void cpa_test_strings_close(cpa_test_strings *strings) {
    free(strings);
}

static uint64_t below(uint64_t *random, uint64_t n) {
    *random += CPA_GOLDEN;
    return cpa_mix64(*random) % n;
}

size_t cpa_test_strings_make(const cpa_test_strings *s, int index, char out[CPA_TEST_STRING_BYTES]) {
    uint64_t random = cpa_mix64((uint64_t)index);
    size_t bytes = 0;
    for (uint64_t pieces = 1 + below(&random, 8); pieces > 0; pieces--) {
        const uint64_t kind = below(&random, 8);
        if (kind < 2) {
            const fragment *f = &s->fragments[below(&random, s->n_fragments)];
            memcpy(out + bytes, f->text, f->bytes);
            bytes += f->bytes;
        } else if (kind == 2) {
            for (uint64_t n = 1 + below(&random, 5); n > 0; n--) out[bytes++] = ' ';
        } else if (kind == 3) {
            for (uint64_t n = 1 + below(&random, 9); n > 0; n--) out[bytes++] = (char)('a' + below(&random, 26));
        } else {
            const block *from = &s->blocks[below(&random, s->n_blocks)];
            for (uint64_t n = 1 + below(&random, 7); n > 0; n--)
                bytes += cpa_utf8_write(from->first + (uint32_t)below(&random, from->count), out + bytes);
        }
    }
    return bytes;
}
