#include "edgekv-kernels.h"

#include <stdexcept>

static const edgekv_cpu_kernels & find() {
    const auto device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto get = device ? (const edgekv_cpu_kernels * (*)()) ggml_backend_reg_get_proc_address(
                                  ggml_backend_dev_backend_reg(device), "edgekv_cpu_kernels")
                            : nullptr;
    if (!get) throw std::runtime_error("the CPU backend of edgekv is not loaded");
    return *get();
}

const edgekv_cpu_kernels & edgekv_cpu() {
    static const edgekv_cpu_kernels & all = find();
    return all;
}
