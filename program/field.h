/* One typed, bounded value that a user may write, as a row of a table: the settings of the program and the keys of a
 * model file are such tables. Parsing, bounds, messages and printing all come from the row. */
#ifndef CPA_PROGRAM_FIELD_H
#define CPA_PROGRAM_FIELD_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cpattn/status.h>

#define CPA_TEXT_BYTES 1024 /* of a CPA_FIELD_TEXT, its terminator included */

typedef enum cpa_field_type {
    CPA_FIELD_FLAG = 0, /* int64_t, 0 or 1; "true" or "false" */
    CPA_FIELD_INT,      /* int64_t */
    CPA_FIELD_REAL,     /* double */
    CPA_FIELD_CHOICE,   /* int64_t, index into choices */
    CPA_FIELD_TEXT,     /* char[CPA_TEXT_BYTES] */
    CPA_FIELD_LONG_TEXT /* char *, NULL = ""; of any length; set, it is freed and made anew; in the end who has the object frees it */
} cpa_field_type;

typedef struct cpa_field {
    const char *group;      /* heading in the help text */
    const char *name;       /* as in "block-size"; "_" may be written for "-" */
    const char *value_name; /* in the help text, as in "--requests N" */
    cpa_field_type type;
    size_t offset;              /* in the struct that holds the values */
    const char *initial;        /* default, as a user would write it; NULL: there is none */
    double min, max;            /* bounds of INT and REAL, included */
    const char *const *choices; /* choices of CHOICE; ends with NULL */
    const char *word;           /* INT and REAL: a word that stands for word_value; or NULL */
    double word_value;
    int power_of_two; /* INT: only powers of two */
    const char *help;
    int secret;        /* the value is not written into results, nor sent to other ranks */
    int early;         /* each rank reads it before it meets the others: not from a settings file */
    const char *alias; /* another name of the field; NULL: none */
    /* CHOICE: *name becomes the choice that another word stands for, or a word that is none of the choices.
     * CPA_UNSUPPORTED, err saying why, for a word that is known and stands for nothing; else CPA_INVALID. NULL: the
     * choices alone are known. */
    cpa_status (*named)(const char *text, const char **name, cpa_error *err);
} cpa_field;

/* Parses `text` into the field of `object`. Otherwise CPA_INVALID, "WHERE: found 'TEXT', expected ...", and the object
 * is left alone. CPA_NO_MEMORY. */
cpa_status cpa_field_set(const cpa_field *field, void *object, const char *where, const char *text, cpa_error *err);

/* Reads the option at argv[*i] into its field of `object`: --name VALUE, --name=VALUE, of a flag --name or --no-name
 * too. Moves *i to the last argument that it took; *out is the field. Otherwise CPA_INVALID, "PROGRAM: ...". */
cpa_status cpa_field_read_argument(const cpa_field *fields, int n_fields, const char *program, int argc, char **argv,
                                   int *i, void *object, const cpa_field **out, cpa_error *err);

/* Writes the value as a user would write it, shortened to the room there is. */
void cpa_field_format(const cpa_field *field, const void *object, char *out, size_t bytes);

/* The field of that name, or NULL. */
const cpa_field *cpa_field_find(const cpa_field *fields, int n_fields, const char *name, size_t name_length);

/* The field whose name is nearest to `name`, or NULL if none is near. */
const cpa_field *cpa_field_nearest(const cpa_field *fields, int n_fields, const char *name, size_t name_length);

/* Prints the lines of --help about a field: "--requests N" or "--algorithm auto|pass-kv|pass-q", what it is, and its
 * default in brackets if that is to be shown. */
void cpa_field_print_help(const cpa_field *field, int show_initial, FILE *out);

/* Prints text and a line end, broken after spaces and commas into lines of at most 100 columns; the first goes on at
 * column `at`, the others begin at `indent`. */
void cpa_text_wrap(const char *text, int at, int indent, FILE *out);

/* Copies text into one printable line, shortened to the room there is. */
void cpa_text_quote(const char *text, size_t length, char *out, size_t bytes);

#endif
