#pragma once
// CUDA kernels of edgekv. Structs are those of the CPU kernels, their pointers point to device
// memory (lengths too, so that a captured graph stays right while heads grow). Nothing here
// allocates or waits: workspace is the caller's, work is queued on the stream. Each function
// returns a cudaError_t, 0 = queued. The current device must be the one whose memory it is. K and V
// must be readable up to the next 16 bytes behind their last row.

#include "../cpu/edgekv-cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- attend: decode attention over heads of different length

// rows of these types and sizes can be attended to: f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0,
// iq4_nl; heads of up to 256 values
GGML_BACKEND_API bool edgekv_cuda_attend_supports(
    enum ggml_type type_k, enum ggml_type type_v, int d_k, int d_v);
// parts that fill the current device: one wave of blocks
GGML_BACKEND_API int edgekv_cuda_attend_parts(const struct edgekv_rows * rows);
// bytes
GGML_BACKEND_API size_t edgekv_cuda_attend_workspace(
    const struct edgekv_rows * rows, int n_tokens, int n_parts);
// dst [n_tokens][n_head][d_v]
GGML_BACKEND_API int edgekv_cuda_attend(const struct edgekv_rows * rows,
    const struct edgekv_queries * qs, float * dst, int n_parts, void * workspace, void * stream);

// ---- score: column statistics of the attention of some queries; K of the types and sizes that
// attend takes

// n_rows_max: at least the longest head
// bytes
GGML_BACKEND_API size_t edgekv_cuda_score_workspace(
    const struct edgekv_rows * rows, int n_tokens, int n_rows_max);
// both passes; cols accumulates over calls as on the CPU
GGML_BACKEND_API int edgekv_cuda_score(const struct edgekv_rows * rows,
    const struct edgekv_queries * qs, const struct edgekv_columns * cols, int n_rows_max,
    void * workspace, void * stream);

// ---- predict: the linear map of the score kvzap over the rows [0, n) of a head, of the types and
// sizes that attend takes

// bytes
GGML_BACKEND_API size_t edgekv_cuda_predict_workspace(const struct edgekv_numbered * keys, int n);
// out, unlike [n]: as on the CPU
GGML_BACKEND_API int edgekv_cuda_predict(const struct edgekv_numbered * keys,
    const struct edgekv_numbered * values, const struct edgekv_map * map, int n, float * out,
    float * unlike, void * workspace, void * stream);

// ---- evict: rows as bytes. (New rows are appended by ggml_set_rows.)

// row i of to = row index[i] of from, or row i where index is null; the two do not overlap; all
// addresses and n_bytes are even
GGML_BACKEND_API int edgekv_cuda_gather(
    const char * from, char * to, size_t n_bytes, const int32_t * index, int n_rows, void * stream);

// ---- merge: fold evicted rows into kept ones; rows of the types and sizes that attend takes

// search, as on the CPU but with values rounded to halves; gone, kept, cosine, nearest on the
// device, n_kept at least 1 bytes
GGML_BACKEND_API size_t edgekv_cuda_merge_workspace(
    const struct edgekv_numbered * keys, int n_kept);
GGML_BACKEND_API int edgekv_cuda_merge_nearest(const struct edgekv_numbered * keys,
    const int32_t * gone, int n_gone, const int32_t * kept, int n_kept, float * cosine,
    int32_t * nearest, void * workspace, void * stream);
// fold; begin [shares->n]: where each row's list begins among the sources
GGML_BACKEND_API int edgekv_cuda_merge_fold(const struct edgekv_numbered * to,
    const struct edgekv_shares * shares, const int32_t * begin, void * stream);

// ---- for callers without CUDA headers: makes the device that has this memory the current one and
// waits for all its streams

GGML_BACKEND_API int edgekv_cuda_wait(const void * memory);

// ---- for tests: how often attend, score, predict, gather, nearest or fold was queued since the
// program began; -1 for another name

GGML_BACKEND_API long edgekv_cuda_calls(const char * verb);

#ifdef __cplusplus
}
#endif
