// attend as a node of a graph on CUDA, and the other kernels by name for a library that does not
// link to this one
#include "edgekv-cuda-op.h"
#include "edgekv-cuda.h"
#include "edgekv-op.h"

#include "ggml-backend.h"
#include "ggml-cuda/common.cuh"

bool edgekv_cuda_op_supported(const ggml_tensor * node) {
    edgekv_op op;
    if (!edgekv_op_get(node, op)) return false;
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) &&
        edgekv_cuda_attend_supports(k->type, v->type, (int) k->ne[0], (int) v->ne[0]);
}

bool edgekv_cuda_op(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    edgekv_op op;
    if (!edgekv_op_get(dst, op)) return false;
    edgekv_rows rows;
    edgekv_queries qs;
    edgekv_op_inputs(dst, op, rows, qs);
    const int n_query_blocks =
        (qs.n_tokens * (rows.n_head / rows.n_head_kv) + 15) / 16; // of a part
    const int n_parts = std::max(1, edgekv_cuda_attend_parts(&rows) / n_query_blocks);
    ggml_cuda_pool_alloc<char> workspace(
        ctx.pool(), edgekv_cuda_attend_workspace(&rows, qs.n_tokens, n_parts));
    CUDA_CHECK((cudaError_t) edgekv_cuda_attend(
        &rows, &qs, (float *) dst->data, n_parts, workspace.get(), ctx.stream()));
    return true;
}

// 1: the kernels were compiled for this device, from Turing on; 0: not
static int ready(ggml_backend_dev_t dev) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); ++i) {
        if (ggml_backend_reg_dev_get(reg, i) == dev)
            return turing_mma_available(ggml_cuda_info().devices[i].cc);
    }
    return 0;
}

static thread_local bool t_records = true;

bool edgekv_cuda_records() { return t_records; }

static void record(bool on) { t_records = on; }

// a graph that another thread records cannot be waited for, and would be lost
static int wait_unrecorded(const void * memory) {
    const auto lock = edgekv_cuda_no_recording();
    return edgekv_cuda_wait(memory);
}

void * edgekv_cuda_function(const char * name) {
    static const std::pair<const char *, void *> all[] = {
        { "edgekv_cuda_ready", (void *) ready },
        { "edgekv_cuda_attend_supports", (void *) edgekv_cuda_attend_supports },
        { "edgekv_cuda_score_workspace", (void *) edgekv_cuda_score_workspace },
        { "edgekv_cuda_score", (void *) edgekv_cuda_score },
        { "edgekv_cuda_attend_parts", (void *) edgekv_cuda_attend_parts },
        { "edgekv_cuda_predict_workspace", (void *) edgekv_cuda_predict_workspace },
        { "edgekv_cuda_predict", (void *) edgekv_cuda_predict },
        { "edgekv_cuda_gather", (void *) edgekv_cuda_gather },
        { "edgekv_cuda_merge_workspace", (void *) edgekv_cuda_merge_workspace },
        { "edgekv_cuda_merge_nearest", (void *) edgekv_cuda_merge_nearest },
        { "edgekv_cuda_merge_fold", (void *) edgekv_cuda_merge_fold },
        { "edgekv_cuda_wait", (void *) wait_unrecorded },
        { "edgekv_cuda_record", (void *) record },
        { "edgekv_cuda_calls", (void *) edgekv_cuda_calls },
    };
    for (const auto & [known, function] : all)
        if (strcmp(name, known) == 0) return function;
    return nullptr;
}
