// Pipelines of our kernels. They are a library of their own: one source text, put together by CMake
// (native/metal-source.cmake), which the system compiles when a device is first asked about a
// kernel.
#include "edgekv-metal-queue.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

extern const char edgekv_metal_source[];

namespace edgekv_metal {

namespace {

struct free_library {
    void operator()(ggml_metal_library * lib) const { ggml_metal_library_free(lib); }
};

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
    if (new_device)
        k.library.reset(ggml_metal_library_init_from_source(dev, edgekv_metal_source, true));
    const auto [it, fresh] = k.pipelines.try_emplace(kernel);
    if (fresh && k.library) {
        it->second = ggml_metal_library_compile_pipeline(k.library.get(), kernel, kernel, nullptr);
        if (it->second.pipeline &&
            ggml_metal_pipeline_max_theads_per_threadgroup(it->second) < EDGEKV_METAL_THREADS)
            it->second = {};
    }
    return it->second;
}

} // namespace

bool wanted() {
    const char * word = getenv("EDGEKV_METAL");
    return word && strcmp(word, "1") == 0;
}

bool can_run(ggml_metal_device_t dev, const call & c) {
    if (!wanted()) return false;
    const auto * props = ggml_metal_device_get_props(dev);
    return props->supports_gpu_family_apple7 && // others have simd-groups of other sizes
        c.n_shared <= props->max_theadgroup_memory_size && pipeline_of(dev, c.kernel).pipeline;
}

void queue_bytes(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const call & c, void * args,
    size_t n_args, std::initializer_list<ggml_metal_buffer_id> buffers) {
    if (c.groups_x == 0 || c.groups_y == 0) return;
    ggml_metal_encoder_set_pipeline(enc, pipeline_of(dev, c.kernel));
    ggml_metal_encoder_set_bytes(enc, args, n_args, 0);
    int at = 0;
    for (const auto & b : buffers) ggml_metal_encoder_set_buffer(enc, b, ++at);
    ggml_metal_encoder_set_threadgroup_memory_size(enc, c.n_shared, 0);
    ggml_metal_encoder_dispatch_threadgroups(
        enc, (int) c.groups_x, (int) c.groups_y, 1, EDGEKV_METAL_THREADS, 1, 1);
}

} // namespace edgekv_metal
