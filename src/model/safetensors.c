#include "src/model/safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/check.h"
#include "base/file.h"
#include "base/json_file.h"

/* The header's own bound in the format. */
#define MAX_HEADER_BYTES 100000000
#define MAX_FILES 4096
#define MAX_TENSOR_BYTES ((int64_t)1 << 50)
#define LENGTH_BYTES 8

/* A mapped file, and its header, whose texts the tensors point into. */
typedef struct mapped_file {
    char *name;
    void *memory;
    int64_t bytes;
    json_t *header;
} mapped_file;

struct cpa_safetensors {
    mapped_file *files;
    int64_t n_files, cap_files;
    cpa_tensor *tensors; /* by name */
    int64_t n_tensors, cap_tensors;
};

typedef struct element_type {
    const char *name;
    int32_t bytes;
    int plain;
    cpa_dtype dtype;
} element_type;

static const element_type types[] = {
    {"F32", 4, 1, CPA_F32},     {"BF16", 2, 1, CPA_BF16},   {"F16", 2, 1, CPA_F16},  {"F64", 8, 0, CPA_F32},
    {"I64", 8, 0, CPA_F32},     {"I32", 4, 0, CPA_F32},     {"I16", 2, 0, CPA_F32},  {"I8", 1, 0, CPA_F32},
    {"U64", 8, 0, CPA_F32},     {"U32", 4, 0, CPA_F32},     {"U16", 2, 0, CPA_F32},  {"U8", 1, 0, CPA_F32},
    {"F8_E4M3", 1, 0, CPA_F32}, {"F8_E5M2", 1, 0, CPA_F32}, {"BOOL", 1, 0, CPA_F32},
};

static const element_type *find_type(const char *name) {
    for (size_t i = 0; name && i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, name) == 0) return &types[i];
    return NULL;
}

static cpa_status map_file(const char *path, mapped_file *file, cpa_error *err) {
    struct stat info;
    const char *why;
    FILE *opened = cpa_file_open(path, &why);
    if (!opened) return cpa_fail(err, cpa_file_failure(CPA_IO), "%s: %s", path, why);
    cpa_status status = CPA_OK;
    void *memory = MAP_FAILED;
    if (fstat(fileno(opened), &info) != 0) {
        status = cpa_fail(err, cpa_file_failure(CPA_IO), "%s: %s", path, strerror(errno));
    } else if (info.st_size <= LENGTH_BYTES) {
        status = cpa_fail(err, CPA_INVALID, "%s: found %lld bytes, expected a file with a header of safetensors", path,
                          (long long)info.st_size);
    } else if ((memory = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fileno(opened), 0)) == MAP_FAILED) {
        status = cpa_fail(err, cpa_file_failure(CPA_IO), "%s: %s", path, strerror(errno));
    }
    fclose(opened);
    if (status != CPA_OK) return status;
    file->memory = memory;
    file->bytes = info.st_size;
    return CPA_OK;
}

/* Parses the header; *data_at is where the data begins. */
static cpa_status read_header(const char *path, mapped_file *file, int64_t *data_at, cpa_error *err) {
    const unsigned char *bytes = file->memory;
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) length = length << 8 | bytes[i];
    if (length > MAX_HEADER_BYTES || (int64_t)length > file->bytes - LENGTH_BYTES) {
        return cpa_fail(err, CPA_INVALID,
                        "%s: the header has %llu bytes, the file %lld: it is no safetensors file, or cut", path,
                        (unsigned long long)length, (long long)file->bytes);
    }
    json_error_t error;
    const cpa_status parsed = cpa_json_parse((const char *)bytes + LENGTH_BYTES, (size_t)length, JSON_REJECT_DUPLICATES,
                                             &file->header, &error);
    if (parsed == CPA_NO_MEMORY) return cpa_fail(err, parsed, "%s: no memory for the header", path);
    if (parsed != CPA_OK) return cpa_fail(err, parsed, "%s: header: %s", path, error.text);
    if (!json_is_object(file->header)) return cpa_fail(err, CPA_INVALID, "%s: the header is no object", path);
    *data_at = LENGTH_BYTES + (int64_t)length;
    return CPA_OK;
}

/* Fills the shape and the number of elements; 0 if the value is no shape. */
static int read_shape(const json_t *value, cpa_tensor *tensor) {
    if (!json_is_array(value) || json_array_size(value) > CPA_TENSOR_MAX_DIMS) return 0;
    tensor->dims = (int32_t)json_array_size(value);
    tensor->elements = 1;
    for (int32_t i = 0; i < tensor->dims; i++) {
        const json_t *dim = json_array_get(value, (size_t)i);
        int64_t n = json_integer_value(dim);
        if (!json_is_integer(dim) || n < 0 || n > MAX_TENSOR_BYTES) return 0;
        if (n > 0 && tensor->elements > MAX_TENSOR_BYTES / n) return 0;
        tensor->shape[i] = n;
        tensor->elements *= n;
    }
    return 1;
}

/* One entry of a header. The file's name is in every message. */
static cpa_status read_tensor(const char *path, const mapped_file *file, int64_t data_at, const char *name,
                              const json_t *entry, cpa_tensor *out, cpa_error *err) {
    const json_t *type_name = json_object_get(entry, "dtype"), *offsets = json_object_get(entry, "data_offsets");
    const element_type *type = find_type(json_string_value(type_name));
    *out = (cpa_tensor){.name = name};
    if (!type) return cpa_fail(err, CPA_INVALID, "%s: %s: found no dtype that is known", path, name);
    if (!read_shape(json_object_get(entry, "shape"), out)) {
        return cpa_fail(err, CPA_INVALID, "%s: %s: found no shape of up to %d dimensions", path, name,
                        CPA_TENSOR_MAX_DIMS);
    }
    out->plain = type->plain;
    out->dtype = type->dtype;
    out->type = type->name;
    out->bytes = out->elements * type->bytes;
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    int64_t first = json_integer_value(begin), last = json_integer_value(end);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) || first < 0 ||
        last < first || last > file->bytes - data_at || last - first != out->bytes) {
        return cpa_fail(err, CPA_INVALID,
                        "%s: %s: its data lies at [%lld, %lld) of %lld bytes, its shape has %lld of them", path, name,
                        (long long)first, (long long)last, (long long)(file->bytes - data_at), (long long)out->bytes);
    }
    out->data = (const char *)file->memory + data_at + first;
    return CPA_OK;
}

static int compare_places(const void *a, const void *b) {
    const cpa_tensor *left = a, *right = b;
    if (left->data != right->data) return (const char *)left->data < (const char *)right->data ? -1 : 1;
    return (left->bytes > right->bytes) - (left->bytes < right->bytes); /* empty ones first */
}

static int compare_names(const void *a, const void *b) {
    return strcmp(((const cpa_tensor *)a)->name, ((const cpa_tensor *)b)->name);
}

/* The tensors of a file from end to end: whatever overlaps, is missing or is cut shows. */
static cpa_status check_places(const char *path, const mapped_file *file, int64_t data_at, cpa_tensor *tensors,
                               int64_t n, cpa_error *err) {
    const char *at = (const char *)file->memory + data_at, *end = (const char *)file->memory + file->bytes;
    if (n > 0) qsort(tensors, (size_t)n, sizeof *tensors, compare_places);
    for (int64_t i = 0; i < n; i++) {
        if (tensors[i].data != at) {
            return cpa_fail(err, CPA_INVALID,
                            "%s: the data of %s begins at %lld, expected %lld, where that before it ends", path,
                            tensors[i].name, (long long)((const char *)tensors[i].data - (const char *)file->memory),
                            (long long)(at - (const char *)file->memory));
        }
        at += tensors[i].bytes;
    }
    if (at == end) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "%s: found %lld bytes behind the last tensor, expected none", path,
                    (long long)(end - at));
}

static cpa_status add_tensors(cpa_safetensors *files, const char *path, const mapped_file *file, int64_t data_at,
                              cpa_error *err) {
    const int64_t first = files->n_tensors;
    void *position = json_object_iter(file->header);
    for (; position; position = json_object_iter_next(file->header, position)) {
        const char *name = json_object_iter_key(position);
        if (strcmp(name, "__metadata__") == 0) continue;
        if (!cpa_array_reserve(&files->tensors, &files->cap_tensors, files->n_tensors + 1, sizeof *files->tensors))
            return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for its tensors", path);
        CPA_TRY(read_tensor(path, file, data_at, name, json_object_iter_value(position),
                            &files->tensors[files->n_tensors], err));
        files->n_tensors++;
    }
    cpa_tensor *own = files->n_tensors > first ? files->tensors + first : NULL;
    return check_places(path, file, data_at, own, files->n_tensors - first, err);
}

/* The file's index in *files, mapped and read when it is new. */
static cpa_status add_file(cpa_safetensors *files, const char *folder, const char *name, cpa_error *err) {
    char path[4096];
    int64_t data_at = 0;
    for (int64_t i = 0; i < files->n_files; i++)
        if (strcmp(files->files[i].name, name) == 0) return CPA_OK;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return cpa_fail(err, CPA_INVALID, "%.200s: the name is too long", folder);
    if (files->n_files == MAX_FILES)
        return cpa_fail(err, CPA_INVALID, "%s: found more than %d files", folder, MAX_FILES);
    if (!cpa_array_reserve(&files->files, &files->cap_files, files->n_files + 1, sizeof *files->files))
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", path);
    mapped_file *file = &files->files[files->n_files];
    *file = (mapped_file){.name = strdup(name)};
    files->n_files++; /* from here on closing the whole frees it */
    if (!file->name) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", path);
    CPA_TRY(map_file(path, file, err));
    CPA_TRY(read_header(path, file, &data_at, err));
    return add_tensors(files, path, file, data_at, err);
}

/* Sorts the tensors by name; a name that two files have is refused. */
static cpa_status sort_names(cpa_safetensors *files, const char *folder, cpa_error *err) {
    if (files->n_tensors > 0) qsort(files->tensors, (size_t)files->n_tensors, sizeof *files->tensors, compare_names);
    for (int64_t i = 1; i < files->n_tensors; i++) {
        if (compare_names(&files->tensors[i - 1], &files->tensors[i]) == 0)
            return cpa_fail(err, CPA_INVALID, "%s: two files have a tensor %s", folder, files->tensors[i].name);
    }
    return CPA_OK;
}

/* Every file that the index names, and then whether all its tensors are there. */
static cpa_status add_indexed_files(cpa_safetensors *files, const char *folder, const char *path, const json_t *index,
                                    cpa_error *err) {
    const char *name;
    json_t *file;
    json_t *map = json_object_get(index, "weight_map");
    if (!json_is_object(map)) return cpa_fail(err, CPA_INVALID, "%s: weight_map: found no object, expected one", path);
    json_object_foreach(map, name, file) {
        const char *text = json_string_value(file);
        if (!text || !text[0] || strchr(text, '/'))
            return cpa_fail(err, CPA_INVALID, "%s: weight_map: %s: found no name of a file in the folder", path, name);
        CPA_TRY(add_file(files, folder, text, err));
    }
    CPA_TRY(sort_names(files, folder, err));
    json_object_foreach(map, name, file) {
        if (!cpa_safetensors_find(files, name))
            return cpa_fail(err, CPA_INVALID, "%s: %s is not in %s", path, name, json_string_value(file));
    }
    return CPA_OK;
}

static cpa_status add_all_files(cpa_safetensors *files, const char *folder, cpa_error *err) {
    static const char *const one = "model.safetensors", *const many = "model.safetensors.index.json";
    char path[4096];
    json_t *index = NULL;
    if (snprintf(path, sizeof path, "%s/%s", folder, one) >= (int)sizeof path)
        return cpa_fail(err, CPA_INVALID, "%.200s: the name is too long", folder);
    if (access(path, F_OK) == 0) {
        CPA_TRY(add_file(files, folder, one, err));
        return sort_names(files, folder, err);
    }
    snprintf(path, sizeof path, "%s/%s", folder, many);
    if (access(path, F_OK) != 0) return cpa_fail(err, CPA_IO, "%s: found neither %s nor %s", folder, one, many);
    CPA_TRY(cpa_json_load(path, &index, err));
    cpa_status status = add_indexed_files(files, folder, path, index, err);
    json_decref(index);
    return status;
}

cpa_status cpa_safetensors_open(const char *folder, cpa_safetensors **out, cpa_error *err) {
    cpa_safetensors *files = calloc(1, sizeof *files);
    if (!files) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory", folder);
    cpa_status status = add_all_files(files, folder, err);
    if (status != CPA_OK) {
        cpa_safetensors_close(files);
        return status;
    }
    *out = files;
    return CPA_OK;
}

void cpa_safetensors_close(cpa_safetensors *files) {
    if (!files) return;
    for (int64_t i = 0; i < files->n_files; i++) {
        mapped_file *file = &files->files[i];
        json_decref(file->header);
        if (file->memory) munmap(file->memory, (size_t)file->bytes);
        free(file->name);
    }
    free(files->files);
    free(files->tensors);
    free(files);
}

int64_t cpa_safetensors_count(const cpa_safetensors *files) {
    return files->n_tensors;
}

const cpa_tensor *cpa_safetensors_at(const cpa_safetensors *files, int64_t i) {
    return &files->tensors[i];
}

const cpa_tensor *cpa_safetensors_find(const cpa_safetensors *files, const char *name) {
    const cpa_tensor wanted = {.name = name};
    if (files->n_tensors == 0) return NULL;
    return bsearch(&wanted, files->tensors, (size_t)files->n_tensors, sizeof wanted, compare_names);
}
