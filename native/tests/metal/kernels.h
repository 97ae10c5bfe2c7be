#pragma once
// The Metal kernels by name, run on the CPU.

#include "metal/edgekv-dispatch.h"

#include <vector>

namespace metal_standin {

constexpr uint32_t MAX_SHARED = 32 * 1024; // bytes of threadgroup memory that every Apple GPU has

struct signature {
    size_t n_args, n_buffers;
}; // of a kernel as compiled

const signature * find(const char * kernel); // null: there is none
// false: the call does not fit the kernel, or it wrote behind its threadgroup memory
bool run(const edgekv_metal::call & c, const void * args, size_t n_args,
    const std::vector<const void *> & buffers);

} // namespace metal_standin
