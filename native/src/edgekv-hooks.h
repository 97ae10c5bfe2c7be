#pragma once
// What the patched files of llama.cpp call. Every hook but edgekv_copied is inert for a context
// without a ragged store.

#include "ggml-backend.h"
#include "llama.h"

#include <cstdint>

struct ggml_cgraph;
struct ggml_tensor;
struct llama_context;
struct llama_model;
struct llama_cparams;
struct llama_memory_i;
struct llama_memory_params;
struct llama_ubatch;
struct llm_graph_context;
struct edgekv_store;

class llama_kv_cache_context;

// create_memory: the memory of a compressed context, or null for any other
llama_memory_i * edgekv_create_memory(
    const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams);

// process_ubatch: with the cells, which memory contexts fill in apply(), the store's heads have the
// new tokens as well; their rows follow when the graph is computed
void edgekv_append(llama_memory_i * mem, const llama_ubatch & ubatch);

// build_attn: the store behind a batch, or null
edgekv_store * edgekv_store_of(const llama_kv_cache_context * mctx);

// build_attn: queries and keys as a store's quantised rows want them, see edgekv-basis.h
void edgekv_scale(const llm_graph_context & g, const edgekv_store * store, int il, ggml_tensor ** q,
    ggml_tensor ** k);

// build_attn: store k and v of the new tokens, attend, return [n_embd_v_head*n_head, n_tokens];
// v_mla [d_v, n_embd_v_head, n_head]: what each head makes of a latent value, or null
ggml_tensor * edgekv_build_attend(const llm_graph_context & g, edgekv_store * store,
    ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * sinks, ggml_tensor * v_mla,
    float kq_scale, int il);

// llama_decode: the same, also for a context that was closed; throws nothing, and a step that
// failed leaves no trace in the store. edgekv_last_error then says why
int32_t edgekv_decode(llama_context * ctx, const llama_batch & batch);

// graph_compute: the same; with a store products of weights are ours where that is faster
enum ggml_status edgekv_compute(llama_memory_i * mem, ggml_backend_sched_t sched, ggml_cgraph * gf);

// the scheduler: whether prompts are planned slice by slice, for which it must keep one copy of
// each input and not the several of pipeline parallelism
bool edgekv_plans_slices(llama_memory_i * mem);

// graph_max_nodes: nodes that attention over single heads may add
uint32_t edgekv_extra_nodes(llama_memory_i * mem);

// load_all_data: a weight was copied from the mapped file, to a device or as the CPU backend
// repacks it; what nobody reads any more leaves the process
void edgekv_copied(void * from, size_t n_bytes);
