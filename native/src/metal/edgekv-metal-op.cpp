// attend as a node of a graph on Metal, through ggml-metal's C interface. Our kernels are a library of their own: one source text, put
// together by CMake (native/metal-source.cmake), which the system compiles when a device is first asked about a node of ours. Where it
// does not compile, the answer is no, and attention goes through upstream's kernels.
#include "edgekv-metal-op.h"
#include "edgekv-dispatch.h"
#include "edgekv-op.h"

#include "ggml-backend-impl.h"
#include "ggml-metal/ggml-metal-device.h"

#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

extern const char edgekv_metal_source[];

namespace {

using namespace edgekv_metal;

struct free_library { void operator()(ggml_metal_library * lib) const { ggml_metal_library_free(lib); } };

struct kernels {
    std::unique_ptr<ggml_metal_library, free_library> library; // null: it does not compile
    std::map<std::string, ggml_metal_pipeline_with_params> pipelines;
};

// without a pipeline where the device cannot run it; either is found out once
ggml_metal_pipeline_with_params pipeline_of(ggml_metal_device_t dev, const char * kernel) {
    static std::mutex mutex; // several threads encode
    static std::map<ggml_metal_device_t, kernels> all;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto [of_device, new_device] = all.try_emplace(dev);
    kernels & k = of_device->second;
    if (new_device) k.library.reset(ggml_metal_library_init_from_source(dev, edgekv_metal_source, true));
    const auto [it, fresh] = k.pipelines.try_emplace(kernel);
    if (fresh && k.library) {
        it->second = ggml_metal_library_compile_pipeline(k.library.get(), kernel, kernel, nullptr);
        if (it->second.pipeline && ggml_metal_pipeline_max_theads_per_threadgroup(it->second) < EDGEKV_METAL_THREADS) it->second = {};
    }
    return it->second;
}

bool can_run(ggml_metal_device_t dev, const call & c) {
    return c.n_shared <= ggml_metal_device_get_props(dev)->max_theadgroup_memory_size && pipeline_of(dev, c.kernel).pipeline;
}

// buffers in the order of KERNELS
template <typename Args>
void queue(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const call & c, Args args, std::initializer_list<ggml_metal_buffer_id> buffers) {
    ggml_metal_encoder_set_pipeline(enc, pipeline_of(dev, c.kernel));
    ggml_metal_encoder_set_bytes(enc, &args, sizeof(args), 0);
    int at = 0;
    for (const auto & b : buffers) ggml_metal_encoder_set_buffer(enc, b, ++at);
    ggml_metal_encoder_set_threadgroup_memory_size(enc, c.n_shared, 0);
    ggml_metal_encoder_dispatch_threadgroups(enc, (int) c.groups_x, (int) c.groups_y, 1, EDGEKV_METAL_THREADS, 1, 1);
}

// a tensor's place, some bytes behind its beginning
ggml_metal_buffer_id place(const ggml_tensor * t, size_t offset = 0) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    ggml_metal_buffer_id id = ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);
    id.offs += offset;
    return id;
}

// of shapes only: nodes are asked about before they have memory
edgekv_metal_attend args_of(const ggml_tensor * node, const edgekv_op & op) {
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * heads = node->src[3], * sinks = node->src[4];
    const int n_head = (int) q->ne[1], n_tokens = (int) q->ne[2], G = n_head/op.n_head_kv;
    const edgekv_metal_layer layer = { k->nb[1], v->nb[1], (int64_t) (q->nb[2]/sizeof(float)), (int64_t) (q->nb[1]/sizeof(float)), k->type, v->type,
        (int32_t) k->ne[0], (int32_t) v->ne[0], n_head, op.n_head_kv, n_tokens, op.scale, op.softcap, sinks != nullptr, heads->ne[0] > 2*op.n_head_kv, 0 };
    return attend_args(layer, attend_parts(n_tokens, G));
}

} // namespace

bool edgekv_metal_op_supported(ggml_metal_device * dev, const ggml_tensor * node) {
    edgekv_op op;
    if (!edgekv_op_get(node, op)) return false;
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2];
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || !supports(k->type, (int) k->ne[0]) || !supports(v->type, (int) v->ne[0])) return false;
    if (!ggml_metal_device_get_props(dev)->supports_gpu_family_apple7) return false; // others have simd-groups of other sizes
    const auto a = args_of(node, op);
    return can_run(dev, attend_part(a)) && can_run(dev, attend_combine(a));
}

size_t edgekv_metal_op_extra(const ggml_tensor * node) {
    edgekv_op op;
    return edgekv_op_get(node, op) ? attend_workspace(args_of(node, op)) : 0;
}

void edgekv_metal_op_encode(ggml_metal_device * dev, ggml_metal_encoder * enc, ggml_tensor * dst) {
    edgekv_op op;
    GGML_ASSERT(edgekv_op_get(dst, op));
    const auto a = args_of(dst, op);
    const size_t n_bytes = op.n_head_kv*sizeof(int32_t);
    const auto first = place(dst->src[3]), len = place(dst->src[3], n_bytes), start = a.layer.has_start ? place(dst->src[3], 2*n_bytes) : first;
    const auto parts = place(dst, ggml_nbytes(dst)), sinks = a.layer.has_sinks ? place(dst->src[4]) : parts;
    queue(dev, enc, attend_part(a), a, { place(dst->src[1]), place(dst->src[2]), first, len, place(dst->src[0]), start, first, parts });
    ggml_metal_encoder_memory_barrier(enc); // what upstream remembers of earlier nodes stays as it is: that asks for more barriers, never for fewer
    queue(dev, enc, attend_combine(a), a, { parts, sinks, place(dst) });
}
