#pragma once
// Kernels of ours on a device, found by name in the backend that owns the memory: this library does
// not link to it. Metal's functions have the types of CUDA's.

#include "edgekv-matrix.h"
#include "cuda/edgekv-cuda.h"

#include <functional>
#include <map>
#include <mutex>

// columns of one observer on a device, where they add up from a layer's first chunk to its last
struct edgekv_device_columns {
    edgekv_columns at = {}; // addresses there
    // room for those arrays of `here` that are wanted, all zero; group: query heads of a KV head
    void begin(ggml_backend_buffer_type_t buft, const edgekv_columns & here, int group);
    void fetch(const edgekv_columns & here) const;
    size_t n_bytes() const { return memory.n_bytes(); }

private:
    edgekv_matrix memory;
    int group = 0;
};

struct edgekv_device {
    edgekv_device(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) : dev(dev), buft(buft) {}

    decltype(edgekv_cuda_attend_supports) * attend_supports;
    decltype(edgekv_cuda_attend_parts) * attend_parts; // null: this backend does not say
    decltype(edgekv_cuda_score_workspace) * score_workspace;
    decltype(edgekv_cuda_score) * score;
    // null: this backend has no such kernel
    decltype(edgekv_cuda_predict_workspace) * predict_workspace;
    decltype(edgekv_cuda_predict) * predict;
    decltype(edgekv_cuda_gather) * gather;
    decltype(edgekv_cuda_merge_workspace) * merge_workspace;
    decltype(edgekv_cuda_merge_nearest) * merge_nearest;
    decltype(edgekv_cuda_merge_fold) * merge_fold;
    decltype(edgekv_cuda_wait) * wait;

    // null: none, as for main memory
    static const edgekv_device * of(ggml_backend_buffer_type_t buft);
    // whether score and merge take rows of this type and size, and attention such K and V; and,
    // tried once, whether they do it right
    bool takes(ggml_type type, int d) const;
    bool attends(ggml_type type_k, ggml_type type_v, int d_k, int d_v) const;
    bool predicts(ggml_type type_k, ggml_type type_v, int d_k, int d_v) const;
    bool moves_right() const;
    // whether attention of so many multiplications may be one of its kernels: macOS ends what keeps
    // a GPU from drawing for seconds
    bool takes_at_once(double n_multiplications) const;
    // of things that take so many multiplications each; kernels take 8 or 16 of them together
    int at_once(double each) const;
    // for the next report
    static void left_alone(
        ggml_backend_dev_t dev, const std::string & what, const std::string & why);
    static void report(); // says what was left alone since the last time

    // rows src + index[0..n) of one tensor, or rows [src, src + n) without an index, to rows [dst,
    // ..) of another; the index lies on the device too; throws std::runtime_error
    void move_rows(const ggml_tensor * from, const int32_t * index, int64_t src, ggml_tensor * to,
        int64_t dst, int n) const;
    // the same without waiting for what was queued before or for the rows, for many of them: settle
    // goes before and behind
    void queue_rows(const ggml_tensor * from, const int32_t * index, int64_t src, ggml_tensor * to,
        int64_t dst, int n) const;
    void settle(const ggml_tensor * t) const;
    // the bytes of some rows, gathered there first: `rows.base` is an address on the device
    void fetch_rows(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
        const edgekv_numbered & rows, const std::vector<int32_t> & which, char * out) const;
    // as on the CPU; rows.k, queries and columns lie on the device. work: memory there, made larger
    // when needed. throws std::runtime_error, std::bad_alloc
    void score_columns(ggml_backend_buffer_type_t buft, edgekv_matrix & work, edgekv_rows rows,
        edgekv_queries qs, const edgekv_columns & cols) const;
    // of rows [0, n) of a head; both lie on the device, the map here
    void predict_rows(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
        const edgekv_numbered & keys, const edgekv_numbered & values, edgekv_map map, int n,
        float * out, float * unlike) const;
    // merge, as on the CPU; keys.base and to.base are addresses on the device, all else lies here
    void find_nearest(ggml_backend_buffer_type_t buft, edgekv_matrix & work,
        const edgekv_numbered & keys, const std::vector<int32_t> & gone,
        const std::vector<int32_t> & kept, float * cosine, int32_t * nearest) const;
    void fold(ggml_backend_buffer_type_t buft, edgekv_matrix & work, const edgekv_numbered & to,
        edgekv_shares shares) const;

private:
    static std::unique_ptr<edgekv_device> functions_of(
        ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, const std::string & prefix);
    void check(int error, const char * what) const;
    bool tried(const std::string & what, const std::function<bool()> & test) const;

    ggml_backend_dev_t dev;
    ggml_backend_buffer_type_t buft;
    bool plain = false;       // its kernels multiply without matrix units, a row per lane
    mutable std::mutex mutex; // contexts may live in different threads
    mutable std::map<std::string, bool> outcomes;
};
