#pragma once
// What a prompt needs of a context that llama.cpp keeps to itself. memory.patch opens llama_context
// to this struct alone.

#include "ggml-cpp.h"
#include "llama-memory.h"
#include "llama.h"

#include <vector>

class llm_graph_result;

struct edgekv_context {
    static ggml_backend_t cpu(const llama_context & ctx);
    static const std::vector<ggml_backend_ptr> & backends(const llama_context & ctx);

    // llama.cpp's own graphs are done and forgotten: they point into the scheduler's buffer. The
    // logits get room for one token; false if there is no memory for it
    static bool make_ready(llama_context & ctx);
    // cells for the tokens of a batch, which is one ubatch; throws edgekv_error
    static llama_memory_context_ptr place(llama_context & ctx, const llama_batch & batch);
    // llama.cpp's graph of those tokens, in res
    static ggml_cgraph * build(
        llama_context & ctx, llm_graph_result & res, llama_memory_context_i & mctx, int n_outputs);
    static uint32_t max_nodes(const llama_context & ctx); // of a graph
    // the first n rows of a graph's logits are those of its outputs: the last one becomes the
    // context's, and all of them go to `every`, if it is not null. Some graphs have more rows
    static void take_logits(llama_context & ctx, ggml_tensor * logits, int64_t n, float * every);
    // behind those that are there, the rows of a tensor that a graph has computed
    static void append_rows(llama_context & ctx, ggml_tensor * t, std::vector<float> & to);
    // [n_vocab] of one token, which make_ready has made room for: a copy, and the way back
    static std::vector<float> logits(const llama_context & ctx); // throws std::bad_alloc
    static void put_logits(llama_context & ctx, const std::vector<float> & logits);
    // one token's logits are there, whatever they are
    static void has_output(llama_context & ctx);
    // as after n tokens were decoded since `begin_us`, the last of them with logits
    static void has_read(llama_context & ctx, int64_t n_tokens, int64_t begin_us);
};
