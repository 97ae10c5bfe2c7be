// evict on CUDA: rows move as bytes, whatever their type.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-device.cuh"

namespace edgekv_cuda {
namespace {

constexpr int THREADS = 256;
constexpr int EACH = 4; // pieces that a thread has under way

struct gather_args {
    const char * from;
    char * to;
    size_t n_bytes;
    const int32_t * index;
    int n_rows;
};

// U: a piece, as many bytes at once as all addresses allow. grid [n_rows/n_together]: a block's
// threads share the pieces of n_together rows
template <typename U>
__global__ void __launch_bounds__(THREADS) gather_rows(const gather_args a, int n_together) {
    const int n_pieces = (int) (a.n_bytes / sizeof(U)), first = blockIdx.x * n_together,
              n = min(n_together, a.n_rows - first) * n_pieces;
    U * to = (U *) (a.to + (size_t) first * a.n_bytes);
    for (int i0 = threadIdx.x; i0 < n; i0 += EACH * THREADS) {
        U x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int i = i0 + j * THREADS, row = i / n_pieces;
            if (i < n)
                x[j] = ((const U *) (a.from +
                    (size_t) a.index[first + row] * a.n_bytes))[i - row * n_pieces];
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j)
            if (i0 + j * THREADS < n) to[i0 + j * THREADS] = x[j];
    }
}

template <typename U>
cudaError_t launch_gather(const gather_args & a, void * stream) {
    const size_t n_pieces = a.n_bytes / sizeof(U);
    const int n_together = (int) (n_pieces < EACH * THREADS ? EACH * THREADS / n_pieces : 1);
    return launch(
        gather_rows<U>, dim3((a.n_rows - 1) / n_together + 1), THREADS, 0, stream, a, n_together);
}

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

int edgekv_cuda_gather(const char * from, char * to, size_t n_bytes, const int32_t * index,
    int n_rows, void * stream) {
    count(GATHER);
    if (n_rows <= 0) return cudaSuccess;
    if (!index)
        return told(cudaMemcpyAsync(
            to, from, n_rows * n_bytes, cudaMemcpyDeviceToDevice, (cudaStream_t) stream));
    const gather_args a = { from, to, n_bytes, index, n_rows };
    const size_t odd = (uintptr_t) from | (uintptr_t) to | n_bytes;
    if (odd % 2) return cudaErrorInvalidValue;
    return odd % 16 == 0 ? launch_gather<uint4>(a, stream)
        : odd % 8 == 0   ? launch_gather<uint2>(a, stream)
        : odd % 4 == 0   ? launch_gather<uint32_t>(a, stream)
                         : launch_gather<uint16_t>(a, stream);
}

int edgekv_cuda_wait(const void * memory) {
    cudaPointerAttributes where;
    cudaError_t e = cudaPointerGetAttributes(&where, memory);
    if (e == cudaSuccess) e = cudaSetDevice(where.device);
    if (e == cudaSuccess) e = cudaDeviceSynchronize();
    return told(e);
}

long edgekv_cuda_calls(const char * verb) {
    for (int v = 0; v < N_VERBS; ++v)
        if (strcmp(verb, VERB_NAMES[v]) == 0) return g_n_calls[v];
    return -1;
}
