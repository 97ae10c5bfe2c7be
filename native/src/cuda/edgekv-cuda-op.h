#pragma once
// What the patched ggml-cuda.cu calls: the node that edgekv-op.h describes; and what it offers.

#include <mutex>

struct ggml_backend_cuda_context;
struct ggml_tensor;

// supports_op: of a custom node, whether it is ours and there is a kernel for its types and sizes
bool edgekv_cuda_op_supported(const ggml_tensor * op);
// compute_forward: queues it; false if it is not ours
bool edgekv_cuda_op(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
// get_proc_address: functions of edgekv-cuda.h by their names, null for any other name
void * edgekv_cuda_function(const char * name);

// whether graphs that this thread gives the device may be recorded, to be replayed; those of a
// prompt never come again
bool edgekv_cuda_records();

// ggml-cuda.cu's own: waits until no thread records a CUDA graph; none begins to while the lock is
// held
std::unique_lock<std::mutex> edgekv_cuda_no_recording();
