#include "src/reply/reply.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/reply/reply_calls.h"

cpa_status cpa_reply_open(const cpa_reply_options *options, cpa_reply **out, cpa_error *err) {
    cpa_reply *r = calloc(1, sizeof *r);
    if (!r) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a reply");
    r->options = *options;
    *out = r;
    return CPA_OK;
}

void cpa_reply_close(cpa_reply *r) {
    if (!r) return;
    cpa_reply_clear_call(r);
    for (int64_t i = 0; i < r->n_calls; i++) {
        free(r->calls[i].name);
        free(r->calls[i].id);
        cpa_bytes_release(&r->calls[i].arguments);
    }
    free(r->calls);
    cpa_bytes_release(&r->thoughts);
    cpa_bytes_release(&r->content);
    cpa_bytes_release(&r->held);
    cpa_bytes_release(&r->space);
    free(r);
}

static int is_space(char c) {
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static void add(cpa_reply *r, cpa_bytes *to, const char *text, int64_t bytes) {
    if (bytes > 0) r->is_out_of_memory |= !cpa_bytes_add(to, text, (size_t)bytes);
}

/* Adds to thoughts or content, but for what `drops_lines` says, and space at the end, which waits for more. */
static void tell(cpa_reply *r, cpa_bytes *to, const char *text, int64_t bytes) {
    if (bytes == 0) return; /* of an empty reply there is no text to point to */
    for (; r->drops_lines && bytes > 0 && *text == '\n'; text++) bytes--;
    int64_t solid = bytes;
    while (solid > 0 && is_space(text[solid - 1])) solid--;
    if (bytes > 0) r->drops_lines = 0;
    if (solid > 0) {
        add(r, to, r->space.data, r->space.count);
        r->space.count = 0;
        add(r, to, text, solid);
        r->has_text |= to == &r->content;
    }
    add(r, &r->space, text + solid, bytes - solid);
}

/* The place in the held text, from `at` on, where a mark stands, or where one may begin at its end; else its end. */
static int64_t find_mark(const cpa_reply *r, const char *mark, int *is_there) {
    const char *begin = r->held.data + r->at;
    const int64_t left = r->held.count - r->at;
    const size_t bytes = strlen(mark);
    const char *found = left > 0 && bytes > 0 ? memmem(begin, (size_t)left, mark, bytes) : NULL;
    *is_there = found != NULL;
    if (found) return found - r->held.data;
    int64_t part = bytes > 0 ? (int64_t)bytes - 1 : 0;
    if (part > left) part = left;
    while (part > 0 && memcmp(r->held.data + r->held.count - part, mark, (size_t)part) != 0) part--;
    return r->held.count - part;
}

/* Tells what stands in front of the mark. */
static cpa_reply_step tell_to_mark(cpa_reply *r, cpa_bytes *to, const char *mark, int *is_there) {
    const int64_t end = find_mark(r, mark, is_there);
    tell(r, to, r->held.data + r->at, end - r->at);
    r->at = end;
    cpa_reply_drop_read(r);
    return *is_there ? CPA_REPLY_GO_ON : CPA_REPLY_WAIT;
}

static cpa_reply_step go_to_text(cpa_reply *r) {
    cpa_reply_drop_read(r);
    r->place = CPA_REPLY_TEXT;
    return CPA_REPLY_GO_ON;
}

static cpa_reply_step go_to_thoughts(cpa_reply *r) {
    cpa_reply_drop_read(r);
    r->drops_lines = 1;
    r->place = CPA_REPLY_THOUGHTS;
    return CPA_REPLY_GO_ON;
}

/* Whether the model thinks. Space in front of that is left out. */
static cpa_reply_step begin(cpa_reply *r) {
    if (r->options.thoughts == CPA_THOUGHTS_NONE) return go_to_text(r);
    if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
    const int thinks = cpa_reply_takes(r, cpa_thought_form_begin(r->options.thoughts));
    if (thinks < 0) return CPA_REPLY_WAIT;
    if (thinks) return go_to_thoughts(r);
    r->at = 0;
    return r->options.thinks_already ? go_to_thoughts(r) : go_to_text(r);
}

static cpa_reply_step read_thoughts(cpa_reply *r) {
    const char *mark = cpa_thought_form_end(r->options.thoughts);
    int is_there;
    const cpa_reply_step step = tell_to_mark(r, &r->thoughts, mark, &is_there);
    if (!is_there) return step;
    r->at = (int64_t)strlen(mark);
    r->space.count = 0;
    r->drops_lines = 1;
    return go_to_text(r);
}

/* Llama's calls need no mark, if they are all of the text, or follow another. */
static cpa_reply_step read_text(cpa_reply *r) {
    const char *mark = cpa_tool_form_mark(r->options.tools);
    if (r->options.tools == CPA_TOOLS_LLAMA3 && !r->has_text && r->n_calls == 0) {
        if (!cpa_reply_skip_space(r)) return CPA_REPLY_WAIT;
        if (r->held.data[r->at] == '{') {
            r->place = CPA_REPLY_OPEN;
            return CPA_REPLY_GO_ON;
        }
        r->at = 0;
    }
    int is_there;
    const cpa_reply_step step = tell_to_mark(r, &r->content, mark, &is_there);
    if (!is_there) return step;
    r->at = (int64_t)strlen(mark);
    r->place = CPA_REPLY_OPEN;
    return step;
}

static cpa_reply_step step(cpa_reply *r) {
    switch (r->place) {
        case CPA_REPLY_BEGIN: return begin(r);
        case CPA_REPLY_THOUGHTS: return read_thoughts(r);
        case CPA_REPLY_TEXT: return read_text(r);
        case CPA_REPLY_OVER: r->held.count = r->at = 0; return CPA_REPLY_WAIT;
        default: return cpa_reply_step_call(r);
    }
}

/* What was held of a call that is none is text, and so is what follows. */
static void give_up_call(cpa_reply *r) {
    tell(r, &r->content, r->held.data, r->at);
    cpa_reply_clear_call(r);
    go_to_text(r);
}

static cpa_status read_on(cpa_reply *r, cpa_error *err) {
    for (;;) {
        const cpa_reply_step what = step(r);
        if (r->is_out_of_memory) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a reply");
        if (what == CPA_REPLY_NO_CALL) give_up_call(r);
        if (r->has_call) cpa_reply_drop_read(r);
        if (what == CPA_REPLY_WAIT) return CPA_OK;
    }
}

cpa_status cpa_reply_push(cpa_reply *r, const char *text, size_t bytes, cpa_error *err) {
    add(r, &r->held, text, (int64_t)bytes);
    return bytes > 0 ? read_on(r, err) : CPA_OK;
}

cpa_status cpa_reply_finish(cpa_reply *r, cpa_error *err) {
    if (r->is_finished) return CPA_OK;
    r->is_finished = 1;
    const int thinks = r->place == CPA_REPLY_THOUGHTS ||
                       (r->place == CPA_REPLY_BEGIN && r->options.thoughts && r->options.thinks_already);
    /* Behind a call may be a part of the mark of its end; what is held of one that is told is a part of nothing. */
    if (!r->has_call && r->place != CPA_REPLY_OVER && r->place != CPA_REPLY_CLOSE)
        tell(r, thinks ? &r->thoughts : &r->content, r->held.data, r->held.count);
    /* Space at the end belongs to text, but not behind a call. */
    if (!thinks && r->n_calls == 0) add(r, &r->content, r->space.data, r->space.count);
    r->held.count = r->at = r->space.count = 0;
    return r->is_out_of_memory ? cpa_fail(err, CPA_NO_MEMORY, "no memory for a reply") : CPA_OK;
}

const cpa_bytes *cpa_reply_thoughts(const cpa_reply *r) {
    return &r->thoughts;
}

const cpa_bytes *cpa_reply_content(const cpa_reply *r) {
    return &r->content;
}

const cpa_reply_call *cpa_reply_calls(const cpa_reply *r, int64_t *n) {
    *n = r->n_calls;
    return r->calls;
}

void cpa_reply_forget(cpa_reply *r) {
    r->thoughts.count = r->content.count = 0;
    for (int64_t i = 0; i < r->n_calls; i++) r->calls[i].arguments.count = 0;
}

int cpa_reply_is_over(const cpa_reply *r) {
    return r->place == CPA_REPLY_OVER;
}
