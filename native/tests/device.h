#pragma once
// Memory of the device that the CUDA kernels run on: a GPU, or the CPU where they are compiled
// against cuda/.

#include "check.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <vector>

inline void must(int error, const char * what) {
    if (error == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString((cudaError_t) error));
    exit(1);
}

template <typename T>
struct device_array {
    T * data = nullptr;
    size_t n = 0;

    explicit device_array(size_t n) : n(n) {
        // rows are readable up to the next 16 bytes
        must(cudaMalloc((void **) &data, n * sizeof(T) + 16), "cudaMalloc");
        must(cudaMemset(data, 0xff, n * sizeof(T) + 16), "cudaMemset"); // poison: NaN, -1
    }
    explicit device_array(const std::vector<T> & x) : device_array(x.size()) { put(x); }
    ~device_array() { cudaFree(data); }
    device_array(const device_array &) = delete;

    void put(const std::vector<T> & x) {
        if (!x.empty())
            must(cudaMemcpy(data, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice),
                "cudaMemcpy");
    }
    std::vector<T> get() const {
        std::vector<T> x(n);
        must(cudaDeviceSynchronize(), "a kernel");
        if (n)
            must(cudaMemcpy(x.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return x;
    }
    T * or_null() { return n ? data : nullptr; }
};

// threads in another order, where that can be chosen: what comes out must not change
inline void set_order(int i) {
#ifdef EDGEKV_STANDIN
    standin::backwards = i % 2;
#else
    (void) i;
#endif
}
