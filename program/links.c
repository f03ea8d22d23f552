#include "program/links.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add(cpa_link_group *group, const cpa_link *link) {
    if (group->pairs == 0 || link->nvlinks < group->fewest_nvlinks) group->fewest_nvlinks = link->nvlinks;
    if (link->nvlinks > group->most_nvlinks) group->most_nvlinks = link->nvlinks;
    group->pairs++;
    if (link->bandwidth <= 0) return;
    if (group->most <= 0 || link->bandwidth < group->least) group->least = link->bandwidth;
    if (link->bandwidth > group->most) group->most = link->bandwidth;
}

int cpa_links_group(const cpa_link *links, int32_t ranks, cpa_link_group groups[CPA_LINK_KINDS]) {
    int n = 0;
    for (int kind = 0; kind < CPA_LINK_KINDS; kind++) {
        cpa_link_group group = {.kind = (cpa_link_kind)kind};
        for (int32_t a = 0; a < ranks; a++) {
            for (int32_t b = a + 1; b < ranks; b++) {
                const cpa_link *link = &links[a * ranks + b];
                if ((int)link->kind == kind) add(&group, link);
            }
        }
        if (group.pairs > 0) groups[n++] = group;
    }
    return n;
}

/* "NVLink (18 links)". */
static void name_group(const cpa_link_group *g, char *out, size_t size) {
    const char *name = g->kind == CPA_LINK_UNKNOWN ? "an unknown link" : cpa_link_kind_name(g->kind);
    if (g->most_nvlinks == 0)
        snprintf(out, size, "%s", name);
    else if (g->fewest_nvlinks == g->most_nvlinks)
        snprintf(out, size, "%s (%d links)", name, g->most_nvlinks);
    else
        snprintf(out, size, "%s (%d to %d links)", name, g->fewest_nvlinks, g->most_nvlinks);
}

/* " at 1.20 to 1.31 GB/s each way"; nothing where no rate is known. */
static void rate_of(const cpa_link_group *g, char *out, size_t size) {
    char least[32], most[32];
    snprintf(least, sizeof least, "%.2f", g->least * 1e-9);
    snprintf(most, sizeof most, "%.2f", g->most * 1e-9);
    out[0] = 0;
    if (g->most > 0 && strcmp(least, most) == 0) snprintf(out, size, " at %s GB/s each way", most);
    if (g->most > 0 && strcmp(least, most) != 0) snprintf(out, size, " at %s to %s GB/s each way", least, most);
}

const char *cpa_links_describe(const char *transport, const cpa_link *links, int32_t ranks, char *out, size_t size) {
    cpa_link_group groups[CPA_LINK_KINDS];
    const int n = cpa_links_group(links, ranks, groups);
    int used = snprintf(out, size, "%s", transport);
    for (int i = 0; i < n && used >= 0 && (size_t)used < size; i++) {
        char name[64], rate[96];
        name_group(&groups[i], name, sizeof name);
        rate_of(&groups[i], rate, sizeof rate);
        const char *pairs = i ? "" : groups[i].pairs == 1 ? " pair of ranks joined" : " pairs of ranks joined";
        used += snprintf(out + used, size - (size_t)used, "%s %d%s by %s%s", i ? "," : ";", groups[i].pairs, pairs,
                         name, rate);
    }
    return out;
}

const char *cpa_links_variable(const char *transport, int i, const char **value) {
    static const struct {
        const char *transport, *name;
    } rows[] = {{"nccl", "NCCL_P2P_DISABLE"}, {"nccl", "NCCL_P2P_LEVEL"},     {"nccl", "NCCL_SHM_DISABLE"},
                {"nccl", "NCCL_NET"},         {"nccl", "NCCL_NET_PLUGIN"},    {"nccl", "NCCL_IB_DISABLE"},
                {"nccl", "NCCL_IB_HCA"},      {"nccl", "NCCL_SOCKET_IFNAME"}, {"mpi", "OMPI_MCA_pml"},
                {"mpi", "OMPI_MCA_btl"},      {"mpi", "OMPI_MCA_mtl"},        {"mpi", "UCX_TLS"}};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        *value = strcmp(rows[r].transport, transport) == 0 ? getenv(rows[r].name) : NULL;
        if (*value && i-- == 0) return rows[r].name;
    }
    return NULL;
}
