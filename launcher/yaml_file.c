#include "launcher/yaml_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/check.h"

static const char *text_of(const yaml_node_t *node) {
    return (const char *)node->data.scalar.value;
}

static int line_of(const yaml_node_t *node) {
    return (int)node->start_mark.line + 1;
}

static const char *kind_of(const yaml_node_t *node) {
    return node->type == YAML_SEQUENCE_NODE ? "a list" : node->type == YAML_MAPPING_NODE ? "a mapping" : "a value";
}

static cpa_status unknown_key(const char *path, const yaml_node_t *key, const cpa_field *fields, int n_fields,
                              cpa_error *err) {
    char found[64];
    size_t length = key->data.scalar.length;
    cpa_text_quote(text_of(key), length, found, sizeof found);
    const cpa_field *nearest = cpa_field_nearest(fields, n_fields, text_of(key), length);
    if (nearest) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: found unknown key '%s', expected '%s'?", path, line_of(key), found,
                        nearest->name);
    }
    return cpa_fail(err, CPA_INVALID, "%s:%d: found unknown key '%s', expected one like '%s'", path, line_of(key),
                    found, fields[0].name);
}

static cpa_status add_entry(const char *path, const yaml_node_t *key, const yaml_node_t *value, const cpa_field *fields,
                            int n_fields, cpa_yaml_file *file, cpa_error *err) {
    if (key->type != YAML_SCALAR_NODE) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: found %s as a key, expected a name", path, line_of(key),
                        kind_of(key));
    }
    const cpa_field *field = cpa_field_find(fields, n_fields, text_of(key), key->data.scalar.length);
    if (!field) return unknown_key(path, key, fields, n_fields, err);
    if (value->type != YAML_SCALAR_NODE) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: %s: found %s, expected a single value", path, line_of(value),
                        field->name, kind_of(value));
    }
    for (int i = 0; i < file->n_entries; i++) {
        if (file->entries[i].field == field) {
            return cpa_fail(err, CPA_INVALID, "%s:%d: found '%s' again, expected it once (line %d)", path, line_of(key),
                            field->name, file->entries[i].line);
        }
    }
    char *text = strdup(text_of(value));
    if (!text) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", path);
    file->entries[file->n_entries++] = (cpa_yaml_entry){field, text, line_of(value)};
    return CPA_OK;
}

static cpa_status read_mapping(const char *path, yaml_document_t *document, const cpa_field *fields, int n_fields,
                               cpa_yaml_file *file, cpa_error *err) {
    yaml_node_t *root = yaml_document_get_root_node(document);
    if (!root) return CPA_OK; /* nothing but comments */
    if (root->type != YAML_MAPPING_NODE) {
        return cpa_fail(err, CPA_INVALID, "%s:%d: found %s, expected lines of 'name: value'", path, line_of(root),
                        kind_of(root));
    }
    yaml_node_pair_t *first = root->data.mapping.pairs.start, *end = root->data.mapping.pairs.top;
    file->entries = calloc((size_t)(end - first) + 1, sizeof *file->entries);
    if (!file->entries) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", path);
    for (yaml_node_pair_t *pair = first; pair < end; pair++) {
        CPA_TRY(add_entry(path, yaml_document_get_node(document, pair->key),
                          yaml_document_get_node(document, pair->value), fields, n_fields, file, err));
    }
    return CPA_OK;
}

static cpa_status syntax_error(const char *path, const yaml_parser_t *parser, cpa_error *err) {
    if (parser->error == YAML_MEMORY_ERROR) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", path);
    int line = parser->error == YAML_READER_ERROR ? (int)parser->mark.line : (int)parser->problem_mark.line;
    return cpa_fail(err, CPA_INVALID, "%s:%d: found malformed YAML (%s), expected lines of 'name: value'", path,
                    line + 1, parser->problem ? parser->problem : "unreadable");
}

/* Checks that nothing follows the first document. */
static cpa_status read_end(const char *path, yaml_parser_t *parser, cpa_error *err) {
    yaml_document_t document;
    if (!yaml_parser_load(parser, &document)) return syntax_error(path, parser, err);
    int more = yaml_document_get_root_node(&document) != NULL;
    int line = (int)document.start_mark.line + 1;
    yaml_document_delete(&document);
    if (!more) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "%s:%d: found a second document, expected the end", path, line);
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
    cpa_yaml_file read = {0};
    yaml_parser_t parser;
    yaml_document_t document;
    FILE *file = open_file(path, err);
    if (!file) return CPA_INVALID;
    if (!yaml_parser_initialize(&parser)) {
        fclose(file);
        return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", path);
    }
    yaml_parser_set_input_file(&parser, file);
    cpa_status status;
    if (yaml_parser_load(&parser, &document)) {
        status = read_mapping(path, &document, fields, n_fields, &read, err);
        yaml_document_delete(&document);
        if (status == CPA_OK) status = read_end(path, &parser, err);
    } else {
        status = syntax_error(path, &parser, err);
    }
    yaml_parser_delete(&parser);
    fclose(file);
    if (status == CPA_OK) {
        *out = read;
    } else {
        cpa_yaml_close(&read);
    }
    return status;
}

void cpa_yaml_close(cpa_yaml_file *file) {
    for (int i = 0; i < file->n_entries; i++) free(file->entries[i].value);
    free(file->entries);
    *file = (cpa_yaml_file){0};
}
