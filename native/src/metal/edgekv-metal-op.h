#pragma once
// What the patched ggml-metal calls: the node that edgekv-op.h describes, and functions by name.

#include <cstddef>

struct ggml_metal_buffer;
struct ggml_metal_device;
struct ggml_metal_encoder;
struct ggml_tensor;

// supports_op: of a custom node, whether it is ours and the device has kernels for its types and
// sizes. Compiles them when first asked
bool edgekv_metal_op_supported(ggml_metal_device * dev, const ggml_tensor * node);
// get_alloc_size: bytes that a custom node needs behind its result, 0 if it is not ours
size_t edgekv_metal_op_extra(const ggml_tensor * node);
// encode: queues it; it must be ours
void edgekv_metal_op_encode(ggml_metal_device * dev, ggml_metal_encoder * enc, ggml_tensor * dst);

// alloc_buffer, free_buffer: functions by name take addresses, Metal's kernels buffers
void edgekv_metal_memory_made(ggml_metal_device * dev, ggml_metal_buffer * buffer, size_t n_bytes);
void edgekv_metal_memory_gone(ggml_metal_buffer * buffer);
// get_proc_address: null for any other name
void * edgekv_metal_function(const char * name);
