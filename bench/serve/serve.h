/* `cp_attn bench serve`: a client that measures a server. */
#ifndef CPA_BENCH_SERVE_SERVE_H
#define CPA_BENCH_SERVE_SERVE_H

/* Runs `cp_attn bench serve [options]`; argv[0] is "serve". One process, without ranks and devices. `api_key` (or NULL)
 * is what the environment has for servers that ask for one. Prints; returns the exit code. */
int cpa_bench_serve_main(int argc, char **argv, const char *api_key);

#endif
