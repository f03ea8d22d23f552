#include "server/request_head.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

typedef struct head {
    const char *at, *end; /* rest of the head, behind the headers seen so far */
    int is_torn;          /* bytes that belong to no header stand between headers */
    int hosts, lengths, encodings;
    int others;   /* encodings other than chunked */
    int misnamed; /* such as "Content-Length ", which some read as if the space were not there */
} head;

/* A token of RFC 9110, section 5.6.2. */
static int is_header_name(const char *name) {
    static const char others[] = "!#$%&'*+-.^_`|~";
    for (const char *c = name; *c; c++) {
        if (!isalnum((unsigned char)*c) && !strchr(others, *c)) return 0;
    }
    return *name != 0;
}

/* Steps over the end of a line, of one or two bytes, in whose place libmicrohttpd writes zeros. */
static const char *skip_line_end(const char *at, const char *end) {
    for (int i = 0; i < 2 && at < end && *at == 0; i++) at++;
    return at;
}

/* Names and values lie where they came, each with a zero behind it. Where a line had one of its own, or goes on in the
 * next line, the name of the next header is not where this one ends. */
static void follow(head *h, const char *name, const char *value) {
    h->is_torn |= name != h->at || value < name || value >= h->end || strchr(value, '\r') != NULL;
    if (h->is_torn) return;
    for (const char *c = name + strlen(name) + 1; c < value; c++) h->is_torn |= *c != ' ' && *c != '\t';
    h->at = skip_line_end(value + strlen(value), h->end);
}

static enum MHD_Result see_header(void *ctx, enum MHD_ValueKind kind, const char *name, const char *value) {
    (void)kind;
    head *h = ctx;
    follow(h, name, value);
    h->misnamed += !is_header_name(name);
    h->hosts += strcasecmp(name, MHD_HTTP_HEADER_HOST) == 0;
    h->lengths += strcasecmp(name, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0;
    if (strcasecmp(name, MHD_HTTP_HEADER_TRANSFER_ENCODING) != 0) return MHD_YES;
    h->encodings++;
    h->others += !value || strcasecmp(value, "chunked") != 0;
    return MHD_YES;
}

static int refuse(cpa_refusal *refusal, const char *why) {
    return cpa_refuse(refusal, MHD_HTTP_BAD_REQUEST, NULL, NULL, "%s", why);
}

int cpa_request_head_check(struct MHD_Connection *connection, const char *method, const char *uri, size_t uri_bytes,
                           int is_odd, const char *version, cpa_refusal *refusal) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    if (!info || is_odd || uri != method + strlen(method) + 1 || version != uri + uri_bytes + 1)
        return refuse(refusal, "expected \"METHOD PATH VERSION\", of characters that such have");
    head h = {.end = method + info->header_size};
    h.at = skip_line_end(version + strlen(version), h.end);
    MHD_get_connection_values(connection, MHD_HEADER_KIND, see_header, &h);
    if (h.misnamed > 0)
        return refuse(refusal, "the name of a header has a space, or another character that no name has");
    if (h.is_torn || skip_line_end(h.at, h.end) != h.end)
        return refuse(refusal, "a header has a CR, a NUL, or a line that goes on in the next");
    if (h.hosts > 1 || (h.hosts == 0 && strcmp(version, MHD_HTTP_VERSION_1_0) != 0))
        return refuse(refusal, "expected one Host");
    if (h.lengths + h.encodings > 1 || h.others > 0)
        return refuse(refusal, "expected one Content-Length, or one \"Transfer-Encoding: chunked\"");
    return 1;
}
