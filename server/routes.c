#include "server/routes.h"

#include <string.h>

#include "server/completions.h"
#include "server/status_routes.h"
#include "server/tokenize.h"

static const cpa_route routes[] = {
    {.path = "/live", .is_open = 1, .is_probe = 1, .serve = cpa_serve_live},
    {.path = "/health", .is_open = 1, .is_probe = 1, .serve = cpa_serve_health},
    {.path = "/version", .is_open = 1, .serve = cpa_serve_version},
    {.path = "/metrics", .is_open = 1, .serve = cpa_serve_metrics},
    {.path = "/status", .is_open = 1, .serve = cpa_serve_status_page},
    {.path = "/v1/completions", .prepare = cpa_prepare_completion, .serve = cpa_serve_generation},
    {.path = "/v1/chat/completions", .renders = 1, .prepare = cpa_prepare_chat, .serve = cpa_serve_generation},
    {.path = "/tokenize", .renders = 1, .prepare = cpa_prepare_tokens, .serve = cpa_serve_conversion},
    {.path = "/detokenize", .prepare = cpa_prepare_text, .serve = cpa_serve_conversion},
    {.path = "/v1/models", .serve = cpa_serve_models},
    {.path = "/v1/models/", .serve = cpa_serve_model},
};

static int matches(const cpa_route *route, const char *path) {
    const size_t bytes = strlen(route->path);
    if (route->path[bytes - 1] != '/') return strcmp(path, route->path) == 0;
    return strncmp(path, route->path, bytes) == 0 && path[bytes];
}

const cpa_route *cpa_route_find(const char *path) {
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (matches(&routes[i], path)) return &routes[i];
    }
    return NULL;
}
