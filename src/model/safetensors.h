/* Tensors of the safetensors files of a folder, mapped into memory.
 *
 * The format: 8 bytes, little-endian, with the length n of the header; n bytes of JSON, an object whose keys are the
 * names of tensors and whose values are {"dtype", "shape", "data_offsets": [begin, end]}, beside an optional
 * "__metadata__"; then the data, which the tensors fill from end to end without holes
 * (https://huggingface.co/docs/safetensors). A folder has one file, model.safetensors, or several that
 * model.safetensors.index.json maps the names of tensors to. */
#ifndef CPA_SAFETENSORS_H
#define CPA_SAFETENSORS_H

#include <stddef.h>

#include <cpattn/shape.h>
#include <cpattn/status.h>

enum { CPA_TENSOR_MAX_DIMS = 8 };

typedef struct cpa_tensor {
    const char *name;
    int plain;       /* whether it is of a dtype below; else `type` says what the file calls its dtype */
    cpa_dtype dtype; /* CPA_F32, CPA_BF16 or CPA_F16 */
    const char *type;
    int32_t dims;
    int64_t shape[CPA_TENSOR_MAX_DIMS];
    int64_t elements, bytes;
    const void *data; /* in the file, row-major; aligned to nothing */
} cpa_tensor;

typedef struct cpa_safetensors cpa_safetensors;

/* Maps the files of a folder and checks all that their headers say against their lengths: names once, shapes that fit
 * their data, data that neither overlaps nor leaves the file. CPA_IO for what cannot be read, CPA_INVALID for what is
 * wrong. *out is set only on success; the files must stay as they are until it is closed. */
cpa_status cpa_safetensors_open(const char *folder, cpa_safetensors **out, cpa_error *err);
/* NULL does nothing. The tensors end with it. */
void cpa_safetensors_close(cpa_safetensors *files);

int64_t cpa_safetensors_count(const cpa_safetensors *files);
/* Tensor i of them, 0 <= i < count, in the order of their names. Any threads at once. */
const cpa_tensor *cpa_safetensors_at(const cpa_safetensors *files, int64_t i);
/* The tensor of that name, or NULL. Any threads at once. */
const cpa_tensor *cpa_safetensors_find(const cpa_safetensors *files, const char *name);

#endif
