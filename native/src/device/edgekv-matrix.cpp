// A matrix in a buffer of its own
#include "edgekv-matrix.h"

#include <new>

edgekv_matrix edgekv_matrix::make(
    ggml_backend_buffer_type_t buft, ggml_type type, int64_t ne0, int64_t ne1, const char * name) {
    edgekv_matrix r;
    r.ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    if (!r.ctx) throw std::bad_alloc();
    r.t = ggml_new_tensor_2d(r.ctx.get(), type, ne0, ne1);
    ggml_format_name(r.t, "edgekv_%s", name);
    r.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(r.ctx.get(), buft));
    if (!r.buf) throw std::bad_alloc();
    return r;
}
