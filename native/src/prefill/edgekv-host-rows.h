#pragma once
// Rows of one head of a layer, for kernels on the CPU: where they lie, or a copy of them.

#include "edgekv-layer.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-backend.h"

#include <vector>

inline edgekv_numbered edgekv_rows_at(const ggml_tensor * t, int64_t first) {
    return { (char *) t->data + first * t->nb[1], t->nb[1], t->type, (int) t->ne[0] };
}

// the rows of one head in host memory: where they lie, or a copy
struct edgekv_host_rows {
    std::vector<char> copy;
    edgekv_numbered view;

    edgekv_host_rows(const ggml_tensor * t, int64_t first, int64_t n)
        : view(edgekv_rows_at(t, first)) {
        if (ggml_backend_buffer_is_host(t->buffer)) return;
        copy.resize(n * t->nb[1]);
        edgekv_get_rows(t, first, n, copy.data());
        view.base = copy.data();
    }
};
