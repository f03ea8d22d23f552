/* A model of a Hugging Face folder: answers a prompt as its text comes, and says how it ended.
 *
 *     ./llm FOLDER [PROMPT]
 *
 * One process, without MPI. A serving stack has a request for each of its clients, and one thread that reads them all by
 * cpa_llm_wait. */
#include <cpattn/llm.h>
#include <stdio.h>
#include <string.h>

static const char *reason_name(const cpa_llm_piece *piece) {
    switch (piece->reason) {
        case CPA_FINISH_LENGTH: return "length";
        case CPA_FINISH_STOP: return "stop";
        case CPA_FINISH_CANCELLED: return "cancelled";
        case CPA_FINISH_EXPIRED: return "expired";
        case CPA_FINISH_FAILED: break;
    }
    return piece->error;
}

/* Prints the answer piece by piece. */
static cpa_status print_answer(cpa_llm_request *request, cpa_error *err) {
    int64_t tokens = 0, prompt_tokens;
    (void)cpa_llm_prompt_ids(request, &prompt_tokens);
    for (;;) {
        cpa_llm_piece piece;
        cpa_status status = cpa_llm_next(request, -1, &piece, sizeof piece, err);
        if (status != CPA_OK) return status;
        fwrite(piece.text, 1, (size_t)piece.text_bytes, stdout);
        fflush(stdout);
        tokens += piece.n_tokens;
        if (!piece.has_ended) continue;
        printf("\n%lld tokens (%s) after %lld of the prompt\n", (long long)tokens, reason_name(&piece),
               (long long)prompt_tokens);
        return CPA_OK;
    }
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "llm: expected FOLDER [PROMPT]\n");
        return 2;
    }
    const char *text = argc > 2 ? argv[2] : "Hello";
    const cpa_llm_prompt prompt = {.size = sizeof prompt, .text = text, .text_bytes = (int64_t)strlen(text)};
    const cpa_llm_request_options options = {.size = sizeof options, .max_tokens = 24};
    cpa_llm *llm = NULL;
    cpa_llm_request *request = NULL;
    cpa_error err;
    cpa_status status = cpa_llm_open(argv[1], NULL, &llm, &err);
    if (status == CPA_OK) status = cpa_llm_submit(llm, &prompt, &options, &request, &err);
    if (status == CPA_OK) status = print_answer(request, &err);
    if (status != CPA_OK) fprintf(stderr, "llm: %s\n", err.message);
    cpa_llm_release(request);
    cpa_llm_close(llm);
    return status == CPA_OK ? 0 : 1;
}
