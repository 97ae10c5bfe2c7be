// predict on CUDA: the linear map of the score kvzap, row by row, so that keys and values need not
// travel. The definition of correct is cpu/edgekv-predict.cpp. First the mean direction of the
// keys: sums over blocks of rows, added up in order, so that two runs agree. Then a warp per row,
// its key in shared memory, where RoPE's pairs are found whichever they are.
#include "edgekv-calls.h"
#include "edgekv-cuda.h"
#include "edgekv-quantize.cuh"

namespace edgekv_cuda {
namespace {

constexpr int WARPS = 8;
constexpr int BLOCK = 256; // rows of one sum
constexpr int MAX_D = 256;
constexpr int VALUES = MAX_D / WARP; // of a row, for each lane
static_assert(WARPS * WARP == MAX_D, "sum_keys adds up with a thread for each column");
constexpr float TINY = 1e-6f, LEAST = 1e-3f, NO_LENGTH = 1e-12f; // as there

struct predict_args {
    edgekv_numbered keys, values;
    edgekv_map map;
    int n;
    float * sums;      // [blocks][d_k]
    float * direction; // [d_k]
    float *out, *unlike;
};

__device__ __forceinline__ float value_of(const edgekv_numbered & rows, int r, int j) {
    return read_value(rows.type,
        rows.base + (size_t) r * rows.nb + j / CHUNK * chunk_bytes(rows.type), j % CHUNK);
}

// grid [blocks]: of keys with length 1
__global__ void __launch_bounds__(WARPS * WARP) sum_keys(const predict_args a) {
    __shared__ float sums[WARPS][MAX_D];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d = a.keys.d,
              end = min(((int) blockIdx.x + 1) * BLOCK, a.n);
    float sum[VALUES] = {};
    for (int r = blockIdx.x * BLOCK + warp; r < end; r += WARPS) {
        float x[VALUES], square = 0;
#pragma unroll
        for (int c = 0; c < VALUES; ++c) {
            const int j = c * WARP + lane;
            x[c] = j < d ? value_of(a.keys, r, j) : 0.0f;
            square += x[c] * x[c];
        }
        const float inverse = 1.0f / fmaxf(sqrtf(sum_over(square, WARP)), NO_LENGTH);
#pragma unroll
        for (int c = 0; c < VALUES; ++c) sum[c] += x[c] * inverse;
    }
#pragma unroll
    for (int c = 0; c < VALUES; ++c) sums[warp][c * WARP + lane] = sum[c];
    __syncthreads();
    const int j = threadIdx.x;
    float all = 0;
    for (int w = 0; w < WARPS; ++w) all += sums[w][j];
    if (j < d) a.sums[(size_t) blockIdx.x * d + j] = all;
}

// one block of MAX_D threads
__global__ void __launch_bounds__(MAX_D) direction_of(const predict_args a, int n_sums) {
    __shared__ float squares[VALUES];
    const int j = threadIdx.x, d = a.keys.d;
    double sum = 0;
    for (int i = 0; i < n_sums && j < d; ++i) sum += a.sums[(size_t) i * d + j];
    const float x = (float) (sum / a.n), square = sum_over(x * x, WARP);
    if (j % WARP == 0) squares[j / WARP] = square;
    __syncthreads();
    float all = 0;
    for (int i = 0; i < VALUES; ++i) all += squares[i];
    if (j < d) a.direction[j] = x / fmaxf(sqrtf(all), NO_LENGTH);
}

// x [d] times a Walsh-Hadamard matrix, block by block, by a warp; size: a power of two that divides
// d; 0: as it is
__device__ __forceinline__ void turn(float * x, int d, int size) {
    const int lane = threadIdx.x % WARP;
    for (int half = 1; half < size; half *= 2) {
        __syncwarp();
        for (int i = lane; i < d / 2; i += WARP) {
            const int j = i / half * 2 * half + i % half;
            const float p = x[j], q = x[j + half];
            x[j] = p + q;
            x[j + half] = p - q;
        }
    }
    __syncwarp();
    const float scale = size > 1 ? 1.0f / sqrtf((float) size) : 1.0f;
    for (int i = lane; i < d; i += WARP) x[i] *= scale;
    __syncwarp();
}

__device__ __forceinline__ float log_of(float length) { return __logf(length + LEAST); }

// any grid
__global__ void __launch_bounds__(WARPS * WARP) predict_rows(const predict_args a) {
    __shared__ float of_value[MAX_D], keys[WARPS][MAX_D];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d_k = a.keys.d,
              d_v = a.values.d, half = d_k / 2;
    for (int j = threadIdx.x; j < d_v; j += WARPS * WARP) of_value[j] = a.map.weights[j];
    __syncthreads();
    // instead of the values: the matrix is symmetric
    if (warp == 0) turn(of_value, d_v, a.map.turn_v);
    __syncthreads();
    const float * of_logs = a.map.weights + d_v;
    const int step = a.map.neighbours ? 2 : 1, other = a.map.neighbours ? 1 : half;
    float * key = keys[warp];
    for (int r = blockIdx.x * WARPS + warp; r < a.n; r += gridDim.x * WARPS) {
        float square_k = 0, along = 0, square_v = 0, sum = 0, sum_v = 0;
        for (int j = lane; j < d_k; j += WARP) {
            const float x = value_of(a.keys, r, j);
            key[j] = x;
            square_k += x * x;
            along += x * a.direction[j];
        }
        for (int j = lane; j < d_v; j += WARP) {
            const float x = value_of(a.values, r, j);
            square_v += x * x;
            sum_v += x * of_value[j];
        }
        turn(key, d_k, a.map.turn_k);
        for (int i = lane; i < half; i += WARP) {
            const float p = key[step * i], q = key[step * i + other];
            sum += of_logs[i] * log_of(sqrtf(p * p + q * q));
        }
        __syncwarp(); // the key is used
        const float l_k = sqrtf(sum_over(square_k, WARP)), l_v = sqrtf(sum_over(square_v, WARP));
        const float unlike = -sum_over(along, WARP) / fmaxf(l_k, NO_LENGTH);
        sum = sum_over(sum, WARP) + sum_over(sum_v, WARP) / fmaxf(l_v, TINY);
        if (lane) continue;
        a.unlike[r] = unlike;
        a.out[r] = sum + of_logs[half] * log_of(l_k) + of_logs[half + 1] * log_of(l_v) +
            of_logs[half + 2] * unlike + of_logs[half + 3];
    }
}

static int n_blocks(int n) { return (n + BLOCK - 1) / BLOCK; }

} // namespace
} // namespace edgekv_cuda

using namespace edgekv_cuda;

size_t edgekv_cuda_predict_workspace(const edgekv_numbered * keys, int n) {
    return ((size_t) n_blocks(n) + 1) * keys->d * sizeof(float);
}

int edgekv_cuda_predict(const edgekv_numbered * keys, const edgekv_numbered * values,
    const edgekv_map * map, int n, float * out, float * unlike, void * workspace, void * stream) {
    count(PREDICT);
    if (n <= 0) return cudaSuccess;
    predict_args a = { *keys, *values, *map, n, (float *) workspace, nullptr, out, unlike };
    a.direction = a.sums + (size_t) n_blocks(n) * keys->d;
    cudaError_t e = launch(sum_keys, dim3(n_blocks(n)), WARPS * WARP, 0, stream, a);
    if (e == cudaSuccess) e = launch(direction_of, dim3(1), MAX_D, 0, stream, a, n_blocks(n));
    if (e == cudaSuccess)
        e = launch(
            predict_rows, dim3(min((n + WARPS - 1) / WARPS, 4096)), WARPS * WARP, 0, stream, a);
    return e;
}
