/* What the server answers, by path. */
#ifndef CPA_SERVER_ROUTES_H
#define CPA_SERVER_ROUTES_H

#include "server/http_exchange.h"

typedef struct cpa_route {
    const char *path; /* one that ends in '/' stands for all that begin so and go on */
    int is_open;      /* needs no API key */
    int is_probe;     /* served also where there are too many connections */
    int renders;      /* may render a chat */
    /* Of a POST: makes what it can of the body, on whatever thread, without the engine. */
    void (*prepare)(cpa_http_exchange *exchange);
    /* Called then, on the thread of the connection, and again each time when the connection, which it has suspended, is
     * resumed. */
    enum MHD_Result (*serve)(cpa_http_exchange *exchange);
} cpa_route;

/* The route of a path, or NULL. */
const cpa_route *cpa_route_find(const char *path);

#endif
