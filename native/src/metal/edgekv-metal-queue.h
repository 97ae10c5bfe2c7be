#pragma once
// Calls of our kernels on ggml-metal's C interface.

#include "edgekv-dispatch.h"

#include "ggml-metal/ggml-metal-device.h"

#include <initializer_list>

namespace edgekv_metal {

// No Apple GPU has run the kernels yet: whoever wants them says so, by EDGEKV_METAL=1. Without them
// a device is used as any other backend's
bool wanted();

// whether a device takes this call; the kernel is compiled when first asked
bool can_run(ggml_metal_device_t dev, const call & c);

// buffers in the order of KERNELS. Metal may run what is queued in any order between barriers
void queue_bytes(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const call & c, void * args,
    size_t n_args, std::initializer_list<ggml_metal_buffer_id> buffers);

template <typename Args>
void queue(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const call & c, Args args,
    std::initializer_list<ggml_metal_buffer_id> buffers) {
    queue_bytes(dev, enc, c, &args, sizeof(args), buffers);
}

} // namespace edgekv_metal
