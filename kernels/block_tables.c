/* Rows lie in ranges of powers of two, one behind the other in memory that doubles when it is full; a range that is left
 * goes to the next row that asks for its size. What changed is noted in lines of entries, which copy_blocks takes from
 * page-locked memory to their places. */
#include "kernels/block_tables.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/operators.h"

enum {
    LINE = 16,             /* entries that are brought to the device together */
    LEAST_RANGE = 64,      /* entries of a range */
    LEAST_CAPACITY = 4096, /* entries of a set */
    LEAST_LINES = 256,     /* of a staging */
    MOST_STEPS = 16        /* from row to row when it is asked what two of them have in common */
};
static const int64_t LINE_BYTES = LINE * (int64_t)sizeof(int32_t);

/* capacity 0: none. */
typedef struct range {
    int64_t place, capacity;
} range;

/* A row in one set. */
typedef struct entries {
    int64_t count;
    int32_t largest;
    int64_t like, alike; /* the row that it was compared with last, -1: none; and how many first entries are equal */
} entries;

typedef struct line {
    int64_t set, at; /* at: of the set's lines */
} line;

struct cpa_block_tables {
    cpa_device *device;
    int32_t sets;
    range *ranges;    /* [rows] */
    entries *entries; /* [rows, sets] */
    int64_t rows, ranges_capacity, entries_capacity;
    range *left; /* ranges that nobody has */
    int64_t n_left, left_capacity;
    int64_t used; /* entries of a set that have been in ranges */

    int64_t capacity;
    int32_t *host;      /* [sets, capacity] */
    int32_t *on_device; /* [sets, capacity] as the device has them; `host` itself where the device reads that */
    int64_t *owners;    /* [capacity / LEAST_RANGE]: the row whose range begins there; -1: none's */

    /* With memory of the device's own: what has changed since the last upload. */
    uint8_t *is_changed; /* [sets, lines of a set] */
    line *changed;
    int64_t n_changed, changed_capacity;
    int64_t (*pairs)[2]; /* [n_changed], scratch of an upload */
    int64_t pairs_capacity;
    int32_t *stagings[2]; /* page-locked, lines; in turn: one may be on its way while the next is written */
    int64_t staging_lines[2];
    int turn;
    int32_t *moved_from;    /* on_device before it last grew, if no upload came since; NULL: there is nothing to move */
    int64_t moved_capacity; /* entries of a set in moved_from */
};

static cpa_status no_memory(cpa_error *err, int64_t n) {
    return cpa_fail(err, CPA_NO_MEMORY, "block tables: no memory for %lld entries", (long long)n);
}

static entries *entries_of(cpa_table_set at, int64_t row) {
    return &at.tables->entries[row * at.tables->sets + at.set];
}

static int32_t *host_row(cpa_table_set at, int64_t row) {
    return at.tables->host + at.set * at.tables->capacity + at.tables->ranges[row].place;
}

/* ---- memory ---- */

/* Room for so many lines in the staging at hand. */
static cpa_status reserve_staging(cpa_block_tables *t, int64_t n, cpa_error *err) {
    const cpa_device_table *table = t->device->table;
    int64_t *lines = &t->staging_lines[t->turn], wanted = cpa_max64(*lines, LEAST_LINES);
    void *grown;
    while (wanted < n) wanted *= 2;
    if (wanted == *lines) return CPA_OK;
    CPA_TRY(table->alloc_host(t->device, wanted * LINE_BYTES, &grown, err));
    table->free_host(t->device, t->stagings[t->turn]);
    t->stagings[t->turn] = grown;
    *lines = wanted;
    return CPA_OK;
}

/* Notes the lines of entries [first, end) of a set, which change next: those that are written before a failure would
 * not come to the device. The first change since an upload takes the staging that is not on its way. */
static cpa_status note_changes(cpa_table_set at, int64_t first, int64_t end, cpa_error *err) {
    cpa_block_tables *t = at.tables;
    if (t->on_device == t->host || first == end) return CPA_OK;
    const int64_t n = t->n_changed + (end - 1) / LINE - first / LINE + 1;
    if (t->n_changed == 0) t->turn = !t->turn;
    if (!cpa_array_reserve(&t->changed, &t->changed_capacity, n, sizeof *t->changed) ||
        !cpa_array_reserve(&t->pairs, &t->pairs_capacity, n, sizeof *t->pairs))
        return no_memory(err, end - first);
    CPA_TRY(reserve_staging(t, n, err));
    for (int64_t i = first / LINE; i <= (end - 1) / LINE; i++) {
        uint8_t *is_changed = &t->is_changed[at.set * (t->capacity / LINE) + i];
        if (!*is_changed) t->changed[t->n_changed++] = (line){at.set, i};
        *is_changed = 1;
    }
    return CPA_OK;
}

/* From an array of so many bytes a set to a larger one. */
static void copy_sets(void *to, int64_t to_bytes, const void *from, int64_t from_bytes, int32_t sets) {
    for (int32_t set = 0; set < sets && from; set++)
        memcpy((char *)to + set * to_bytes, (const char *)from + set * from_bytes, (size_t)from_bytes);
}

static cpa_status move_on_device(cpa_block_tables *t, int64_t capacity, cpa_error *err) {
    void *memory;
    CPA_TRY(t->device->table->alloc(t->device, t->sets * capacity * (int64_t)sizeof(int32_t), &memory, err));
    if (!t->moved_from) {
        t->moved_from = t->on_device;
        t->moved_capacity = t->capacity;
    } else {
        t->device->table->retire(t->device, t->on_device);
    }
    t->on_device = memory;
    return CPA_OK;
}

static cpa_status grow(cpa_block_tables *t, int64_t least, cpa_error *err) {
    int64_t capacity = cpa_max64(t->capacity, LEAST_CAPACITY);
    while (capacity < least) capacity *= 2;
    if (capacity == t->capacity) return CPA_OK;
    const int on_host = !t->device->caps.own_memory;
    const int64_t bytes = capacity * (int64_t)sizeof(int32_t), lines = capacity / LINE;
    int32_t *host = calloc((size_t)(t->sets * capacity), sizeof *host);
    int64_t *owners = malloc((size_t)(capacity / LEAST_RANGE) * sizeof *owners);
    uint8_t *is_changed = calloc((size_t)(t->sets * lines), 1);
    cpa_status status = host && owners && is_changed ? CPA_OK : no_memory(err, t->sets * capacity);
    if (status == CPA_OK && !on_host) status = move_on_device(t, capacity, err);
    if (status != CPA_OK) {
        free(host);
        free(owners);
        free(is_changed);
        return status;
    }
    copy_sets(host, bytes, t->host, t->capacity * (int64_t)sizeof(int32_t), t->sets);
    copy_sets(is_changed, lines, t->is_changed, t->capacity / LINE, t->sets);
    for (int64_t i = 0; i < capacity / LEAST_RANGE; i++) owners[i] = i < t->capacity / LEAST_RANGE ? t->owners[i] : -1;
    free(t->host);
    free(t->owners);
    free(t->is_changed);
    t->host = host;
    t->owners = owners;
    t->is_changed = is_changed;
    t->capacity = capacity;
    if (on_host) t->on_device = host;
    return CPA_OK;
}

cpa_status cpa_block_tables_create(cpa_device *device, int32_t sets, cpa_block_tables **out, cpa_error *err) {
    cpa_block_tables *t = calloc(1, sizeof *t);
    if (!t) return no_memory(err, 0);
    t->device = device;
    t->sets = sets;
    const cpa_status status = grow(t, LEAST_CAPACITY, err);
    if (status != CPA_OK) {
        cpa_block_tables_destroy(t);
        return status;
    }
    *out = t;
    return CPA_OK;
}

void cpa_block_tables_destroy(cpa_block_tables *t) {
    if (!t) return;
    const cpa_device_table *table = t->device->table;
    if (t->moved_from) table->free(t->device, t->moved_from);
    if (t->on_device && t->on_device != t->host) table->free(t->device, t->on_device);
    for (int i = 0; i < 2; i++) table->free_host(t->device, t->stagings[i]);
    free(t->pairs);
    free(t->changed);
    free(t->is_changed);
    free(t->owners);
    free(t->host);
    free(t->left);
    free(t->entries);
    free(t->ranges);
    free(t);
}

/* ---- ranges ---- */

static cpa_status take_range(cpa_block_tables *t, int64_t capacity, range *out, cpa_error *err) {
    for (int64_t i = t->n_left; i-- > 0;) {
        if (t->left[i].capacity != capacity) continue;
        *out = t->left[i];
        t->left[i] = t->left[--t->n_left];
        return CPA_OK;
    }
    CPA_TRY(grow(t, t->used + capacity, err));
    *out = (range){t->used, capacity};
    t->used += capacity;
    return CPA_OK;
}

/* There is room: each range has been taken by a row before. */
static void leave_range(cpa_block_tables *t, int64_t row) {
    const range old = t->ranges[row];
    if (old.capacity == 0) return;
    t->owners[old.place / LEAST_RANGE] = -1;
    t->left[t->n_left++] = old;
    t->ranges[row] = (range){0, 0};
}

/* Brings the row to a range of so many entries, with those that it has. */
static cpa_status move_row(cpa_block_tables *t, int64_t row, int64_t count, cpa_error *err) {
    int64_t capacity = cpa_max64(t->ranges[row].capacity, LEAST_RANGE);
    range to;
    while (capacity < count) capacity *= 2;
    /* Ranges that are left, and the one that the row leaves some day, each begin at a place of their own. */
    if (!cpa_array_reserve(&t->left, &t->left_capacity, t->used / LEAST_RANGE + 2, sizeof *t->left))
        return no_memory(err, count);
    CPA_TRY(take_range(t, capacity, &to, err));
    for (int32_t set = 0; set < t->sets; set++) {
        const cpa_table_set at = {t, set};
        const int64_t held = entries_of(at, row)->count;
        const cpa_status status = note_changes(at, to.place, to.place + held, err);
        if (status != CPA_OK) {
            t->left[t->n_left++] = to;
            return status;
        }
        if (held > 0) memcpy(t->host + set * t->capacity + to.place, host_row(at, row), (size_t)held * sizeof *t->host);
    }
    leave_range(t, row);
    t->ranges[row] = to;
    t->owners[to.place / LEAST_RANGE] = row;
    return CPA_OK;
}

static cpa_status reserve_rows(cpa_block_tables *t, int64_t rows, cpa_error *err) {
    if (!cpa_array_reserve(&t->ranges, &t->ranges_capacity, rows, sizeof *t->ranges) ||
        !cpa_array_reserve(&t->entries, &t->entries_capacity, rows * t->sets, sizeof *t->entries))
        return no_memory(err, rows);
    for (; t->rows < rows; t->rows++) {
        t->ranges[t->rows] = (range){0, 0};
        for (int32_t set = 0; set < t->sets; set++)
            t->entries[t->rows * t->sets + set] = (entries){.largest = -1, .like = -1};
    }
    return CPA_OK;
}

/* ---- changes ---- */

/* Of a row, and of those that were compared with it, no more than the first n entries are as they were. */
static void forget_alike(cpa_table_set at, int64_t row, int64_t n) {
    for (int64_t i = 0; i < at.tables->rows; i++) {
        entries *other = entries_of(at, i);
        if (i == row || other->like == row) other->alike = cpa_min64(other->alike, n);
    }
}

cpa_status cpa_block_tables_append(cpa_table_set at, int64_t row, const int32_t *ids, int64_t n, int32_t none,
                                   cpa_error *err) {
    cpa_block_tables *t = at.tables;
    CPA_TRY(reserve_rows(t, row + 1, err));
    entries *of_row = entries_of(at, row);
    const int64_t first = of_row->count;
    if (n == 0) return CPA_OK;
    if (first + n > t->ranges[row].capacity) CPA_TRY(move_row(t, row, first + n, err));
    const int64_t place = t->ranges[row].place;
    CPA_TRY(note_changes(at, place + first, place + first + n, err));
    int32_t *to = host_row(at, row) + first;
    for (int64_t i = 0; i < n; i++) {
        to[i] = ids[i] < 0 ? none : ids[i];
        if (to[i] > of_row->largest) of_row->largest = to[i];
    }
    of_row->count += n;
    return CPA_OK;
}

void cpa_block_tables_cut(cpa_table_set at, int64_t row, int64_t count) {
    cpa_block_tables *t = at.tables;
    int64_t held = 0;
    if (row >= t->rows || count == entries_of(at, row)->count) return;
    forget_alike(at, row, count);
    entries_of(at, row)->count = count;
    if (count > 0) return;
    entries_of(at, row)->largest = -1;
    for (int32_t set = 0; set < t->sets; set++) held += entries_of((cpa_table_set){t, set}, row)->count;
    if (held == 0) leave_range(t, row);
}

cpa_status cpa_block_tables_replace(cpa_table_set at, int64_t row, int64_t entry, int32_t id, cpa_error *err) {
    const int64_t place = at.tables->ranges[row].place + entry;
    entries *of_row = entries_of(at, row);
    CPA_TRY(note_changes(at, place, place + 1, err));
    forget_alike(at, row, entry);
    host_row(at, row)[entry] = id;
    if (id > of_row->largest) of_row->largest = id;
    return CPA_OK;
}

cpa_status cpa_block_tables_give(cpa_table_set at, int64_t row, const int32_t *ids, int64_t n, cpa_error *err) {
    CPA_TRY(reserve_rows(at.tables, row + 1, err));
    const int64_t held = cpa_min64(entries_of(at, row)->count, n);
    const int32_t *own = host_row(at, row);
    int32_t largest = -1;
    int64_t same = 0;
    for (; same < held && own[same] == ids[same]; same++) largest = own[same] > largest ? own[same] : largest;
    cpa_block_tables_cut(at, row, same);
    entries_of(at, row)->largest = largest;
    return cpa_block_tables_append(at, row, ids + same, n - same, -1, err);
}

/* ---- what they are ---- */

int32_t cpa_block_tables_sets(const cpa_block_tables *t) {
    return t->sets;
}

int64_t cpa_block_tables_count(cpa_table_set at, int64_t row) {
    return row < at.tables->rows ? entries_of(at, row)->count : 0;
}

int64_t cpa_block_tables_place(const cpa_block_tables *t, int64_t row) {
    return row < t->rows ? t->ranges[row].place : 0;
}

int32_t cpa_block_tables_largest(cpa_table_set at, int64_t row) {
    return row < at.tables->rows ? entries_of(at, row)->largest : -1;
}

const int32_t *cpa_block_tables_host(cpa_table_set at) {
    return at.tables->host + at.set * at.tables->capacity;
}

const int32_t *cpa_block_tables_device(cpa_table_set at) {
    return at.tables->on_device + at.set * at.tables->capacity;
}

int64_t cpa_block_tables_capacity(const cpa_block_tables *t) {
    return t->capacity;
}

/* ---- the device ---- */

/* What was there before the tables moved comes along. */
static cpa_status bring_moved(cpa_block_tables *t, cpa_stream *stream) {
    const int64_t bytes = t->moved_capacity * (int64_t)sizeof(int32_t);
    if (!t->moved_from) return CPA_OK;
    CPA_TRY(t->device->table->copy_rows(t->on_device, t->capacity * (int64_t)sizeof(int32_t), t->moved_from, bytes,
                                        bytes, t->sets, stream));
    t->device->table->retire(t->device, t->moved_from);
    t->moved_from = NULL;
    return CPA_OK;
}

cpa_status cpa_block_tables_upload(cpa_block_tables *t, cpa_stream *stream) {
    const int64_t lines = t->capacity / LINE;
    int32_t *staging = t->stagings[t->turn];
    CPA_TRY(bring_moved(t, stream));
    if (t->n_changed == 0) return CPA_OK;
    for (int64_t i = 0; i < t->n_changed; i++) {
        const line changed = t->changed[i];
        memcpy(staging + i * LINE, t->host + changed.set * t->capacity + changed.at * LINE, (size_t)LINE_BYTES);
        t->is_changed[changed.set * lines + changed.at] = 0;
        t->pairs[i][0] = i;
        t->pairs[i][1] = changed.set * lines + changed.at;
    }
    const cpa_copy_blocks_args copy = {
        .src = {(char *)staging, LINE_BYTES, 0},
        .dst = {(char *)t->on_device, LINE_BYTES, 0},
        .bytes = LINE_BYTES,
        .layers = 1,
        .pairs = (const int64_t(*)[2])t->pairs,
        .n_pairs = t->n_changed,
    };
    t->n_changed = 0;
    return t->device->operators->copy_blocks(&copy, stream);
}

/* ---- what rows have in common ---- */

int64_t cpa_block_tables_row_at(const cpa_block_tables *t, int64_t place) {
    return place % LEAST_RANGE == 0 ? t->owners[place / LEAST_RANGE] : -1;
}

/* Both lead from row to row, by fewer and fewer entries, to one that others are compared with. */
int64_t cpa_block_tables_alike(cpa_table_set at, int64_t a, int64_t b) {
    int64_t from_a = INT64_MAX;
    for (int i = 0; i < MOST_STEPS && a >= 0; i++) {
        int64_t from_b = INT64_MAX, met = b;
        for (int j = 0; j < MOST_STEPS && met >= 0 && met != a; j++) {
            from_b = cpa_min64(from_b, entries_of(at, met)->alike);
            met = entries_of(at, met)->like;
        }
        if (met == a) return cpa_min64(from_a, from_b);
        from_a = cpa_min64(from_a, entries_of(at, a)->alike);
        a = entries_of(at, a)->like;
    }
    return 0;
}

void cpa_block_tables_found_alike(cpa_table_set at, int64_t row, int64_t other, int64_t n) {
    entries_of(at, row)->like = other;
    entries_of(at, row)->alike = n;
}
