/* For check_schemas.py: reads constraints, one a line, and writes for each a line of JSON: {"refused": LINE}, or
 * {"answers": [...], "unfinished": n, "defects": n} of so many walks. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/grammar/walk.h"

int main(int argc, char **argv) {
    const long walks = argc > 1 ? strtol(argv[1], NULL, 10) : 4;
    cpa_walk_vocabulary vocabularies[2];
    if (!cpa_walk_vocabulary_make(&vocabularies[0], 0) || !cpa_walk_vocabulary_make(&vocabularies[1], 1)) return 1;
    char *line = NULL, *text = malloc(CPA_WALK_TEXT);
    size_t capacity = 0;
    for (ssize_t n; text && (n = getline(&line, &capacity, stdin)) > 0;) {
        if (line[n - 1] == '\n') line[n - 1] = 0;
        json_t *answers = json_array(), *out = json_object();
        int defects = 0, unfinished = 0;
        for (long w = 0; w < walks; w++) {
            cpa_error err;
            const cpa_walk_result result = cpa_walk(&vocabularies[w % 2], line, (uint64_t)w, text, &err);
            if (result == CPA_WALK_REFUSED) json_object_set_new(out, "refused", json_string(err.message));
            if (result == CPA_WALK_REFUSED) break;
            if (result == CPA_WALK_WHOLE) json_array_append_new(answers, json_string(text));
            unfinished += result == CPA_WALK_ENDLESS;
            if (result == CPA_WALK_DEAD_END || result == CPA_WALK_WRONG) {
                fprintf(stderr, "walk %ld ended with %d: %s\n    %.200s\n", w, (int)result, line, text);
                defects++;
            }
        }
        json_object_set_new(out, "answers", answers);
        json_object_set_new(out, "unfinished", json_integer(unfinished));
        json_object_set_new(out, "defects", json_integer(defects));
        json_dumpf(out, stdout, JSON_COMPACT);
        putchar('\n');
        fflush(stdout);
        json_decref(out);
    }
    free(line);
    free(text);
    for (int i = 0; i < 2; i++) cpa_walk_vocabulary_release(&vocabularies[i]);
    return 0;
}
