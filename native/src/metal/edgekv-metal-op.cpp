// attend as a node of a graph on Metal
#include "edgekv-metal-job.h"
#include "edgekv-metal-op.h"
#include "edgekv-metal-queue.h"
#include "edgekv-op.h"

#include "ggml-backend-impl.h"

namespace {

using namespace edgekv_metal;

// a tensor's place, some bytes behind its beginning
ggml_metal_buffer_id place(const ggml_tensor * t, size_t offset = 0) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    ggml_metal_buffer_id id = ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);
    id.offs += offset;
    return id;
}

// of shapes only: nodes are asked about before they have memory
edgekv_metal_attend args_of(const ggml_tensor * node, const edgekv_op & op) {
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2],
                      *heads = node->src[3], *sinks = node->src[4], *recalled = node->src[6];
    const int n_head = (int) q->ne[1], n_tokens = (int) q->ne[2], G = n_head / op.n_head_kv;
    const edgekv_metal_layer layer = { k->nb[1], v->nb[1], (int64_t) (q->nb[2] / sizeof(float)),
        (int64_t) (q->nb[1] / sizeof(float)), k->type, v->type, (int32_t) k->ne[0],
        (int32_t) v->ne[0], n_head, op.n_head_kv, n_tokens, op.scale, op.softcap, op.max_bias,
        sinks != nullptr, heads->ne[0] > 2 * op.n_head_kv, 0, recalled != nullptr };
    return attend_args(layer, attend_parts(n_tokens, G));
}

} // namespace

bool edgekv_metal_op_supported(ggml_metal_device * dev, const ggml_tensor * node) {
    edgekv_op op;
    if (!edgekv_op_get(node, op)) return false;
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) ||
        !supports(k->type, (int) k->ne[0]) || !supports(v->type, (int) v->ne[0]))
        return false;
    const auto a = args_of(node, op);
    return can_run(dev, attend_part(a)) && can_run(dev, attend_combine(a));
}

size_t edgekv_metal_op_extra(const ggml_tensor * node) {
    edgekv_op op;
    return edgekv_op_get(node, op) ? attend_workspace(args_of(node, op)) : 0;
}

void edgekv_metal_op_encode(ggml_metal_device * dev, ggml_metal_encoder * enc, ggml_tensor * dst) {
    if (edgekv_metal_run_job(dev, enc, dst)) return;
    edgekv_op op;
    GGML_ASSERT(edgekv_op_get(dst, op));
    const auto a = args_of(dst, op);
    const size_t n_bytes = op.n_head_kv * sizeof(int32_t);
    const auto first = place(dst->src[3]), len = place(dst->src[3], n_bytes),
               start = a.layer.has_start ? place(dst->src[3], 2 * n_bytes) : first;
    const auto parts = place(dst, ggml_nbytes(dst)),
               sinks = a.layer.has_sinks ? place(dst->src[4]) : parts,
               pos = op.max_bias != 0.0f ? place(dst->src[5]) : first,
               recalled = a.layer.has_recalled ? place(dst->src[6]) : parts;
    queue(dev, enc, attend_part(a), a,
        { place(dst->src[1]), place(dst->src[2]), first, len, pos, place(dst->src[0]), start, first,
            parts });
    // what upstream remembers of earlier nodes stays as it is: that asks for more barriers, never
    // for fewer
    ggml_metal_encoder_memory_barrier(enc);
    queue(dev, enc, attend_combine(a), a, { parts, sinks, recalled, place(dst) });
}
