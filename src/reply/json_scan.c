#include "src/reply/json_scan.h"

#include <string.h>

static int is_space(char c) {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static cpa_json_step go(cpa_json_scan *scan, cpa_json_state state) {
    scan->state = state;
    return CPA_JSON_MORE;
}

static int in_object(const cpa_json_scan *scan) {
    const int d = scan->depth - 1;
    return (int)(scan->objects[d / 64] >> (d % 64) & 1);
}

static cpa_json_step open_one(cpa_json_scan *scan, int is_object) {
    const int d = scan->depth++;
    if (d == CPA_JSON_MOST_DEEP) return CPA_JSON_BROKEN;
    scan->objects[d / 64] &= ~((uint64_t)1 << (d % 64));
    scan->objects[d / 64] |= (uint64_t)is_object << (d % 64);
    return go(scan, is_object ? CPA_JSON_FIRST_KEY : CPA_JSON_FIRST_ITEM);
}

static cpa_json_step end_value(cpa_json_scan *scan) {
    return scan->depth == 0 ? CPA_JSON_WHOLE : go(scan, CPA_JSON_NEXT);
}

static cpa_json_step close_one(cpa_json_scan *scan, char byte) {
    if (byte != (in_object(scan) ? '}' : ']')) return CPA_JSON_BROKEN;
    scan->depth--;
    return end_value(scan);
}

static cpa_json_step begin_string(cpa_json_scan *scan, int is_key) {
    scan->is_key = is_key;
    return go(scan, CPA_JSON_STRING);
}

static cpa_json_step begin_word(cpa_json_scan *scan, const char *rest) {
    scan->word = rest;
    return go(scan, CPA_JSON_WORD);
}

static cpa_json_step begin_value(cpa_json_scan *scan, char byte) {
    switch (byte) {
        case '{': return open_one(scan, 1);
        case '[': return open_one(scan, 0);
        case '"': return begin_string(scan, 0);
    }
    if (scan->depth == 0) return CPA_JSON_BROKEN;
    switch (byte) {
        case 't': return begin_word(scan, "rue");
        case 'f': return begin_word(scan, "alse");
        case 'n': return begin_word(scan, "ull");
    }
    return byte == '-' || (byte >= '0' && byte <= '9') ? go(scan, CPA_JSON_NUMBER) : CPA_JSON_BROKEN;
}

static cpa_json_step next(cpa_json_scan *scan, char byte) {
    if (byte == ',') return go(scan, in_object(scan) ? CPA_JSON_KEY : CPA_JSON_VALUE);
    return close_one(scan, byte);
}

static cpa_json_step string_byte(cpa_json_scan *scan, char byte) {
    if (byte == '\\') return go(scan, CPA_JSON_ESCAPE);
    if ((unsigned char)byte < 0x20) return CPA_JSON_BROKEN;
    if (byte != '"') return CPA_JSON_MORE;
    return scan->is_key ? go(scan, CPA_JSON_COLON) : end_value(scan);
}

static cpa_json_step escape_byte(cpa_json_scan *scan, char byte) {
    scan->left = 4;
    if (byte == 'u') return go(scan, CPA_JSON_HEX);
    return byte && strchr("\"\\/bfnrt", byte) ? go(scan, CPA_JSON_STRING) : CPA_JSON_BROKEN;
}

static cpa_json_step hex_byte(cpa_json_scan *scan, char byte) {
    if (!byte || !strchr("0123456789abcdefABCDEF", byte)) return CPA_JSON_BROKEN;
    return --scan->left == 0 ? go(scan, CPA_JSON_STRING) : CPA_JSON_MORE;
}

static cpa_json_step word_byte(cpa_json_scan *scan, char byte) {
    if (byte != *scan->word) return CPA_JSON_BROKEN;
    return *++scan->word ? CPA_JSON_MORE : end_value(scan);
}

cpa_json_step cpa_json_scan_byte(cpa_json_scan *scan, char byte) {
    switch (scan->state) {
        case CPA_JSON_STRING: return string_byte(scan, byte);
        case CPA_JSON_ESCAPE: return escape_byte(scan, byte);
        case CPA_JSON_HEX: return hex_byte(scan, byte);
        case CPA_JSON_WORD: return word_byte(scan, byte);
        case CPA_JSON_NUMBER:
            if (byte && strchr("0123456789.eE+-", byte)) return CPA_JSON_MORE;
            scan->state = CPA_JSON_NEXT;
            break;
        default: break;
    }
    if (is_space(byte)) return CPA_JSON_MORE;
    switch (scan->state) {
        case CPA_JSON_FIRST_ITEM: return byte == ']' ? close_one(scan, byte) : begin_value(scan, byte);
        case CPA_JSON_FIRST_KEY:
            if (byte == '}') return close_one(scan, byte);
            return byte == '"' ? begin_string(scan, 1) : CPA_JSON_BROKEN;
        case CPA_JSON_KEY: return byte == '"' ? begin_string(scan, 1) : CPA_JSON_BROKEN;
        case CPA_JSON_COLON: return byte == ':' ? go(scan, CPA_JSON_VALUE) : CPA_JSON_BROKEN;
        case CPA_JSON_NEXT: return next(scan, byte);
        default: return begin_value(scan, byte);
    }
}
