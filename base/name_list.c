#include "base/name_list.h"

#include <string.h>

static const char between[] = ", ";

/* The length of the first name of a list. */
static size_t name_length(const char *list) {
    const char *end = strstr(list, between);
    return end ? (size_t)(end - list) : strlen(list);
}

/* Behind the first name of a list. */
static const char *next_name(const char *list) {
    const char *end = list + name_length(list);
    return *end ? end + strlen(between) : end;
}

static int has_name(const char *list, const char *name, size_t length) {
    for (; *list; list = next_name(list))
        if (name_length(list) == length && memcmp(list, name, length) == 0) return 1;
    return 0;
}

void cpa_name_list_add(char *list, size_t bytes, const char *names) {
    for (; *names; names = next_name(names)) {
        const size_t length = name_length(names), used = strlen(list), gap = used > 0 ? strlen(between) : 0;
        if (has_name(list, names, length) || used + gap + length >= bytes) continue;
        memcpy(list + used, between, gap);
        memcpy(list + used + gap, names, length);
        list[used + gap + length] = 0;
    }
}
