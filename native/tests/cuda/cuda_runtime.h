#pragma once
// Stand-in for CUDA's header of the same name, so that kernels compile as C++ and run on the CPU
// (fibers.h); copies arrive as late as they may.

#include "../fibers.h"

#include <cmath>
#include <cstdlib>
#include <tuple>

#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

using dim3 = standin::size3;
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return { x, y, z, w }; }

// ---- what a block's threads do together

namespace standin {

void launch(size3 grid, size3 block, const std::function<void()> & kernel);
void mma(float (&c)[4], const uint4 & a, uint32_t b0, uint32_t b1);
void copy16(void * to, const void * from);
void copy_commit();
void copy_wait_but(int n_groups);
template <int n>
void copy_wait() {
    copy_wait_but(n);
}

} // namespace standin

#define threadIdx (standin::now->index)
inline dim3 &blockIdx = standin::group, &gridDim = standin::n_groups,
            &blockDim = standin::group_size;

inline void __syncthreads() { standin::block_barrier(); }
inline void __syncwarp() { standin::exchange(nullptr, 0); }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return standin::lane_value(x, (int) (threadIdx.x % 32) ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
    return standin::lane_value(x, lane);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int n) {
    return standin::lane_value(
        x, (int) (threadIdx.x % 32) - ((int) (threadIdx.x % 32) < n ? 0 : n));
}
inline bool __all_sync(unsigned, bool x) {
    const char * all = standin::exchange(&x, sizeof(x));
    for (int i = 0; i < 32; ++i)
        if (!all[i]) return false;
    return true;
}

inline unsigned __ballot_sync(unsigned, bool x) {
    const char * all = standin::exchange(&x, sizeof(x));
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (unsigned) (all[i] != 0) << i;
    return r;
}
inline int __ffs(int x) { return __builtin_ffs(x); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = (uint64_t) y << 32 | x;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        uint32_t b = (uint32_t) (bytes >> 8 * (selector >> 4 * i & 7) & 0xff);
        if (selector >> 4 * i & 8) b = b & 0x80 ? 0xff : 0;
        r |= b << 8 * i;
    }
    return r;
}

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- the runtime, as far as edgekv uses it

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
typedef struct standin_stream * cudaStream_t;
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrL2CacheSize
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

struct cudaPointerAttributes {
    int device;
};
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes * where, const void *) {
    where->device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int * device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr what, int) {
    *value = what == cudaDevAttrMultiProcessorCount ? 3
        : what == cudaDevAttrL2CacheSize            ? 0
                                                    : standin::MAX_SHARED;
    return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int n) {
    return n <= standin::MAX_SHARED ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int * n, F, int, size_t) {
    *n = 2;
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void ** p, size_t n) {
    *p = aligned_alloc(256, (n + 255) / 256 * 256);
    return *p ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaFree(void * p) {
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void * p, int value, size_t n) {
    memset(p, value, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void * to, const void * from, size_t n, cudaMemcpyKind) {
    memcpy(to, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(
    void * to, const void * from, size_t n, cudaMemcpyKind, cudaStream_t) {
    memcpy(to, from, n);
    return cudaSuccess;
}
typedef struct standin_event * cudaEvent_t;
inline cudaError_t cudaEventCreate(cudaEvent_t * e) {
    *e = nullptr;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float * ms, cudaEvent_t, cudaEvent_t) {
    *ms = 1;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char * cudaGetErrorString(cudaError_t) { return "invalid value"; }

namespace standin {
template <typename... Args>
cudaError_t start(
    void (*kernel)(Args...), dim3 grid, dim3 block, size_t n_shared, cudaStream_t, Args... args) {
    if (n_shared > (size_t) MAX_SHARED || grid.x == 0 || grid.y == 0) return cudaErrorInvalidValue;
    launch(grid, block, [&] { kernel(args...); });
    return cudaSuccess;
}
} // namespace standin
