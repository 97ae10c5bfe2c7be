#pragma once
// A matrix in a buffer of its own.

#include "ggml-cpp.h"

#include <cstdint>

struct edgekv_matrix {
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor * t = nullptr;

    // throws std::bad_alloc
    static edgekv_matrix make(ggml_backend_buffer_type_t buft, ggml_type type, int64_t ne0,
        int64_t ne1, const char * name);
    size_t n_bytes() const { return buf ? ggml_backend_buffer_get_size(buf.get()) : 0; }
};
