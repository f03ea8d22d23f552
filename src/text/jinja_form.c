#include "src/text/jinja_form.h"

#include <string.h>

static int put(cpa_bytes *out, const char *text) {
    return cpa_bytes_add(out, text, strlen(text));
}

static int is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* Whether what is written ends so; if so, it is taken back. */
static int take_back(cpa_bytes *out, const char *end) {
    const int64_t n = (int64_t)strlen(end);
    if (out->count < n || memcmp(out->data + out->count - n, end, (size_t)n) != 0) return 0;
    out->count -= n;
    return 1;
}

/* A string from its opening quote on, joined to one before; *at is then behind the closing one. */
static int put_string(const char **at, cpa_bytes *out) {
    const char quote = *(*at)++;
    int ok = take_back(out, "'+") || put(out, "'");
    for (; ok && **at && **at != quote; (*at)++) {
        if (**at == '\n') {
            ok = put(out, "\\n");
        } else if (**at == '\'') {
            ok = put(out, "\\'");
        } else if ((*at)[0] == '\\' && (*at)[1]) {
            ok = cpa_bytes_add(out, (*at)++, 2);
        } else {
            ok = cpa_bytes_add(out, *at, 1);
        }
    }
    if (**at) (*at)++;
    return ok && put(out, "'");
}

/* What is between "{{" or "{%" and its end. */
static int put_tag(const char **at, cpa_bytes *out) {
    const char close = (*at)[1] == '%' ? '%' : '}';
    int ok = cpa_bytes_add(out, *at, 2);
    *at += 2;
    if (**at == '-' || **at == '+') (*at)++;
    while (ok && **at) {
        if ((*at)[0] == close && (*at)[1] == '}') {
            take_back(out, "-");
            ok = cpa_bytes_add(out, *at, 2);
            *at += 2;
            return ok;
        }
        if (**at == '\'' || **at == '"') {
            ok = put_string(at, out);
        } else if (strncmp(*at, ".role", 5) == 0 || strncmp(*at, ".content", 8) == 0) {
            const int is_role = (*at)[1] == 'r';
            ok = put(out, is_role ? "['role']" : "['content']");
            *at += is_role ? 5 : 8;
        } else {
            ok = is_blank(**at) || cpa_bytes_add(out, *at, 1);
            (*at)++;
        }
    }
    return ok;
}

int cpa_jinja_form(const char *template_text, cpa_bytes *out) {
    const char *at = template_text;
    int ok = 1;
    while (ok && *at) {
        if (at[0] == '{' && (at[1] == '{' || at[1] == '%')) {
            const int puts_out = at[1] == '{';
            ok = put_tag(&at, out);
            if (ok && puts_out && *at == '\n') ok = put(out, "\n");
        } else if (at[0] == '{' && at[1] == '#') {
            const char *end = strstr(at, "#}");
            at = end ? end + 2 : at + strlen(at);
        } else {
            ok = is_blank(*at) || cpa_bytes_add(out, at, 1);
            at++;
        }
    }
    return ok && cpa_bytes_add(out, "", 1);
}
