/* Everything in libcpattn: communicators, operators, context attention and the engine. */
#ifndef CPATTN_CPATTN_H
#define CPATTN_CPATTN_H

#include <cpattn/api.h>
#include <cpattn/blocks.h>
#include <cpattn/comm.h>
#include <cpattn/compress.h>
#include <cpattn/constraint.h>
#include <cpattn/context.h>
#include <cpattn/device.h>
#include <cpattn/engine.h>
#include <cpattn/experts.h>
#include <cpattn/indexer.h>
#include <cpattn/latent.h>
#include <cpattn/model.h>
#include <cpattn/names.h>
#include <cpattn/ngram.h>
#include <cpattn/nn.h>
#include <cpattn/offload.h>
#include <cpattn/ops.h>
#include <cpattn/owner_map.h>
#include <cpattn/score.h>
#include <cpattn/selection.h>
#include <cpattn/sparse.h>
#include <cpattn/status.h>
#include <cpattn/topk.h>
#include <cpattn/types.h>
#include <cpattn/varlen.h>
#include <cpattn/xattn.h>

#endif
