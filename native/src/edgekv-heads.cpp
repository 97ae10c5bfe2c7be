// Heads for further tokens (MTP): which models have them, and the hidden states that they take
#include "edgekv-heads.h"
#include "edgekv-cache.h"
#include "edgekv.h"

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>

// llama.cpp has their graph, and takes one hidden state of n_embd_out values for each token
static bool has_graph(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_QWEN3NEXT:
        case LLM_ARCH_QWEN35:
        case LLM_ARCH_QWEN35MOE:
        case LLM_ARCH_GLM4_MOE:
        case LLM_ARCH_DEEPSEEK2: return true;
        default: return false;
    }
}

// Their graph ends the process where something is missing
const char * edgekv_no_heads(const llama_model & model) {
    const auto & hparams = model.hparams;
    if (hparams.n_layer_nextn == 0) return "its file has none";
    if (!has_graph(model.arch)) return "those of its architecture are not run here";
    if (hparams.n_layer_nextn > 1) return "it has several, one behind the other";
    const auto & layer = model.layers[hparams.n_layer()];
    const auto & head = layer.nextn;
    if (!head.eh_proj || !head.enorm || !head.hnorm || !layer.attn_norm)
        return "its file lacks their weights";
    return nullptr;
}

void edgekv_keep_hidden(llama_context * ctx, bool every, int32_t n_last) {
    llama_set_embeddings_nextn(ctx, true, !every);
    if (edgekv_store_of(ctx->get_memory())) edgekv_memory_of(*ctx).n_hidden = std::max(n_last, 0);
}

const float * edgekv_hidden_ith(llama_context * ctx, int32_t i) {
    return llama_get_embeddings_nextn_ith(ctx, i);
}
