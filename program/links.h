/* What joins the ranks, in words and figures. */
#ifndef CPA_PROGRAM_LINKS_H
#define CPA_PROGRAM_LINKS_H

#include <stddef.h>

#include <cpattn/engine.h>

/* The pairs of ranks that links of one kind join. */
typedef struct cpa_link_group {
    cpa_link_kind kind;
    int32_t pairs;
    int32_t fewest_nvlinks, most_nvlinks;
    double least, most; /* bandwidths, of the pairs that were measured; 0: none was */
} cpa_link_group;
enum { CPA_LINK_KINDS = CPA_LINK_RDMA + 1 };

/* Groups links[ranks, ranks], in the order of kinds; returns how many groups there are. */
int cpa_links_group(const cpa_link *links, int32_t ranks, cpa_link_group groups[CPA_LINK_KINDS]);

/* One line: what carries tensors, and by what kinds of links how many pairs of ranks are joined, at which rates. Returns
 * `out`. */
const char *cpa_links_describe(const char *transport, const cpa_link *links, int32_t ranks, char *out, size_t size);

/* The variables of this process's environment that tell the transport which links to use: the i-th that is set, and its
 * value; NULL: there are no more. */
const char *cpa_links_variable(const char *transport, int i, const char **value);

#endif
