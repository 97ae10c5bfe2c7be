#pragma once
// What CUDA's device language lacks as plain functions: tensor-core multiply, asynchronous copy,
// dynamic shared memory, launch. native/tests/cuda has all of them for the CPU, so that the same
// kernels can be run there.

#include "../cpu/edgekv-cpu.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace edgekv_cuda {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

#ifdef __CUDACC__

// c [16, 8] += a [16, 16] b [16, 8], f16 in, f32 out. Lane 4g + t holds of a rows g and g + 8 at
// columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]); of b those rows (b0, b1) at
// column g; of c rows g (c[0], c[1]) and g + 8 (c[2], c[3]) at columns 2t, 2t + 1 (PTX ISA, "Matrix
// Fragments for mma.m16n8k16")
__device__ __forceinline__ void mma(float (&c)[4], const uint4 & a, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.z), "r"(a.w), "r"(b1));
#else
    __trap(); // edgekv_cuda_ready keeps older devices out
#endif
}

// 16 bytes from global to shared memory, both aligned; there after copy_wait. Turing copies at
// once.
__device__ __forceinline__ void copy16(void * to, const void * from) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t) __cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
#else
    *(uint4 *) to = *(const uint4 *) from;
#endif
}

__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// until at most the newest n groups of this thread are under way
template <int n>
__device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

__device__ __forceinline__ char * dynamic_shared() {
    extern __shared__ __align__(16) char edgekv_shared[];
    return edgekv_shared;
}

// cudaLaunchKernelEx came with CUDA 11.8
template <typename... Args>
inline cudaError_t start(void (*kernel)(Args...), dim3 grid, dim3 block, size_t n_shared,
    cudaStream_t stream, Args... args) {
    void * all[] = { &args... };
    return cudaLaunchKernel((const void *) kernel, grid, block, all, n_shared, stream);
}

#else
using namespace standin;
#endif

// an error that the caller hears of: whoever asks for the last one next shall not take it for its
// own
inline cudaError_t told(cudaError_t e) {
    if (e != cudaSuccess) (void) cudaGetLastError();
    return e;
}

template <typename Kernel, typename... Args>
inline cudaError_t launch(
    Kernel kernel, dim3 grid, int n_threads, size_t n_shared, void * stream, Args... args) {
    return told(
        start(kernel, grid, dim3((unsigned) n_threads), n_shared, (cudaStream_t) stream, args...));
}

__device__ __forceinline__ float max_over(float x, int width) {
    for (int i = 1; i < width; i *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}

__device__ __forceinline__ float sum_over(float x, int width) {
    for (int i = 1; i < width; i *= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
    return x;
}

// e^(x - m) where both may be -infinity
__device__ __forceinline__ float exp_below(float x, float m) {
    return x == -INFINITY ? 0.0f : __expf(x - m);
}

// scale, then soft cap; tanh through exp, because --use_fast_math's own has 11 bits
__device__ __forceinline__ float logit(float x, float scale, float softcap) {
    x *= scale;
    if (softcap == 0.0f) return x;
    const float y = fminf(fabsf(x / softcap), 20.0f);
    return copysignf(softcap * (1.0f - 2.0f / (__expf(2.0f * y) + 1.0f)), x);
}

// what ALiBi takes from the logits of a query of head h that sees the rows of KV head k before
// `hi`: nothing where max_bias is 0
struct alibi {
    const float * pos; // of the head's rows, or null
    float slope, at;

    __device__ alibi(const edgekv_rows & rows, int k, int h, int hi)
        : pos(nullptr), slope(0), at(0) {
        if (rows.max_bias == 0.0f || hi <= 0) return;
        pos = rows.pos + rows.first[k];
        slope = edgekv_alibi_slope(rows.max_bias, rows.n_head, h);
        at = pos[hi - 1];
    }
    // of a row that the query sees
    __device__ float operator()(int r) const { return pos ? slope * (pos[r] - at) : 0.0f; }
};

} // namespace edgekv_cuda
