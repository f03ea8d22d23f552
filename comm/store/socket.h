/* TCP connections: how they are made, and short blocking messages on them while ranks join. */
#ifndef CPA_STORE_SOCKET_H
#define CPA_STORE_SOCKET_H

#include <stdint.h>

#include <cpattn/status.h>

enum { CPA_ENDPOINT_ADDRESSES = 8, CPA_ADDRESS_BYTES = 64 };

/* Where a process listens: its addresses as text, the best first. */
typedef struct cpa_endpoint {
    char addresses[CPA_ENDPOINT_ADDRESSES][CPA_ADDRESS_BYTES];
    int32_t n_addresses;
    int32_t port;
} cpa_endpoint;

/* Listens at one address, the first of `host` that is of this host, or with NULL at every one; port 0: any. */
cpa_status cpa_socket_listen(const char *host, int32_t port, int *fd, cpa_error *err);
/* Where a socket is on this host: its address; of one that listens at every address all of them, loopback last. */
cpa_status cpa_endpoint_of(int fd, cpa_endpoint *out, cpa_error *err);
/* The address of the other end of a connection, as text. */
void cpa_socket_peer(int fd, char address[CPA_ADDRESS_BYTES]);

/* Deadlines are times of cpa_clock_now. All sockets are non-blocking ones without delay. */
/* Connects to the first address that answers, and tries again until the deadline. */
cpa_status cpa_socket_connect(const cpa_endpoint *to, double deadline, int *fd, cpa_error *err);
/* Takes a connection without waiting: *fd is -1 if there is none. CPA_NO_MEMORY: there is no room for one. */
cpa_status cpa_socket_take(int listener, int *fd, cpa_error *err);
cpa_status cpa_socket_send(int fd, const void *data, int64_t bytes, double deadline, cpa_error *err);
cpa_status cpa_socket_receive(int fd, void *data, int64_t bytes, double deadline, cpa_error *err);
/* Closes it unless it is -1, and sets it to -1. */
void cpa_socket_close(int *fd);

#endif
