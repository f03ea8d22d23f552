#include "launcher/settings/api_keys_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/file.h"

enum { MOST_KEYS = 4096, MOST_BYTES = 255 };

/* The line without white space around it. */
static char *trim(char *line) {
    line += strspn(line, " \t");
    size_t bytes = strlen(line);
    while (bytes > 0 && strchr(" \t\r\n", line[bytes - 1])) bytes--;
    line[bytes] = 0;
    return line;
}

/* Visible characters of ASCII, which a header may have. */
static int is_key(const char *text) {
    for (const char *c = text; *c; c++) {
        if (*c <= ' ' || *c > '~') return 0;
    }
    return strlen(text) <= MOST_BYTES;
}

cpa_status cpa_api_keys_file_add(cpa_api_keys_file *file, const char *where, const char *key, cpa_error *err) {
    if (!is_key(key))
        return cpa_fail(err, CPA_INVALID, "%s: expected a key of up to %d visible ASCII characters", where, MOST_BYTES);
    for (int64_t i = 0; i < file->count; i++) {
        if (strcmp(file->keys[i], key) == 0)
            return cpa_fail(err, CPA_INVALID, "%s: found a key that an earlier line has, expected another", where);
    }
    if (file->count == MOST_KEYS)
        return cpa_fail(err, CPA_INVALID, "%s: found one key more, expected at most %d", where, MOST_KEYS);
    char *copy = strdup(key);
    if (!copy || !cpa_array_reserve(&file->keys, &file->capacity, file->count + 1, sizeof *file->keys)) {
        free(copy);
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for the keys", where);
    }
    file->keys[file->count++] = copy;
    return CPA_OK;
}

static cpa_status read_lines(FILE *in, const char *path, cpa_api_keys_file *file, cpa_error *err) {
    char *line = NULL, where[400];
    size_t room = 0;
    cpa_status status = CPA_OK;
    for (long number = 1; status == CPA_OK && getline(&line, &room, in) >= 0; number++) {
        const char *key = trim(line);
        snprintf(where, sizeof where, "--api-keys: %.300s, line %ld", path, number);
        if (*key && *key != '#') status = cpa_api_keys_file_add(file, where, key, err);
    }
    free(line);
    if (status == CPA_OK && ferror(in)) status = cpa_fail(err, CPA_INVALID, "--api-keys: %.300s cannot be read", path);
    if (status == CPA_OK && file->count == 0)
        status = cpa_fail(err, CPA_INVALID, "--api-keys: %.300s: found no key, expected one a line", path);
    return status;
}

cpa_status cpa_api_keys_file_read(const char *path, cpa_api_keys_file *out, cpa_error *err) {
    cpa_api_keys_file file = {NULL, 0, 0};
    const char *why = NULL;
    FILE *in = cpa_file_open(path, &why);
    if (!in) return cpa_fail(err, CPA_INVALID, "--api-keys: %.300s: %s", path, why);
    cpa_status status = read_lines(in, path, &file, err);
    fclose(in);
    if (status == CPA_OK) {
        *out = file;
    } else {
        cpa_api_keys_file_release(&file);
    }
    return status;
}

void cpa_api_keys_file_release(cpa_api_keys_file *file) {
    for (int64_t i = 0; i < file->count; i++) free(file->keys[i]);
    free(file->keys);
    *file = (cpa_api_keys_file){NULL, 0, 0};
}
