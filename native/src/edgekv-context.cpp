// Private parts of llama_context, as a prompt uses them
#include "edgekv-context.h"
#include "edgekv-error.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>

ggml_backend_t edgekv_context::cpu(const llama_context & ctx) { return ctx.backend_cpu; }

const std::vector<ggml_backend_ptr> & edgekv_context::backends(const llama_context & ctx) {
    return ctx.backends;
}

bool edgekv_context::make_ready(llama_context & ctx) {
    ctx.synchronize();
    ctx.sched_reserve();
    ctx.output_swaps.clear();
    ctx.embd_batch_idxs.clear();
    for (auto & r : ctx.gf_res_prev)
        if (r) r->reset();
    ctx.gf_res_prev_active = nullptr;
    return ctx.output_reserve(1) >= 1;
}

llama_memory_context_ptr edgekv_context::place(llama_context & ctx, const llama_batch & batch) {
    llama_batch_compat compat(&ctx, batch);
    if (!ctx.balloc->init(*compat.batch_ext, ctx.model.vocab, false)) {
        throw edgekv_error { EDGEKV_FAILED, "llama.cpp refused the batch" };
    }
    auto mctx = ctx.memory->init_batch(*ctx.balloc, ctx.cparams.n_ubatch, false);
    if (!mctx || mctx->get_status() != LLAMA_MEMORY_STATUS_SUCCESS || !mctx->apply()) {
        throw edgekv_error { EDGEKV_FAILED, "llama.cpp found no place for the batch" };
    }
    return mctx;
}

ggml_cgraph * edgekv_context::build(
    llama_context & ctx, llm_graph_result & res, llama_memory_context_i & mctx, int n_outputs) {
    ctx.n_outputs = n_outputs;
    res.reset();
    ggml_backend_sched_reset(ctx.sched.get());
    return ctx.model.build_graph(
        ctx.graph_params(&res, mctx.get_ubatch(), &mctx, LLM_GRAPH_TYPE_DEFAULT));
}

uint32_t edgekv_context::max_nodes(const llama_context & ctx) {
    return ctx.gf_res_reserve->get_max_nodes();
}

void edgekv_context::take_logits(
    llama_context & ctx, ggml_tensor * logits, int64_t n, float * every) {
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(ctx.sched.get(), logits);
    const size_t one = ctx.model.vocab.n_tokens() * sizeof(float);
    if (every) ggml_backend_tensor_get_async(backend, logits, every, 0, n * one);
    ggml_backend_tensor_get_async(backend, logits, ctx.logits.data, (n - 1) * one, one);
    ggml_backend_sched_synchronize(ctx.sched.get());
}

void edgekv_context::append_rows(llama_context & ctx, ggml_tensor * t, std::vector<float> & to) {
    const size_t n_before = to.size();
    to.resize(n_before + ggml_nelements(t));
    ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(ctx.sched.get(), t);
    ggml_backend_tensor_get_async(backend, t, to.data() + n_before, 0, ggml_nbytes(t));
    ggml_backend_sched_synchronize(ctx.sched.get());
}

std::vector<float> edgekv_context::logits(const llama_context & ctx) {
    return { ctx.logits.data, ctx.logits.data + ctx.model.vocab.n_tokens() };
}

void edgekv_context::put_logits(llama_context & ctx, const std::vector<float> & logits) {
    std::copy(logits.begin(), logits.end(), ctx.logits.data);
}

void edgekv_context::has_output(llama_context & ctx) {
    ctx.n_outputs = 1;
    ctx.output_ids[0] = 0;
}

void edgekv_context::has_read(llama_context & ctx, int64_t n_tokens, int64_t begin_us) {
    has_output(ctx);
    ctx.n_queued_tokens += n_tokens;
    if (ctx.t_compute_start_us == 0) ctx.t_compute_start_us = begin_us;
}
