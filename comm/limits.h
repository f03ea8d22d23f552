/* What communicators and their transports are made for. */
#ifndef CPA_COMM_LIMITS_H
#define CPA_COMM_LIMITS_H

enum { CPA_COMM_MAX_RANKS = 64 };

#endif
