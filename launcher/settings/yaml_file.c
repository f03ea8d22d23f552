#include "launcher/settings/yaml_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/check.h"

/* Longer than any file of settings; what goes on for ever ends here. */
#define FILE_BYTES_MAX ((size_t)1 << 20)

/* A file as it is read: event by event, so that neither depth nor length costs more than what is accepted. */
typedef struct reader {
    const char *path;
    FILE *file;
    size_t bytes; /* read so far */
    yaml_parser_t parser;
    const cpa_field *fields;
    int n_fields;
    cpa_yaml_file out;
} reader;

static int line_of(const yaml_event_t *event) {
    return (int)event->start_mark.line + 1;
}

static const char *kind_of(const yaml_event_t *event) {
    switch (event->type) {
        case YAML_SEQUENCE_START_EVENT: return "a list";
        case YAML_MAPPING_START_EVENT: return "a mapping";
        case YAML_ALIAS_EVENT: return "an alias";
        default: return "a value";
    }
}

/* A yaml_read_handler_t. */
static int read_bytes(void *ctx, unsigned char *buffer, size_t size, size_t *n) {
    reader *r = ctx;
    *n = fread(buffer, 1, size, r->file);
    r->bytes += *n;
    return !ferror(r->file) && r->bytes <= FILE_BYTES_MAX;
}

static cpa_status syntax_error(const reader *r, cpa_error *err) {
    const yaml_parser_t *parser = &r->parser;
    if (parser->error == YAML_MEMORY_ERROR) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", r->path);
    if (r->bytes > FILE_BYTES_MAX)
        return cpa_fail(err, CPA_INVALID, "%s: found more than %zu bytes, expected a file of settings", r->path,
                        FILE_BYTES_MAX);
    int line = parser->error == YAML_READER_ERROR ? (int)parser->mark.line : (int)parser->problem_mark.line;
    return cpa_fail(err, CPA_INVALID, "%s:%d: found malformed YAML (%s), expected lines of 'name: value'", r->path,
                    line + 1, parser->problem ? parser->problem : "unreadable");
}

/* The next event, which the caller deletes unless this fails. */
static cpa_status next(reader *r, yaml_event_t *event, cpa_error *err) {
    return yaml_parser_parse(&r->parser, event) ? CPA_OK : syntax_error(r, err);
}

static cpa_status unknown_key(const reader *r, const yaml_event_t *key, cpa_error *err) {
    char found[64];
    const char *text = (const char *)key->data.scalar.value;
    size_t length = key->data.scalar.length;
    cpa_text_quote(text, length, found, sizeof found);
    const cpa_field *nearest = cpa_field_nearest(r->fields, r->n_fields, text, length);
    if (nearest) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: found unknown key '%s', expected '%s'?", r->path, line_of(key), found,
                        nearest->name);
    }
    return cpa_fail(err, CPA_INVALID, "%s:%d: found unknown key '%s', expected one like '%s'", r->path, line_of(key),
                    found, r->fields[0].name);
}

/* The field that a key names, for the first time. */
static cpa_status find_field(const reader *r, const yaml_event_t *key, const cpa_field **out, cpa_error *err) {
    if (key->type != YAML_SCALAR_EVENT) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: found %s as a key, expected a name", r->path, line_of(key),
                        kind_of(key));
    }
    *out = cpa_field_find(r->fields, r->n_fields, (const char *)key->data.scalar.value, key->data.scalar.length);
    if (!*out) return unknown_key(r, key, err);
    for (int i = 0; i < r->out.n_entries; i++) {
        if (r->out.entries[i].field == *out) {
            return cpa_fail(err, CPA_INVALID, "%s:%d: found '%s' again, expected it once (line %d)", r->path,
                            line_of(key), (*out)->name, r->out.entries[i].line);
        }
    }
    return CPA_OK;
}

static cpa_status add_entry(reader *r, const cpa_field *field, const yaml_event_t *value, cpa_error *err) {
    if (value->type != YAML_SCALAR_EVENT) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: %s: found %s, expected a single value", r->path, line_of(value),
                        field->name, kind_of(value));
    }
    const char *text = (const char *)value->data.scalar.value;
    if (strlen(text) != value->data.scalar.length) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: %s: found a value with a zero byte, expected text", r->path,
                        line_of(value), field->name);
    }
    char *copy = strdup(text);
    if (!copy) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", r->path);
    r->out.entries[r->out.n_entries++] = (cpa_yaml_entry){field, copy, line_of(value)};
    return CPA_OK;
}

/* The pairs of a mapping up to its end. */
static cpa_status read_pairs(reader *r, cpa_error *err) {
    r->out.entries = calloc((size_t)r->n_fields, sizeof *r->out.entries);
    if (!r->out.entries) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", r->path);
    for (;;) {
        yaml_event_t event;
        const cpa_field *field = NULL;
        CPA_TRY(next(r, &event, err));
        int ended = event.type == YAML_MAPPING_END_EVENT;
        cpa_status status = ended ? CPA_OK : find_field(r, &event, &field, err);
        yaml_event_delete(&event);
        if (ended || status != CPA_OK) return status;
        CPA_TRY(next(r, &event, err));
        status = add_entry(r, field, &event, err);
        yaml_event_delete(&event);
        CPA_TRY(status);
    }
}

/* The first event that has content, or the end of the stream; the caller deletes it. */
static cpa_status first_content(reader *r, yaml_event_t *event, cpa_error *err) {
    for (;;) {
        CPA_TRY(next(r, event, err));
        if (event->type != YAML_STREAM_START_EVENT && event->type != YAML_DOCUMENT_START_EVENT) return CPA_OK;
        yaml_event_delete(event);
    }
}

/* One document, a mapping, or nothing but comments. */
static cpa_status read_file(reader *r, cpa_error *err) {
    yaml_event_t event;
    CPA_TRY(first_content(r, &event, err));
    const yaml_event_type_t type = event.type;
    cpa_status status = CPA_OK;
    if (type != YAML_MAPPING_START_EVENT && type != YAML_STREAM_END_EVENT) {
        status = cpa_fail(err, CPA_INVALID, "%s:%d: found %s, expected lines of 'name: value'", r->path,
                          line_of(&event), kind_of(&event));
    }
    yaml_event_delete(&event);
    if (status != CPA_OK || type == YAML_STREAM_END_EVENT) return status;
    CPA_TRY(read_pairs(r, err));
    CPA_TRY(next(r, &event, err)); /* the end of the document */
    yaml_event_delete(&event);
    CPA_TRY(next(r, &event, err));
    if (event.type != YAML_STREAM_END_EVENT)
        status =
            cpa_fail(err, CPA_INVALID, "%s:%d: found a second document, expected the end", r->path, line_of(&event));
    yaml_event_delete(&event);
    return status;
}

/* Opens a file for reading; a folder does not count as one. NULL, with the reason in err, if there is none. */
static FILE *open_file(const char *path, cpa_error *err) {
    FILE *file = fopen(path, "rb");
    int probe = file ? getc(file) : EOF;
    if (!file || (probe == EOF && ferror(file))) {
        cpa_fail(err, CPA_INVALID, "%s: found no readable file (%s), expected YAML", path, strerror(errno));
        if (file) fclose(file);
        return NULL;
    }
    if (probe != EOF) ungetc(probe, file);
    return file;
}

cpa_status cpa_yaml_open(const char *path, const cpa_field *fields, int n_fields, cpa_yaml_file *out, cpa_error *err) {
    reader r = {.path = path, .file = open_file(path, err), .fields = fields, .n_fields = n_fields};
    if (!r.file) return CPA_INVALID;
    if (!yaml_parser_initialize(&r.parser)) {
        fclose(r.file);
        return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", path);
    }
    yaml_parser_set_input(&r.parser, read_bytes, &r);
    cpa_status status = read_file(&r, err);
    yaml_parser_delete(&r.parser);
    fclose(r.file);
    if (status == CPA_OK) {
        *out = r.out;
    } else {
        cpa_yaml_close(&r.out);
    }
    return status;
}

void cpa_yaml_close(cpa_yaml_file *file) {
    for (int i = 0; i < file->n_entries; i++) free(file->entries[i].value);
    free(file->entries);
    *file = (cpa_yaml_file){0};
}
