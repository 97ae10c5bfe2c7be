// ggml-metal's C interface without Metal: what ggml-metal-device.m and ggml-metal-context.m are on
// a Mac, so that upstream's backend, our patch of it and our host code run as they are. Kernels run
// by name on the CPU (kernels.h), operators of upstream's in its CPU backend. What is queued waits
// for the next barrier and then runs backwards: Metal promises no order between barriers. Memory is
// locked outside of the device. Devices differ (GGML_METAL_DEVICES says how many there are): see
// ggml_metal_device_init.
#include "kernels.h"
#include "../fake.h"

#include "ggml-metal/ggml-metal-common.h"
#include "ggml-metal/ggml-metal-context.h"
#include "ggml-metal/ggml-metal-device.h"
#include "ggml-metal/ggml-metal-fusion.h"
#include "ggml-metal/ggml-metal-ops.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

extern const char edgekv_metal_source[];

namespace {

// whoever loads this wants our kernels
[[maybe_unused]] const bool g_wanted = setenv("EDGEKV_METAL", "1", 0) == 0;

constexpr int N_BUFFERS = 31; // that a kernel may have

long g_n_calls = 0;                   // of kernels of ours
long g_n_merges = 0, g_n_attends = 0; // of them
long g_n_barriers = 0;
long g_n_until_failure = 0; // that graph from now on is not computed; 0: none

[[noreturn]] void fail(const char * what, const std::string & whom) {
    fprintf(stderr, "Metal would not: %s: %s\n", whom.c_str(), what);
    abort();
}

void demand(bool ok, const char * what, const std::string & whom = "") {
    if (!ok) fail(what, whom);
}

struct binding {
    ggml_metal_buffer_t buffer = nullptr;
    size_t offset = 0;
};

// a kernel with all that is set for it
struct queued {
    std::string kernel;
    std::vector<char> args;
    std::vector<binding> buffers = std::vector<binding>(N_BUFFERS);
    uint32_t n_shared = 0, groups_x = 0, groups_y = 0;
};

} // namespace

struct ggml_metal_device {
    ggml_metal_device_props props = {};
    ggml_metal_fusion_info * fusion = nullptr;
    ggml_metal_library * library = nullptr;
    bool compiles = true; // our source
    int n_threads = 1024; // of a threadgroup of any pipeline
};

struct ggml_metal_buffer {
    ggml_metal_device * dev;
    char * base;
    size_t n_bytes;
};
struct ggml_metal_library {
    ggml_metal_device * dev;
    ggml_metal_pipelines * pipelines;
};
struct ggml_metal_pipeline {
    std::string kernel;
    int n_threads = 0;
};
struct ggml_metal_encoder {
    queued next;
    std::vector<queued> waiting;
};
// of the last command buffer; of any that was waited for
struct ggml_metal {
    ggml_metal_device * dev;
    bool last_failed = false, has_error = false;
};
struct ggml_metal_event {};
struct ggml_metal_cv {};

// ---- device

// 0 is an Apple GPU; 1 has a compiler that refuses our source, 2 pipelines for few threads, 3
// simd-groups of any size, 4 little threadgroup memory
ggml_metal_device_t ggml_metal_device_init(int device, int) {
    auto * dev = new ggml_metal_device;
    auto & p = dev->props;
    p.device = p.device_virt = device;
    snprintf(p.name, sizeof(p.name), "MTL%d", device);
    snprintf(p.desc, sizeof(p.desc), "none");
    p.max_buffer_size = p.max_working_set_size = (size_t) 8 << 30;
    p.max_theadgroup_memory_size = device == 4 ? 2048 : metal_standin::MAX_SHARED;
    p.has_simdgroup_reduction = p.has_simdgroup_mm = p.has_unified_memory = p.has_bfloat =
        p.use_shared_buffers = true;
    p.supports_gpu_family_apple7 = device != 3;
    p.op_offload_min_batch_size = 32;
    dev->compiles = device != 1;
    dev->n_threads = device == 2 ? 64 : 1024;
    dev->fusion = ggml_metal_fusion_info_init(false, 0); // the CPU computes what could be fused
    dev->library = new ggml_metal_library { dev, ggml_metal_pipelines_init() };
    return dev;
}

void ggml_metal_device_free(ggml_metal_device_t dev) {
    ggml_metal_fusion_info_free(dev->fusion);
    ggml_metal_library_free(dev->library);
    delete dev;
}

const ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev) {
    return &dev->props;
}
ggml_metal_fusion_info * ggml_metal_device_get_fusion_info(ggml_metal_device_t dev) {
    return dev->fusion;
}
ggml_metal_library_t ggml_metal_device_get_library(ggml_metal_device_t dev) { return dev->library; }
const char * ggml_metal_device_id_token(ggml_metal_device_id) { return "none"; }
void ggml_metal_device_get_memory(ggml_metal_device_t dev, size_t * free, size_t * total) {
    *free = *total = dev->props.max_working_set_size;
}

// as upstream's: no custom node, no flash attention over iq4_nl
bool ggml_metal_device_supports_op(ggml_metal_device_t, const ggml_tensor * op) {
    if (op->op == GGML_OP_FLASH_ATTN_EXT &&
        (op->src[1]->type == GGML_TYPE_IQ4_NL || op->src[2]->type == GGML_TYPE_IQ4_NL))
        return false;
    return op->op != GGML_OP_CUSTOM &&
        ggml_backend_dev_supports_op(ggml_backend_get_device(fake::cpu()), op);
}

ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t) {
    return new ggml_metal_event;
}
void ggml_metal_device_event_free(ggml_metal_device_t, ggml_metal_event_t ev) { delete ev; }
void ggml_metal_device_event_synchronize(ggml_metal_device_t, ggml_metal_event_t) {}

// ---- library

ggml_metal_library_t ggml_metal_library_init_from_source(
    ggml_metal_device_t dev, const char * source, bool) {
    demand(!strcmp(source, edgekv_metal_source), "compile another source than ours");
    return dev->compiles ? new ggml_metal_library { dev, ggml_metal_pipelines_init() } : nullptr;
}

void ggml_metal_library_free(ggml_metal_library_t lib) {
    if (lib) ggml_metal_pipelines_free(lib->pipelines);
    delete lib;
}

ggml_metal_device_t ggml_metal_library_get_device(ggml_metal_library_t lib) { return lib->dev; }

ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(
    ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params p = {};
    p.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    return p;
}

ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(
    ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t) {
    auto p = ggml_metal_library_get_pipeline(lib, name);
    if (p.pipeline || !metal_standin::find(base)) return p;
    p.pipeline = new ggml_metal_pipeline { base, lib->dev->n_threads };
    ggml_metal_pipelines_add(lib->pipelines, name, p.pipeline);
    return p;
}

void ggml_metal_pipeline_free(ggml_metal_pipeline_t p) { delete p; }
int ggml_metal_pipeline_max_theads_per_threadgroup(ggml_metal_pipeline_with_params p) {
    return p.pipeline->n_threads;
}

ggml_metal_cv_t ggml_metal_cv_init() { return new ggml_metal_cv; }
void ggml_metal_cv_free(ggml_metal_cv_t cv) { delete cv; }
void ggml_metal_cv_set_int16(ggml_metal_cv_t, int16_t, int32_t) {}
void ggml_metal_cv_set_int32(ggml_metal_cv_t, int32_t, int32_t) {}
void ggml_metal_cv_set_bool(ggml_metal_cv_t, bool, int32_t) {}

// ---- encoder

// bytes that a kernel reads at once from rows
static size_t word_of(const std::string & kernel) {
    return kernel.find("edgekv_gather_") == 0 ? std::stoul(kernel.substr(kernel.rfind('_') + 1))
                                              : 2;
}

static void run(const queued & q) {
    std::vector<const void *> buffers;
    const size_t n = metal_standin::find(q.kernel.c_str())->n_buffers;
    for (size_t i = 1; i < q.buffers.size(); ++i) {
        const auto & b = q.buffers[i];
        if (i > n) {
            demand(!b.buffer, "a buffer that the kernel has not", q.kernel);
            continue;
        }
        demand(b.buffer && b.offset <= b.buffer->n_bytes,
            "a buffer is missing, or the offset lies outside of it", q.kernel);
        demand(b.offset % (i <= 2 ? word_of(q.kernel) : 2) == 0,
            "a word that crosses its alignment", q.kernel);
        buffers.push_back(b.buffer->base + b.offset);
    }
    demand(metal_standin::run({ q.kernel.c_str(), q.groups_x, q.groups_y, q.n_shared },
               q.args.data(), q.args.size(), buffers),
        "the call does not fit the kernel, or it wrote behind its threadgroup memory", q.kernel);
    ++g_n_calls;
    g_n_merges += q.kernel.find("edgekv_merge") == 0;
    g_n_attends += q.kernel.find("edgekv_attend") == 0;
}

static void run_waiting(ggml_metal_encoder_t enc) {
    for (auto q = enc->waiting.rbegin(); q != enc->waiting.rend(); ++q) run(*q);
    enc->waiting.clear();
}

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t, bool) {
    return new ggml_metal_encoder;
}
void ggml_metal_encoder_free(ggml_metal_encoder_t enc) { delete enc; }
void ggml_metal_encoder_debug_group_push(ggml_metal_encoder_t, const char *) {}
void ggml_metal_encoder_debug_group_pop(ggml_metal_encoder_t) {}
void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t enc) {
    ++g_n_barriers;
    run_waiting(enc);
}
void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t enc) { run_waiting(enc); }

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t enc, ggml_metal_pipeline_with_params p) {
    demand(p.pipeline, "no pipeline");
    enc->next.kernel = p.pipeline->kernel;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t enc, void * data, size_t n, int at) {
    demand(at == 0 && n <= 4096, "arguments", enc->next.kernel);
    enc->next.args.assign((char *) data, (char *) data + n);
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t enc, ggml_metal_buffer_id id, int at) {
    demand(id.metal && at > 0 && at < N_BUFFERS, "a buffer", enc->next.kernel);
    enc->next.buffers[at] = { (ggml_metal_buffer_t) id.metal, id.offs };
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t enc, size_t n, int at) {
    demand(at == 0 && n % 16 == 0, "threadgroup memory", enc->next.kernel);
    enc->next.n_shared = (uint32_t) n;
}

// nothing that was set stays: each kernel says all it needs
void ggml_metal_encoder_dispatch_threadgroups(
    ggml_metal_encoder_t enc, int x, int y, int z, int n_x, int n_y, int n_z) {
    demand(x > 0 && y > 0 && z == 1 && n_x == EDGEKV_METAL_THREADS && n_y == 1 && n_z == 1,
        "the grid", enc->next.kernel);
    enc->next.groups_x = (uint32_t) x;
    enc->next.groups_y = (uint32_t) y;
    enc->waiting.push_back(enc->next);
    enc->next = {};
}

// ---- memory

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t dev, size_t n, bool) {
    char * p = fake::map_memory(n);
    return p ? new ggml_metal_buffer { dev, p, n } : nullptr;
}

ggml_metal_buffer_t ggml_metal_buffer_map(ggml_metal_device_t dev, void * p, size_t n, size_t) {
    return new ggml_metal_buffer { dev, (char *) p, n };
}

void ggml_metal_buffer_free(ggml_metal_buffer_t b) {
    if (fake::memory.count(b->base)) fake::unmap_memory(b->base);
    delete b;
}

void * ggml_metal_buffer_get_base(ggml_metal_buffer_t b) { return b->base; }
bool ggml_metal_buffer_is_shared(ggml_metal_buffer_t) { return true; }
void ggml_metal_buffer_clear(ggml_metal_buffer_t b, uint8_t value) {
    fake::inside i;
    memset(b->base, value, b->n_bytes);
}
void ggml_metal_buffer_memset_tensor(
    ggml_metal_buffer_t, ggml_tensor * t, uint8_t value, size_t at, size_t n) {
    fake::inside i;
    memset(fake::data_of(t) + at, value, n);
}
void ggml_metal_buffer_set_tensor(
    ggml_metal_buffer_t, ggml_tensor * t, const void * x, size_t at, size_t n) {
    fake::inside i;
    memcpy(fake::data_of(t) + at, x, n);
}
void ggml_metal_buffer_get_tensor(
    ggml_metal_buffer_t, const ggml_tensor * t, void * x, size_t at, size_t n) {
    fake::inside i;
    memcpy(x, fake::data_of(t) + at, n);
}

bool ggml_metal_buffer_cpy_tensor(ggml_metal_buffer_t, const ggml_tensor * from, ggml_tensor * to) {
    fake::inside i;
    memcpy(to->data, from->data, ggml_nbytes(from));
    return true;
}

ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t b, const ggml_tensor * t) {
    const size_t at = (size_t) (fake::data_of(t) - b->base);
    if (at + ggml_nbytes(t) > b->n_bytes) return { nullptr, 0 };
    return { b, at };
}

// ---- context

ggml_metal_t ggml_metal_init(ggml_metal_device_t dev) { return new ggml_metal { dev }; }
void ggml_metal_free(ggml_metal_t ctx) { delete ctx; }
const char * ggml_metal_get_name(ggml_metal_t ctx) { return ctx->dev->props.name; }
void ggml_metal_synchronize(ggml_metal_t ctx) { ctx->has_error |= ctx->last_failed; }
void ggml_metal_set_tensor_async(
    ggml_metal_t, ggml_tensor * t, const void * x, size_t at, size_t n) {
    ggml_metal_buffer_set_tensor(nullptr, t, x, at, n);
}
void ggml_metal_get_tensor_async(
    ggml_metal_t, const ggml_tensor * t, void * x, size_t at, size_t n) {
    ggml_metal_buffer_get_tensor(nullptr, t, x, at, n);
}
bool ggml_metal_cpy_tensor_async(
    ggml_metal_t, ggml_metal_t, const ggml_tensor * from, ggml_tensor * to) {
    return ggml_metal_buffer_cpy_tensor(nullptr, from, to);
}

// as upstream's: a failure shows when it has been waited for, and then in the next call; of an
// earlier command buffer nobody knows
ggml_status ggml_metal_graph_compute(ggml_metal_t ctx, ggml_cgraph * graph) {
    if (ctx->has_error) return GGML_STATUS_FAILED;
    if (graph->n_nodes == 0) return GGML_STATUS_SUCCESS;
    ctx->last_failed = g_n_until_failure > 0 && --g_n_until_failure == 0;
    if (ctx->last_failed) return GGML_STATUS_SUCCESS;
    return fake::compute(graph, [&](int from, int to) {
        ggml_metal_op_t op = ggml_metal_op_init(
            ctx->dev, nullptr, graph, ctx->dev->fusion, from, to, true, false, 0);
        for (int i = 0; i < ggml_metal_op_n_nodes(op);) i += ggml_metal_op_encode(op, i);
        ggml_metal_op_free(op); // runs what still waits
    });
}

void ggml_metal_graph_optimize(ggml_metal_t, ggml_cgraph * graph) { ggml_graph_optimize(graph); }
void ggml_metal_event_record(ggml_metal_t, ggml_metal_event_t) {}
void ggml_metal_event_wait(ggml_metal_t, ggml_metal_event_t) {}
ggml_metal_event_t ggml_metal_get_ev_cpy(ggml_metal_t) { return nullptr; }
void ggml_metal_set_n_cb(ggml_metal_t, int) {}
void ggml_metal_set_abort_callback(ggml_metal_t, ggml_abort_callback, void *) {}
bool ggml_metal_supports_family(ggml_metal_t, int) { return true; }
void ggml_metal_capture_next_compute(ggml_metal_t) {}

// ---- what tests ask

extern "C" long fake_device_n_ours() { return g_n_calls; }
extern "C" long fake_device_n_merges() { return g_n_merges; }
extern "C" long fake_metal_n_attends() { return g_n_attends; }
extern "C" long fake_metal_n_barriers() { return g_n_barriers; }
extern "C" long fake_metal_fails(long n) { return std::exchange(g_n_until_failure, n); }
