// evict on CUDA: rows move as bytes, whatever their type.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-device.cuh"

namespace edgekv_cuda {
namespace {

constexpr int WARPS = 8;

struct gather_args {
    const char * from;
    char * to;
    size_t n_bytes;
    const int32_t * index;
    int n_rows;
};

// U: as many bytes at once as all addresses allow; a warp per row
template <typename U>
__global__ void gather_rows(const gather_args a) {
    for (int i = blockIdx.x*WARPS + threadIdx.x/WARP; i < a.n_rows; i += gridDim.x*WARPS) {
        const U * from = (const U *) (a.from + (size_t) (a.index ? a.index[i] : i)*a.n_bytes);
        U * to = (U *) (a.to + (size_t) i*a.n_bytes);
        for (int j = threadIdx.x % WARP; j < (int) (a.n_bytes/sizeof(U)); j += WARP) to[j] = from[j];
    }
}

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

int edgekv_cuda_gather(const char * from, char * to, size_t n_bytes, const int32_t * index, int n_rows, void * stream) {
    count(GATHER);
    if (n_rows <= 0) return cudaSuccess;
    const size_t odd = (uintptr_t) from | (uintptr_t) to | n_bytes;
    const auto kernel = odd % 16 == 0 ? gather_rows<uint4> : odd % 8 == 0 ? gather_rows<uint2> : odd % 4 == 0 ? gather_rows<uint32_t> : gather_rows<uint16_t>;
    if (odd % 2) return cudaErrorInvalidValue;
    const int n_blocks = (n_rows + WARPS - 1)/WARPS;
    return launch(kernel, dim3(n_blocks < 8192 ? n_blocks : 8192), WARPS*WARP, 0, stream, gather_args { from, to, n_bytes, index, n_rows });
}

// Through the workspace, some rows at a time. A row's source lies at or behind its target, so none that is still needed is overwritten.
int edgekv_cuda_compact(char * rows, size_t n_bytes, const int32_t * index, int n_rows, void * workspace, size_t n_workspace, void * stream) {
    const int step = (int) (n_workspace/n_bytes < (size_t) n_rows ? n_workspace/n_bytes : n_rows);
    if (n_rows > 0 && step == 0) return cudaErrorInvalidValue;
    for (int i = 0; i < n_rows; i += step) {
        const int n = n_rows - i < step ? n_rows - i : step;
        int e = edgekv_cuda_gather(rows, (char *) workspace, n_bytes, index + i, n, stream);
        if (e == cudaSuccess) e = cudaMemcpyAsync(rows + (size_t) i*n_bytes, workspace, n*n_bytes, cudaMemcpyDeviceToDevice, (cudaStream_t) stream);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

int edgekv_cuda_wait(const void * memory) {
    cudaPointerAttributes where;
    cudaError_t e = cudaPointerGetAttributes(&where, memory);
    if (e == cudaSuccess) e = cudaSetDevice(where.device);
    if (e == cudaSuccess) e = cudaDeviceSynchronize();
    return told(e);
}

long edgekv_cuda_calls(const char * verb) {
    for (int v = 0; v < N_VERBS; ++v) if (strcmp(verb, VERB_NAMES[v]) == 0) return g_n_calls[v];
    return -1;
}
