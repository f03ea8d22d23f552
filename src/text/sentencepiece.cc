#include "src/text/sentencepiece.h"

#include <climits>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <sentencepiece_processor.h>

// No exception leaves a function: its callers are in C.

struct cpa_sentencepiece {
    sentencepiece::SentencePieceProcessor processor;
};

cpa_sentencepiece *cpa_sentencepiece_open(const char *path, char *why, size_t bytes) {
    try {
        auto model = std::make_unique<cpa_sentencepiece>();
        const auto status = model->processor.Load(path);
        if (status.ok()) return model.release();
        snprintf(why, bytes, "%s", status.error_message());
    } catch (const std::exception &exception) {
        snprintf(why, bytes, "%s", exception.what());
    }
    return nullptr;
}

void cpa_sentencepiece_close(cpa_sentencepiece *model) {
    delete model;
}

int64_t cpa_sentencepiece_count(const cpa_sentencepiece *model) {
    return model->processor.GetPieceSize();
}

const char *cpa_sentencepiece_piece(const cpa_sentencepiece *model, int64_t id, cpa_piece_kind *kind) {
    const auto &processor = model->processor;
    const int piece = static_cast<int>(id);
    *kind = processor.IsControl(piece)   ? CPA_PIECE_CONTROL
            : processor.IsUnknown(piece) ? CPA_PIECE_UNKNOWN
            : processor.IsByte(piece)    ? CPA_PIECE_BYTE
                                         : CPA_PIECE_NORMAL;
    return processor.IdToPiece(piece).c_str();
}

int cpa_sentencepiece_bos(const cpa_sentencepiece *model) {
    return model->processor.bos_id();
}

int cpa_sentencepiece_eos(const cpa_sentencepiece *model) {
    return model->processor.eos_id();
}

// Decodes a word behind one space and behind two: the model's own options are not for users of the library.
int cpa_sentencepiece_strips(const cpa_sentencepiece *model) {
    static const std::string space = "\xe2\x96\x81"; // U+2581
    const auto &processor = model->processor;
    const auto begins_with_space = [&](const std::vector<int> &ids) {
        const std::string text = processor.DecodeIds(ids);
        return text.empty() || text[0] == ' ';
    };
    try {
        int word = 0;
        while (word < processor.GetPieceSize()) {
            const std::string &piece = processor.IdToPiece(word);
            if (piece.size() > space.size() && piece.compare(0, space.size(), space) == 0) break;
            word++;
        }
        if (word == processor.GetPieceSize() || begins_with_space({word})) return 0;
        const int alone = processor.PieceToId(space);
        return processor.IsUnknown(alone) || begins_with_space({alone, word}) ? 1 : INT_MAX;
    } catch (const std::exception &) {
        return 0;
    }
}

int cpa_sentencepiece_encode(const cpa_sentencepiece *model, const char *text, size_t bytes,
                             int (*fn)(void *ctx, uint32_t id), void *ctx) {
    try {
        std::vector<int> ids;
        if (!model->processor.Encode({text, bytes}, &ids).ok()) return 0;
        for (const int id : ids) {
            if (!fn(ctx, static_cast<uint32_t>(id))) return 0;
        }
        return 1;
    } catch (const std::exception &) {
        return 0;
    }
}
