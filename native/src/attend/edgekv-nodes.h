#pragma once
// Nodes that both ways to attend put into a graph: a prompt's, and that of new tokens behind the
// store.

#include "edgekv-layer.h"

#include <vector>

struct llm_graph_context;

// into how many parts the rows are cut on the CPU, for so many tokens
int edgekv_n_parts(int64_t n_tokens);

float edgekv_softcap(const llm_graph_context & g); // 0: none

// new rows k and v [d, n_head_kv, n_tokens] go to the rows that idx I64 [n_head_kv*n_tokens] names;
// of a V that is part of K there is nothing to store
void edgekv_store_rows(const llm_graph_context & g, const edgekv_tensors & t, ggml_tensor * k,
    ggml_tensor * v, ggml_tensor * idx);

// flash attention of q [d, n_head, n_tokens] over n rows of each of n_head_kv heads, which begin
// cap rows apart; with max_bias a mask has minus the distances (ALiBi)
ggml_tensor * edgekv_flash(const llm_graph_context & g, const edgekv_tensors & t, ggml_tensor * q,
    int64_t first, int64_t n, int n_head_kv, int64_t cap, ggml_tensor * mask, ggml_tensor * sinks,
    float scale, float max_bias);

// the same of heads of different length: first row, number of rows and mask of each KV head
ggml_tensor * edgekv_flash_heads(const llm_graph_context & g, const edgekv_tensors & t,
    const edgekv_layer & l, ggml_tensor * q, ggml_tensor * sinks, float scale,
    const std::vector<int64_t> & first, const std::vector<int64_t> & n,
    const std::vector<ggml_tensor *> & masks);

// what the node of edgekv-op.h computes, on the CPU
void edgekv_attend_node(ggml_tensor * dst, int ith, int nth, void * userdata);
