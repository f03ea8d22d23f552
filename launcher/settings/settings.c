#include "launcher/settings/settings.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/text.h"
#include "launcher/settings/settings_check.h"
#include "launcher/settings/settings_table.h"
#include "launcher/settings/yaml_file.h"
#include "program/commands.h"

/* What "auto" of --shutdown-timeout stands for where others wait for answers. */
#define SERVE_SHUTDOWN_S 30

static cpa_status unknown_option(const char *arg, size_t length, cpa_error *err) {
    char found[64];
    cpa_text_quote(arg, length, found, sizeof found);
    const cpa_field *nearest =
        length > 2 ? cpa_field_nearest(cpa_settings_rows, cpa_settings_n_rows, arg + 2, length - 2) : NULL;
    if (nearest) {
        return cpa_fail(err, CPA_INVALID, "found unknown option '%s', expected '--%s'? (--help lists all)", found,
                        nearest->name);
    }
    return cpa_fail(err, CPA_INVALID, "found unknown option '%s', expected one of those in --help", found);
}

/* Reads the option at argv[*i] into texts[field]; advances *i over a value that stands apart. */
static cpa_status read_option(int argc, char **argv, int *i, const char **texts, cpa_error *err) {
    const char *arg = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    if (strncmp(arg, "--", 2) != 0) {
        char found[64], commands[96];
        cpa_text_quote(arg, strlen(arg), found, sizeof found);
        return cpa_fail(err, CPA_INVALID, "found '%s', expected an option (--help lists them), %s", found,
                        cpa_commands_list("'", commands, sizeof commands));
    }
    const char *name = arg + 2;
    size_t length = strcspn(name, "=");
    const char *value = name[length] == '=' ? name + length + 1 : NULL;
    const cpa_field *field = cpa_field_find(cpa_settings_rows, cpa_settings_n_rows, name, length);
    if (!field && !value && length > 3 && strncmp(name, "no-", 3) == 0) {
        field = cpa_field_find(cpa_settings_rows, cpa_settings_n_rows, name + 3, length - 3);
        if (field && field->type != CPA_FIELD_FLAG) field = NULL;
        value = "false";
    }
    if (!field) return unknown_option(arg, length + 2, err);
    if (!value && field->type == CPA_FIELD_FLAG) value = "true";
    if (!value) {
        if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0) {
            return cpa_fail(err, CPA_INVALID, "--%s: found no value, expected one after it", field->name);
        }
        value = argv[++*i];
    }
    texts[field - cpa_settings_rows] = value;
    return CPA_OK;
}

static cpa_status set(cpa_settings *settings, int f, const char *where, const char *text, cpa_origin origin, int line,
                      cpa_error *err) {
    CPA_TRY(cpa_field_set(&cpa_settings_rows[f], settings, where, text, err));
    settings->source[f].origin = origin;
    settings->source[f].line = line;
    return CPA_OK;
}

static int is_path(const cpa_field *field) {
    return field->type == CPA_FIELD_TEXT &&
           (strcmp(field->value_name, "FILE") == 0 || strcmp(field->value_name, "DIR") == 0);
}

/* A path in the settings file means a file beside it, as `path` is relative to the folder of `config`. */
static cpa_status set_path(cpa_settings *settings, int f, const char *where, const char *path, int line,
                           cpa_error *err) {
    char joined[2 * CPA_TEXT_BYTES];
    const char *slash = strrchr(settings->config, '/');
    int folder = slash && path[0] != '/' && path[0] ? (int)(slash - settings->config) + 1 : 0;
    snprintf(joined, sizeof joined, "%.*s%s", folder, settings->config, path);
    return set(settings, f, where, joined, CPA_FROM_FILE, line, err);
}

static cpa_status read_file(cpa_settings *settings, cpa_error *err) {
    cpa_yaml_file file;
    CPA_TRY(cpa_yaml_open(settings->config, cpa_settings_rows, cpa_settings_n_rows, &file, err));
    cpa_status status = CPA_OK;
    for (int i = 0; i < file.n_entries && status == CPA_OK; i++) {
        const cpa_yaml_entry *entry = &file.entries[i];
        int f = (int)(entry->field - cpa_settings_rows);
        char where[CPA_TEXT_BYTES + 64];
        snprintf(where, sizeof where, "%s:%d: %s", settings->config, entry->line, entry->field->name);
        if (cpa_setting_is_action(entry->field)) {
            status = cpa_fail(err, CPA_INVALID, "%s: found in a file, expected on the command line only", where);
        } else if (entry->field->early) {
            status =
                cpa_fail(err, CPA_INVALID,
                         "%s: found in a file, expected in the command line or the environment of each rank", where);
        } else if (is_path(entry->field)) {
            status = set_path(settings, f, where, entry->value, entry->line, err);
        } else {
            status = set(settings, f, where, entry->value, CPA_FROM_FILE, entry->line, err);
        }
    }
    cpa_yaml_close(&file);
    return status;
}

/* CPATTN_BLOK_SIZE is more likely a mistake than somebody else's. */
static cpa_status unknown_variable(const char *variable, size_t length, cpa_error *err) {
    char shown[64], plain[64], nearest_name[64];
    cpa_text_quote(variable, length, shown, sizeof shown);
    const size_t prefix = sizeof CPA_VARIABLE_PREFIX - 1;
    size_t n = 0;
    for (; n + prefix < length && n < sizeof plain; n++) plain[n] = (char)tolower((unsigned char)variable[prefix + n]);
    const cpa_field *nearest = cpa_field_nearest(cpa_settings_rows, cpa_settings_n_rows, plain, n);
    if (!nearest || cpa_setting_is_action(nearest))
        return cpa_fail(err, CPA_INVALID, "%s: found an unknown variable, expected one named like an option of --help",
                        shown);
    cpa_setting_variable(nearest, nearest_name, sizeof nearest_name);
    return cpa_fail(err, CPA_INVALID, "%s: found an unknown variable, expected %s?", shown, nearest_name);
}

/* Whether a variable, `length` bytes of "NAME=value", is one that is read here or in the test suite. */
static int is_known_variable(const char *variable, size_t length) {
    static const char *const others[] = {"CPATTN_FAULT", "CPATTN_CONFIG", CPA_JOB_SECRET_VARIABLE};
    static const char tests[] = "CPATTN_TEST_";
    enum { OTHERS = sizeof others / sizeof others[0] };
    if (strncmp(variable, tests, sizeof tests - 1) == 0) return 1;
    for (int f = -OTHERS; f < cpa_settings_n_rows; f++) {
        char name[64];
        if (f >= 0) cpa_setting_variable(&cpa_settings_rows[f], name, sizeof name);
        const char *known = f < 0 ? others[f + OTHERS] : cpa_setting_is_action(&cpa_settings_rows[f]) ? "" : name;
        if (strlen(known) == length && strncmp(known, variable, length) == 0) return 1;
    }
    return 0;
}

static cpa_status check_variables(cpa_error *err) {
    for (char **variable = environ; *variable; variable++) {
        size_t length = strcspn(*variable, "=");
        if (strncmp(*variable, CPA_VARIABLE_PREFIX, sizeof CPA_VARIABLE_PREFIX - 1) != 0) continue;
        if (!is_known_variable(*variable, length)) return unknown_variable(*variable, length, err);
    }
    return CPA_OK;
}

static cpa_status read_environment(cpa_settings *settings, cpa_error *err) {
    CPA_TRY(check_variables(err));
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char name[64];
        cpa_setting_variable(&cpa_settings_rows[f], name, sizeof name);
        const char *text = cpa_setting_is_action(&cpa_settings_rows[f]) ? NULL : getenv(name);
        if (text && text[0]) CPA_TRY(set(settings, f, name, text, CPA_FROM_ENVIRONMENT, 0, err));
    }
    return CPA_OK;
}

static cpa_status read_command_line(cpa_settings *settings, const char *const *texts, cpa_error *err) {
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char where[64];
        snprintf(where, sizeof where, "--%s", cpa_settings_rows[f].name);
        if (texts[f]) CPA_TRY(set(settings, f, where, texts[f], CPA_FROM_COMMAND_LINE, 0, err));
    }
    return CPA_OK;
}

/* The values of *settings, which says which command it is, of `texts` from the command line and of all else. */
static cpa_status load(const char *const *texts, cpa_settings *settings, cpa_error *err) {
    for (int f = 0; f < cpa_settings_n_rows; f++)
        CPA_TRY(set(settings, f, "default", cpa_settings_rows[f].initial, CPA_FROM_DEFAULT, 0, err));
    const char *config = texts[cpa_settings_index("config")];
    if (!config) config = getenv("CPATTN_CONFIG");
    int stop_early = texts[cpa_settings_index("help")] || texts[cpa_settings_index("version")];
    if (config && !stop_early) {
        CPA_TRY(cpa_field_set(&cpa_settings_rows[cpa_settings_index("config")], settings, "--config", config, err));
        if (settings->config[0]) CPA_TRY(read_file(settings, err));
    }
    if (!stop_early) CPA_TRY(read_environment(settings, err));
    CPA_TRY(read_command_line(settings, texts, err));
    CPA_TRY(cpa_settings_check(settings, err));
    if (settings->shutdown_timeout < 0) settings->shutdown_timeout = settings->serve ? SERVE_SHUTDOWN_S : 0;
    return CPA_OK;
}

cpa_status cpa_settings_load(int argc, char **argv, cpa_settings *out, cpa_error *err) {
    cpa_settings settings = {0};
    const char *texts[CPA_SETTINGS_MAX] = {NULL};
    settings.generate = cpa_command_of(argc, argv) == CPA_COMMAND_GENERATE;
    settings.serve = cpa_command_of(argc, argv) == CPA_COMMAND_SERVE;
    for (int i = 1 + (settings.generate || settings.serve); i < argc; i++)
        CPA_TRY(read_option(argc, argv, &i, texts, err));
    const cpa_status status = load(texts, &settings, err);
    if (status == CPA_OK) {
        *out = settings;
    } else {
        cpa_settings_release(&settings);
    }
    return status;
}

/* Where a long text is; NULL for another field. */
static char **long_text(const cpa_field *field, const cpa_settings *settings) {
    if (field->type != CPA_FIELD_LONG_TEXT) return NULL;
    return (char **)((uintptr_t)settings + field->offset);
}

void cpa_settings_hide_secrets(cpa_settings *settings) {
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        const cpa_field *field = &cpa_settings_rows[f];
        if (field->secret) memset((char *)settings + field->offset, 0, CPA_TEXT_BYTES);
    }
}

void cpa_settings_receive(cpa_settings *settings) {
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char **text = long_text(&cpa_settings_rows[f], settings);
        if (text) *text = NULL;
    }
}

void cpa_settings_release(cpa_settings *settings) {
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char **text = long_text(&cpa_settings_rows[f], settings);
        if (text) free(*text);
    }
    cpa_settings_receive(settings);
}

static void print_usage(const cpa_settings *settings, FILE *out) {
    if (settings->serve || settings->generate) {
        cpa_command_print_usage(settings->serve ? CPA_COMMAND_SERVE : CPA_COMMAND_GENERATE, "usage: ", out);
        return;
    }
    char commands[96];
    for (int c = 0; c < CPA_COMMANDS; c++) cpa_command_print_usage((cpa_command)c, c ? "       " : "usage: ", out);
    fprintf(out, "       cp_attn COMMAND --help    options of %s\n", cpa_commands_list("", commands, sizeof commands));
}

void cpa_settings_print_help(const cpa_settings *settings, FILE *out) {
    const char *group = "";
    print_usage(settings, out);
    fprintf(out,
            "\n"
            "A value comes from the command line, else the environment (CPATTN_BLOCK_SIZE for --block-size),\n"
            "else the file of --config, else the default in brackets. --no-NAME turns a flag off.\n");
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        const cpa_field *field = &cpa_settings_rows[f];
        if (!cpa_setting_is_of_command(settings, field)) continue;
        if (strcmp(field->group, group) != 0) fprintf(out, "\n%s:\n", field->group);
        group = field->group;
        cpa_field_print_help(field, !cpa_setting_is_action(field), out);
    }
    fprintf(out,
            "\nExit codes: 0 done; 1 a check failed or a request was lost; 2 bad usage, configuration or input;\n"
            "3 a fault at run time; 130 or 143 stopped by SIGINT or SIGTERM.\n");
}

/* Prints text as it stands between double quotes in YAML; returns its length. */
static int print_escaped(const char *text, FILE *out) {
    const size_t length = strlen(text), most = 8 * length + 1; /* two bytes for one, and each then four */
    char *quoted = malloc(2 * length + 1), *line = malloc(most);
    size_t n = 0;
    int printed = 0;
    for (size_t i = 0; quoted && i < length; i++) {
        if (text[i] == '"' || text[i] == '\\') quoted[n++] = '\\';
        quoted[n++] = text[i];
    }
    if (quoted && line) {
        quoted[n] = 0;
        cpa_text_escape(quoted, line, most);
        printed = fprintf(out, "%s", line);
    }
    free(quoted);
    free(line);
    return printed;
}

/* Prints text as a YAML value, texts in double quotes; paths whole, so that they mean the same in any file. Returns its
 * length. */
static int print_value(const cpa_field *field, const char *text, FILE *out) {
    char folder[PATH_MAX];
    if (field->type != CPA_FIELD_TEXT && field->type != CPA_FIELD_LONG_TEXT) return fprintf(out, "%s", text);
    int n = fprintf(out, "\"");
    if (is_path(field) && text[0] && text[0] != '/' && getcwd(folder, sizeof folder)) {
        n += print_escaped(folder, out);
        n += fprintf(out, "/");
    }
    n += print_escaped(text, out);
    return n + fprintf(out, "\"");
}

void cpa_settings_print(const cpa_settings *settings, const char *auto_dtype, FILE *out) {
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        char text[CPA_TEXT_BYTES], name[64];
        if (cpa_setting_is_action(&cpa_settings_rows[f])) continue;
        cpa_origin origin = settings->source[f].origin;
        cpa_field_format(&cpa_settings_rows[f], settings, text, sizeof text);
        const int is_hidden = (cpa_settings_rows[f].secret && text[0]) || cpa_settings_rows[f].early;
        if (is_hidden) snprintf(text, sizeof text, "(not shown)");
        int width =
            fprintf(out, "%s%s: ", origin == CPA_FROM_DEFAULT || is_hidden ? "# " : "", cpa_settings_rows[f].name);
        char *const *whole = long_text(&cpa_settings_rows[f], settings);
        width += print_value(&cpa_settings_rows[f], whole && *whole && !is_hidden ? *whole : text, out);
        fprintf(out, "%*s # ", width < 42 ? 42 - width : 0, "");
        cpa_setting_variable(&cpa_settings_rows[f], name, sizeof name);
        switch (origin) {
            case CPA_FROM_DEFAULT: fprintf(out, "default"); break;
            case CPA_FROM_FILE:
                cpa_text_escape(settings->config, text, sizeof text);
                fprintf(out, "%s:%d", text, settings->source[f].line);
                break;
            case CPA_FROM_ENVIRONMENT: fprintf(out, "environment %s", name); break;
            case CPA_FROM_COMMAND_LINE: fprintf(out, "command line"); break;
        }
        if (f == cpa_settings_index("dtype") && settings->dtype == 0) fprintf(out, "; auto: %s", auto_dtype);
        fprintf(out, "\n");
    }
}
