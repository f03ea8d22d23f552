#include "src/grammar/string_formats.h"

#include <stddef.h>
#include <string.h>

/* RFC 3339, section 5.6, without leap seconds; dates of the Gregorian calendar from the year 1 on. */
#define YEAR "(?:\\d{3}[1-9]|\\d{2}[1-9]\\d|\\d[1-9]\\d{2}|[1-9]\\d{3})"
#define LEAP_YEAR                                                                                                      \
    "(?:\\d{2}(?:0[48]|[2468][048]|[13579][26])|"                                                                      \
    "(?:0[48]|[2468][048]|[13579][26])00)"
#define DATE                                                                                                           \
    "(?:" YEAR                                                                                                         \
    "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"                             \
    "02-(?:0[1-9]|1\\d|2[0-8]))|" LEAP_YEAR "-02-29)"
#define TIME                                                                                                           \
    "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?"                                                             \
    "(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"

/* RFC 3339, appendix A. */
#define N "\\d{1,9}"
#define DURATION_TIME "T(?:" N "H(?:" N "M(?:" N "S)?)?|" N "M(?:" N "S)?|" N "S)"
#define DURATION                                                                                                       \
    "P(?:" N "W|" DURATION_TIME "|(?:" N "Y(?:" N "M(?:" N "D)?)?|" N "M(?:" N "D)?|" N "D)(?:" DURATION_TIME ")?)"

/* RFC 1123 and RFC 5321: names of up to 7 labels, labels without two hyphens in a row (which have a meaning in IDNA). */
#define LABEL "[A-Za-z0-9]{1,10}(?:-[A-Za-z0-9]{1,10}){0,2}"
#define HOST LABEL "(?:\\." LABEL "){0,6}"
#define LOCAL_PART "[A-Za-z0-9_+-]{1,20}(?:\\.[A-Za-z0-9_+-]{1,20}){0,2}"

#define OCTET "(?:25[0-5]|2[0-4]\\d|1\\d{2}|[1-9]?\\d)"
#define IPV4 OCTET "(?:\\." OCTET "){3}"

/* RFC 4291, section 2.2, forms 1 and 2. */
#define H "[0-9A-Fa-f]{1,4}"
#define IPV6                                                                                                           \
    "(?:(?:" H ":){7}" H "|(?:" H ":){1,7}:|(?:" H ":){1,6}:" H "|(?:" H ":){1,5}(?::" H "){1,2}|(?:" H                \
    ":){1,4}(?::" H "){1,3}|(?:" H ":){1,3}(?::" H "){1,4}|(?:" H ":){1,2}(?::" H "){1,5}|" H ":(?::" H                \
    "){1,6}|:(?::" H "){1,7}|::)"

/* RFC 3986, without escapes. */
#define URI_CHARACTER "[A-Za-z0-9._~!$&'()*+,;=:@-]"
#define URI                                                                                                            \
    "[A-Za-z][A-Za-z0-9+.-]{0,15}://" HOST "(?::\\d{1,4})?(?:/" URI_CHARACTER                                          \
    "*)*"                                                                                                              \
    "(?:\\?(?:" URI_CHARACTER "|[/?])*)?(?:#(?:" URI_CHARACTER "|[/?])*)?"

const char *cpa_string_format(const char *name) {
    static const struct {
        const char *name, *expression;
    } formats[] = {
        {"date", DATE},
        {"time", TIME},
        {"date-time", DATE "T" TIME},
        {"duration", DURATION},
        {"email", LOCAL_PART "@" HOST},
        {"hostname", HOST},
        {"ipv4", IPV4},
        {"ipv6", IPV6},
        {"uri", URI},
        {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
        {"json-pointer", "(?:/(?:[^~/]|~[01])*)*"},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (strcmp(name, formats[i].name) == 0) return formats[i].expression;
    }
    return NULL;
}
