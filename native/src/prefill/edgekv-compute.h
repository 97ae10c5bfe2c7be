#pragma once
// A little graph on the CPU backend, for its threads and its barriers between nodes.

#include "edgekv-error.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <new>

// build(context) makes up to 16 tensors and returns the last node, fill() writes inputs once they
// have memory, read(node) takes the result of the last time. Throws bad_alloc, or an error if the
// backend fails.
template <typename B, typename F, typename R>
void edgekv_compute(ggml_backend_t cpu, B && build, F && fill, R && read, int n_times = 1) {
    constexpr int MAX_NODES = 16;
    ggml_context_ptr ctx { ggml_init(
        { MAX_NODES * ggml_tensor_overhead() + ggml_graph_overhead_custom(MAX_NODES, false),
            nullptr, true }) };
    if (!ctx) throw std::bad_alloc();
    ggml_tensor * out = build(ctx.get());
    ggml_cgraph * gf = ggml_new_graph_custom(ctx.get(), MAX_NODES, false);
    ggml_build_forward_expand(gf, out);
    ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors(ctx.get(), cpu) };
    if (!buf) throw std::bad_alloc();
    fill();
    for (int i = 0; i < n_times; ++i)
        if (ggml_backend_graph_compute(cpu, gf) != GGML_STATUS_SUCCESS)
            throw edgekv_error { EDGEKV_FAILED, "the CPU backend could not compute" };
    read((const ggml_tensor *) out);
}

template <typename B>
void edgekv_compute(ggml_backend_t cpu, B && build) {
    edgekv_compute(cpu, build, [] {}, [](const ggml_tensor *) {});
}
