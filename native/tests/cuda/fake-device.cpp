// A device for tests: a backend of llama.cpp whose memory the program must not touch, with edgekv's
// CUDA kernels in it. Its memory is locked outside of its own functions; inside, upstream's CPU
// backend computes what is not ours, and the stand-in our kernels. So everything around the kernels
// is run as on a GPU: where tensors lie, who computes what, tables of lengths, scores, moved rows.
#include "cuda_runtime.h"
#include "cuda/edgekv-cuda.h"
#include "edgekv-op.h"

#include "../fake.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace {

ggml_backend_dev_t the_device();

using fake::data_of;
using fake::inside;

long g_n_ours = 0; // nodes and calls that our kernels computed
long g_n_recorded = 0, g_n_unrecorded = 0;
thread_local bool g_records = true;     // as edgekv_cuda_record says
long g_n_merges = 0, g_n_predicted = 0; // of them
long g_n_until_failure = 0;   // that many graphs and calls from now on, one fails; 0: none
std::vector<size_t> g_pinned; // sizes of all buffers in pinned memory so far

bool fails() { return g_n_until_failure > 0 && --g_n_until_failure == 0; }

// ---- memory

const ggml_backend_buffer_i BUFFER = {
    [](ggml_backend_buffer_t b) { fake::unmap_memory((char *) b->context); },
    [](ggml_backend_buffer_t b) { return b->context; },
    nullptr,
    [](ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t at, size_t n) {
        inside i;
        memset(data_of(t) + at, value, n);
    },
    [](ggml_backend_buffer_t, ggml_tensor * t, const void * x, size_t at, size_t n) {
        inside i;
        memcpy(data_of(t) + at, x, n);
    },
    [](ggml_backend_buffer_t, const ggml_tensor * t, void * x, size_t at, size_t n) {
        inside i;
        memcpy(x, data_of(t) + at, n);
    },
    nullptr,
    nullptr,
    [](ggml_backend_buffer_t, const ggml_tensor * from, ggml_tensor * to) {
        if (!ggml_backend_buffer_is_host(from->buffer) && from->buffer->buft != to->buffer->buft)
            return false;
        inside i;
        memcpy(to->data, from->data, ggml_nbytes(from));
        return true;
    },
    [](ggml_backend_buffer_t b, uint8_t value) {
        inside i;
        memset(b->context, value, b->size);
    },
    nullptr,
};

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t n) {
    char * p = fake::map_memory(n);
    return p ? ggml_backend_buffer_init(buft, BUFFER, p, n) : nullptr;
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type buft = {
        { [](ggml_backend_buffer_type_t) { return "Fake"; }, alloc_buffer,
            [](ggml_backend_buffer_type_t) -> size_t { return 128; }, nullptr, nullptr,
            [](ggml_backend_buffer_type_t) { return false; } },
        the_device(), nullptr
    };
    return &buft;
}

// main memory that a GPU copies from at full speed
ggml_backend_buffer_type_t pinned_type() {
    static ggml_backend_buffer_type buft = [] {
        auto t = *ggml_backend_cpu_buffer_type();
        t.device = the_device();
        t.iface.get_name = [](ggml_backend_buffer_type_t) { return "Fake_Host"; };
        t.iface.alloc_buffer = [](ggml_backend_buffer_type_t buft, size_t n) {
            ggml_backend_buffer_t b =
                ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), n);
            if (b) {
                b->buft = buft;
                g_pinned.push_back(n);
            }
            return b;
        };
        return t;
    }();
    return &buft;
}

// a kernel that computes something wrong, for tests: FAKE_FAULT=attend, long, sinks, softcap,
// windows, alibi, recalled, score, long_score (of many tokens), gather, odd_gather (rows of an odd
// number of pairs of bytes), predict, nearest or fold
bool faulty(const char * what) {
    const char * wish = getenv("FAKE_FAULT");
    return wish && strcmp(wish, what) == 0;
}

// ---- computing

void attend(ggml_tensor * node) {
    edgekv_op op;
    edgekv_rows rows;
    edgekv_queries qs;
    edgekv_op_get(node, op);
    edgekv_op_inputs(node, op, rows, qs);
    const int n_parts = edgekv_cuda_attend_parts(&rows);
    std::vector<char> workspace(edgekv_cuda_attend_workspace(&rows, qs.n_tokens, n_parts));
    if (edgekv_cuda_attend(&rows, &qs, (float *) node->data, n_parts, workspace.data(), nullptr))
        abort();
    if (faulty("attend") || (faulty("sinks") && rows.sinks) ||
        (faulty("softcap") && rows.softcap > 0) || (faulty("windows") && qs.start) ||
        (faulty("alibi") && rows.pos) || (faulty("recalled") && qs.recalled) ||
        (faulty("long") && rows.len[0] + rows.len[1] > 700))
        ((float *) node->data)[0] += 9;
    ++g_n_ours;
}

ggml_status graph_compute(ggml_backend_t, ggml_cgraph * graph) {
    ++(g_records ? g_n_recorded : g_n_unrecorded);
    if (fails()) return GGML_STATUS_FAILED;
    return fake::compute(graph, [&](int from, int to) {
        for (int i = from; i < to; ++i)
            if (graph->nodes[i]->op == GGML_OP_CUSTOM) attend(graph->nodes[i]);
    });
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    edgekv_op ours;
    if (op->op == GGML_OP_CUSTOM)
        return edgekv_op_get(op, ours) &&
            edgekv_cuda_attend_supports(op->src[1]->type, op->src[2]->type, (int) op->src[1]->ne[0],
                (int) op->src[2]->ne[0]);
    // iq4_nl: as CUDA
    if (op->op == GGML_OP_FLASH_ATTN_EXT &&
        (getenv("FAKE_NO_FLASH") || op->src[1]->type == GGML_TYPE_IQ4_NL ||
            op->src[2]->type == GGML_TYPE_IQ4_NL))
        return false;
    return ggml_backend_dev_supports_op(ggml_backend_get_device(fake::cpu()), op);
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = { 0xed, 0x6e, 0x4b };
    ggml_backend_i i = {};
    i.get_name = [](ggml_backend_t) { return "Fake"; };
    i.free = [](ggml_backend_t b) { delete b; };
    i.graph_compute = graph_compute;
    return new ggml_backend { &guid, i, dev, nullptr };
}

ggml_backend_device_i device_interface() {
    ggml_backend_device_i i = {};
    i.get_name = i.get_description = [](ggml_backend_dev_t) { return "Fake0"; };
    i.get_memory = [](ggml_backend_dev_t, size_t * free, size_t * total) {
        *free = *total = (size_t) 8 << 30;
    };
    i.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    i.get_props = [](ggml_backend_dev_t dev, ggml_backend_dev_props * p) {
        *p = {};
        p->name = dev->iface.get_name(dev);
        p->description = dev->iface.get_description(dev);
        p->type = dev->iface.get_type(dev);
        dev->iface.get_memory(dev, &p->memory_free, &p->memory_total);
    };
    i.init_backend = init_backend;
    i.get_buffer_type = [](ggml_backend_dev_t) { return buffer_type(); };
    i.get_host_buffer_type = [](ggml_backend_dev_t) { return pinned_type(); };
    i.supports_op = supports_op;
    // pinned memory is reached by copies only
    i.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
        return buft == buffer_type();
    };
    return i;
}

// ---- kernels by name

int score(const edgekv_rows * rows, const edgekv_queries * qs, const edgekv_columns * cols,
    int n_rows_max, void * workspace, void * stream) {
    inside i;
    ++g_n_ours;
    const int error = edgekv_cuda_score(rows, qs, cols, n_rows_max, workspace, stream);
    if (faulty("score") || (faulty("long_score") && qs->n_tokens > 16)) cols->sum[7] = 0.9f;
    return error;
}

int predict(const edgekv_numbered * keys, const edgekv_numbered * values, const edgekv_map * map,
    int n, float * out, float * unlike, void * workspace, void * stream) {
    inside i;
    ++g_n_ours;
    ++g_n_predicted;
    const int error = edgekv_cuda_predict(keys, values, map, n, out, unlike, workspace, stream);
    if (faulty("predict")) out[n - 1] += 30;
    return error;
}

int gather(const char * from, char * to, size_t n_bytes, const int32_t * index, int n_rows,
    void * stream) {
    inside i;
    ++g_n_ours;
    if (fails()) return 1;
    return edgekv_cuda_gather(from, to, n_bytes, index,
        n_rows - (faulty("gather") || (faulty("odd_gather") && n_bytes % 4)), stream);
}

int merge_nearest(const edgekv_numbered * keys, const int32_t * gone, int n_gone,
    const int32_t * kept, int n_kept, float * cosine, int32_t * nearest, void * workspace,
    void * stream) {
    inside i;
    ++g_n_ours;
    ++g_n_merges;
    const int error = edgekv_cuda_merge_nearest(
        keys, gone, n_gone, kept, n_kept, cosine, nearest, workspace, stream);
    if (faulty("nearest")) std::fill_n(nearest, n_gone, 0);
    return error;
}

int merge_fold(const edgekv_numbered * to, const edgekv_shares * shares, const int32_t * begin,
    void * stream) {
    inside i;
    ++g_n_ours;
    ++g_n_merges;
    return faulty("fold") ? 1 : edgekv_cuda_merge_fold(to, shares, begin, stream);
}

int wait(const void * memory) { return fails() ? 1 : edgekv_cuda_wait(memory); }

void record(bool on) { g_records = on; }

void * function(ggml_backend_reg_t, const char * name) {
    const std::map<std::string, void *> all = { { "edgekv_cuda_attend_supports",
                                                    (void *) edgekv_cuda_attend_supports },
        { "edgekv_cuda_score_workspace", (void *) edgekv_cuda_score_workspace },
        { "edgekv_cuda_score", (void *) score }, { "edgekv_cuda_gather", (void *) gather },
        { "edgekv_cuda_attend_parts", (void *) edgekv_cuda_attend_parts },
        { "edgekv_cuda_predict_workspace", (void *) edgekv_cuda_predict_workspace },
        { "edgekv_cuda_predict", (void *) predict },
        { "edgekv_cuda_merge_workspace", (void *) edgekv_cuda_merge_workspace },
        { "edgekv_cuda_merge_nearest", (void *) merge_nearest },
        { "edgekv_cuda_merge_fold", (void *) merge_fold }, { "edgekv_cuda_wait", (void *) wait },
        { "edgekv_cuda_record", (void *) record },
        { "edgekv_cuda_calls", (void *) edgekv_cuda_calls } };
    const auto it = all.find(name);
    return it == all.end() ? nullptr : it->second;
}

ggml_backend_reg * registry() {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION,
        { [](ggml_backend_reg_t) { return "Fake"; }, [](ggml_backend_reg_t) -> size_t { return 1; },
            [](ggml_backend_reg_t, size_t) { return the_device(); }, function },
        nullptr };
    return &reg;
}

ggml_backend_dev_t the_device() {
    static ggml_backend_device dev = { device_interface(), registry(), nullptr };
    return &dev;
}

} // namespace

extern "C" ggml_backend_reg_t ggml_backend_init() { return registry(); }
extern "C" long fake_device_fails(long n) { return std::exchange(g_n_until_failure, n); }
extern "C" long fake_device_n_ours() { return g_n_ours; }
extern "C" long fake_device_n_merges() { return g_n_merges; }
extern "C" long fake_device_n_predicted() { return g_n_predicted; }
// graphs that could have been recorded, and those of prompts that could not
extern "C" long fake_device_n_graphs(bool recorded) {
    return recorded ? g_n_recorded : g_n_unrecorded;
}
// buffers of this size in pinned memory
extern "C" long fake_device_n_pinned(long n_bytes) {
    return std::count(g_pinned.begin(), g_pinned.end(), (size_t) n_bytes);
}
