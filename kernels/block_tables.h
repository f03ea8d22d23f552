/* Block tables that stay on the device from step to step. Each sequence has a row, whose entries name its blocks, in each
 * of the sets: those of layers whose keys lie in other blocks. A row lies at one place in all sets, and is changed on
 * the host; an upload brings to the device what has changed since the last one, so that a step's work does not grow with
 * what its sequences have. Used by one thread at a time. */
#ifndef CPA_KERNELS_BLOCK_TABLES_H
#define CPA_KERNELS_BLOCK_TABLES_H

#include "kernels/device.h"

typedef struct cpa_block_tables cpa_block_tables;

/* One of the sets; tables NULL: none. */
typedef struct cpa_table_set {
    cpa_block_tables *tables;
    int32_t set;
} cpa_table_set;

cpa_status cpa_block_tables_create(cpa_device *device, int32_t sets, cpa_block_tables **out, cpa_error *err);
void cpa_block_tables_destroy(cpa_block_tables *tables);

/* Changes of rows, which are numbered from 0 and are there when they are first used; without entries they take no room.
 * They may be made while the attends of the last upload run, once those of the one before are done. An append allocates
 * where rows have never been so long; places of rows and the arrays below may be others after it. */

/* Adds n entries behind those of a row; an id below 0 becomes `none`. */
cpa_status cpa_block_tables_append(cpa_table_set at, int64_t row, const int32_t *ids, int64_t n, int32_t none,
                                   cpa_error *err);
/* Leaves the first `count` entries, of at least so many. */
void cpa_block_tables_cut(cpa_table_set at, int64_t row, int64_t count);
/* Changes an entry that the row has. */
cpa_status cpa_block_tables_replace(cpa_table_set at, int64_t row, int64_t entry, int32_t id, cpa_error *err);
/* The row becomes these entries; those up to the first that differs stay. */
cpa_status cpa_block_tables_give(cpa_table_set at, int64_t row, const int32_t *ids, int64_t n, cpa_error *err);

int32_t cpa_block_tables_sets(const cpa_block_tables *tables);
int64_t cpa_block_tables_count(cpa_table_set at, int64_t row);
/* Where the entries of a row begin in each set; 0 of a row without any. */
int64_t cpa_block_tables_place(const cpa_block_tables *tables, int64_t row);
/* No entry of the row is larger, and one is or was since the row was empty or given; -1: it has none. */
int32_t cpa_block_tables_largest(cpa_table_set at, int64_t row);

/* The entries of a set: on the host, [cpa_block_tables_capacity], and where an attend reads them, which on a device is
 * as the last upload left it. */
const int32_t *cpa_block_tables_host(cpa_table_set at);
const int32_t *cpa_block_tables_device(cpa_table_set at);
int64_t cpa_block_tables_capacity(const cpa_block_tables *tables);

/* Enqueues what brings the changes to the device, behind all attends that read the tables so far. */
cpa_status cpa_block_tables_upload(cpa_block_tables *tables, cpa_stream *stream);

/* ---- what rows have in common, for who looks for shared blocks each step (kernels/cascade.h) ---- */

/* The row whose entries begin at a place; -1: none do. */
int64_t cpa_block_tables_row_at(const cpa_block_tables *tables, int64_t place);
/* How many first entries of two rows are known to be equal; there may be more. */
int64_t cpa_block_tables_alike(cpa_table_set at, int64_t a, int64_t b);
/* The first n entries of a row were found to be those of `other`; this takes the place of what was found of it before.
 * other -1: it is one that others are compared with, to which what was found of these leads. */
void cpa_block_tables_found_alike(cpa_table_set at, int64_t row, int64_t other, int64_t n);

#endif
