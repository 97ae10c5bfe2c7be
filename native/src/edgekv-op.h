#pragma once
// attend as one graph node that a device may have a kernel for: a custom node (its function
// computes the same on the CPU) that says what it is in the part of its parameters which custom
// nodes leave zero. Backends that do not know it refuse it, like any custom node.
//     src: q F32 [d_k, n_head, n_tokens], k [d_k, n_rows], v [d_v, n_rows],
//          heads I32 [2*n_head_kv (+ n_tokens)]: first row of each head, length of each head (,
//          first visible row of each token), (sinks), (pos F32 [n_rows]: token of each row, for
//          ALiBi), (recalled F32 [2 + d_v, n_head, n_tokens]: one part more of each softmax)
//     dst: F32 [d_v, n_head, n_tokens]
// Lengths are data: the graph, and a CUDA graph made of it, stays the same while heads grow.

#include "cpu/edgekv-cpu.h"

#include "ggml.h"

#include <cstdint>
#include <cstring>

struct edgekv_op {
    int32_t magic, n_head_kv;
    float scale, softcap, max_bias;

    static constexpr int32_t MAGIC = 0x76656b65; // "ekev"
    static constexpr size_t OFFSET = 32;         // behind ggml_custom_op_params
};

static_assert(edgekv_op::OFFSET + sizeof(edgekv_op) <= GGML_MAX_OP_PARAMS,
    "the parameters of a node have no room");

inline void edgekv_op_set(
    ggml_tensor * node, int n_head_kv, float scale, float softcap, float max_bias) {
    const edgekv_op op = { edgekv_op::MAGIC, n_head_kv, scale, softcap, max_bias };
    memcpy((char *) node->op_params + edgekv_op::OFFSET, &op, sizeof(op));
}

// false: another node
inline bool edgekv_op_get(const ggml_tensor * node, edgekv_op & op) {
    if (node->op != GGML_OP_CUSTOM) return false;
    memcpy(&op, (const char *) node->op_params + edgekv_op::OFFSET, sizeof(op));
    return op.magic == edgekv_op::MAGIC;
}

// what the kernels take; pointers are the tensors' data, wherever that is
inline void edgekv_op_inputs(
    const ggml_tensor * node, const edgekv_op & op, edgekv_rows & rows, edgekv_queries & qs) {
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2],
                      *heads = node->src[3], *sinks = node->src[4], *pos = node->src[5],
                      *recalled = node->src[6];
    const int32_t * at = (const int32_t *) heads->data;
    rows = { (const char *) k->data, (const char *) v->data, k->nb[1], v->nb[1], k->type, v->type,
        (int) k->ne[0], (int) v->ne[0], (int) q->ne[1], op.n_head_kv, at, at + op.n_head_kv,
        op.scale, op.softcap, sinks ? (const float *) sinks->data : nullptr,
        pos ? (const float *) pos->data : nullptr, op.max_bias };
    qs = { (const float *) q->data, (int64_t) (q->nb[2] / sizeof(float)),
        (int64_t) (q->nb[1] / sizeof(float)), (int) q->ne[2], nullptr,
        heads->ne[0] > 2 * op.n_head_kv ? at + 2 * op.n_head_kv : nullptr,
        recalled ? (const float *) recalled->data : nullptr };
}
