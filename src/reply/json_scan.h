/* One JSON value, byte by byte: where it ends, or stops being JSON. */
#ifndef CPA_REPLY_JSON_SCAN_H
#define CPA_REPLY_JSON_SCAN_H

#include <stdint.h>

enum { CPA_JSON_MOST_DEEP = 512 };

typedef enum cpa_json_state {
    CPA_JSON_VALUE = 0,
    CPA_JSON_FIRST_ITEM, /* or the end of an array */
    CPA_JSON_FIRST_KEY,  /* or the end of an object */
    CPA_JSON_KEY,
    CPA_JSON_COLON,
    CPA_JSON_NEXT, /* a comma, or the end of what it is in */
    CPA_JSON_STRING,
    CPA_JSON_ESCAPE,
    CPA_JSON_HEX,
    CPA_JSON_NUMBER, /* of whatever such characters */
    CPA_JSON_WORD
} cpa_json_state;

/* One of zeros is at the beginning. */
typedef struct cpa_json_scan {
    uint64_t objects[CPA_JSON_MOST_DEEP / 64]; /* bit d: what is open at depth d is one, else an array */
    int depth;                                 /* how many are open */
    cpa_json_state state;
    int is_key;       /* the string that is read, or was read last, is that of a member */
    int left;         /* hexadecimal digits */
    const char *word; /* what is left of true, false, null */
} cpa_json_scan;

typedef enum cpa_json_step { CPA_JSON_MORE = 0, CPA_JSON_WHOLE, CPA_JSON_BROKEN } cpa_json_step;

/* Takes a byte: CPA_JSON_WHOLE if the value ends with it, CPA_JSON_BROKEN if it is none of such a value; then the scan
 * is over. The value is an object, an array or a string: of others only what follows tells the end. UTF-8 is not
 * checked. */
cpa_json_step cpa_json_scan_byte(cpa_json_scan *scan, char byte);

#endif
