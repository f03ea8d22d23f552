#include "launcher/settings/join_settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file.h"
#include "launcher/settings/settings.h"
#include "launcher/settings/settings_table.h"

static const char secret_variable[] = CPA_JOB_SECRET_VARIABLE;

/* The value of an option in the command line, the last one that is given; NULL: none. */
static const char *find_argument(int argc, char **argv, const cpa_field *field) {
    const char *found = NULL;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0) continue;
        const char *name = argv[i] + 2;
        const size_t length = strcspn(name, "=");
        if (cpa_field_find(cpa_settings_rows, cpa_settings_n_rows, name, length) != field) continue;
        if (name[length] == '=') {
            found = name + length + 1;
        } else if (i + 1 < argc) {
            found = argv[++i];
        }
    }
    return found;
}

/* Reads one setting into `out`, which is as its row says. */
static cpa_status read_setting(int argc, char **argv, const char *name, void *out, cpa_error *err) {
    const cpa_field *row = &cpa_settings_rows[cpa_settings_index(name)];
    cpa_field alone = *row;
    char where[64];
    alone.offset = 0;
    CPA_TRY(cpa_field_set(&alone, out, "default", row->initial, err));
    cpa_setting_variable(row, where, sizeof where);
    const char *text = getenv(where);
    const char *argument = find_argument(argc, argv, row);
    if (argument) {
        snprintf(where, sizeof where, "--%s", name);
        text = argument;
    }
    return text && text[0] ? cpa_field_set(&alone, out, where, text, err) : CPA_OK;
}

static cpa_status take_secret(const char *where, const char *text, cpa_join_settings *out, cpa_error *err) {
    enum { LEAST = 16 };
    const size_t length = strcspn(text, "\r\n");
    if (length < LEAST || length >= sizeof out->secret)
        return cpa_fail(err, CPA_INVALID, "%s: found %zu letters, expected %d to %zu, the same on all ranks", where,
                        length, LEAST, sizeof out->secret - 1);
    snprintf(out->secret, sizeof out->secret, "%.*s", (int)length, text);
    return CPA_OK;
}

static cpa_status read_secret_file(const char *path, cpa_join_settings *out, cpa_error *err) {
    char where[400], line[2 * CPA_JOB_SECRET_BYTES];
    const char *why = NULL;
    snprintf(where, sizeof where, "--job-secret-file: %.300s", path);
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, cpa_file_failure(CPA_INVALID), "%s: %s", where, why);
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
    return take_secret(where, line, out, err);
}

cpa_status cpa_join_settings_load(int argc, char **argv, cpa_join_settings *out, cpa_error *err) {
    cpa_join_settings read = {.secret = ""};
    char path[CPA_TEXT_BYTES];
    const char *given = getenv(secret_variable);
    CPA_TRY(read_setting(argc, argv, "join-timeout", &read.timeout_s, err));
    CPA_TRY(read_setting(argc, argv, "job-secret-file", path, err));
    if (path[0]) {
        CPA_TRY(read_secret_file(path, &read, err));
    } else if (given && given[0]) {
        CPA_TRY(take_secret(secret_variable, given, &read, err));
    }
    unsetenv(secret_variable); /* of no concern to processes that this one starts */
    *out = read;
    return CPA_OK;
}
