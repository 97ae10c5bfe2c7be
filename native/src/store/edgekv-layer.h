#pragma once
// Rows of one layer: one K and one V tensor of flat rows [d_head, n_rows]. KV head k owns rows
// [first[k], first[k] + cap[k]), of which len[k] are used: kept rows first, then the tail of new
// tokens. Rows move as bytes and are rounded once.

#include "edgekv-matrix.h"

#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

struct edgekv_basis;
struct edgekv_device;

// What a layer keeps of a token in each KV head
struct edgekv_shape {
    int d_k = 0, d_v = 0;
    ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
    // V is the first d_v values of K (latent attention): it has K's type, and no rows of its own
    bool v_in_k = false;

    size_t row_bytes_k() const { return ggml_row_size(type_k, d_k); }
    size_t row_bytes_v() const { return v_in_k ? 0 : ggml_row_size(type_v, d_v); }
    bool operator==(const edgekv_shape & x) const {
        return d_k == x.d_k && d_v == x.d_v && type_k == x.type_k && type_v == x.type_v &&
            v_in_k == x.v_in_k;
    }
};

// flat rows of K and V in one buffer
struct edgekv_tensors {
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;

    // throws std::bad_alloc when the backend has no memory
    static edgekv_tensors make(ggml_backend_buffer_type_t buft, const edgekv_shape & shape,
        int64_t n_rows, const char * name);
    // K, and V unless it is a view of K: those whose rows are copied, saved and written
    std::vector<ggml_tensor *> own() const;
    size_t n_bytes() const;
    // rows [src, src + n) of another set of tensors of the same sizes to rows [dst, dst + n), K and
    // V; where types differ they are converted
    void copy_rows(const edgekv_tensors & from, int64_t src, int64_t dst, int64_t n);
    // the same of each head: n[h] rows from src[h] on to dst[h]
    void copy_heads(const edgekv_tensors & from, const std::vector<int32_t> & src,
        const std::vector<int32_t> & dst, const std::vector<int32_t> & n);
};

// rows behind the window that a layer with one keeps, so that short rewinds are exact
constexpr int32_t EDGEKV_SWA_SLACK = 64;

struct edgekv_layer : edgekv_shape {
    // a layer without attention has no heads
    int il = 0, n_head = 0, n_head_kv = 0;
    // the layer whose K and V it attends to: itself, if it has heads
    int reads = 0;
    int n_swa = 0; // sliding window in tokens, 0 = attends to everything
    // the window does not slide: it begins at the last multiple of n_swa (Llama 4)
    bool chunked = false;
    ggml_backend_buffer_type_t buft = nullptr;
    float max_bias = 0; // ALiBi's; 0 = none
    // in which keys are stored; null: as llama.cpp stores them
    std::shared_ptr<const edgekv_basis> basis;
    // heads begin at multiples of it: some devices bind a head's rows at aligned offsets only
    int row_step = 1;

    edgekv_tensors t;
    std::vector<int32_t> first, len, cap;    // [n_head_kv], in rows
    std::vector<std::vector<llama_pos>> pos; // [n_head_kv][len]: token index of each row
    // Rows are halves until they have to be rounded to the cache's types: while a prompt is read,
    // and the newest behind it
    bool rounds_late = false;
    // those: of each head its last n_recent rows, in rows [k*cap_recent, ..)
    edgekv_tensors recent;
    int32_t n_recent = 0, cap_recent = 0;
    // with ALiBi: the same for kernels, F32 [1, rows]; gone whenever rows move, see place_pos
    edgekv_matrix row_pos;

    // entries are chosen: it attends to everything
    bool selects() const { return n_head_kv > 0 && n_swa == 0; }
    // kernels of ours for its rows where they lie; null: none, as in main memory. None was tried
    // with a V that is part of K
    const edgekv_device * kernels() const;
    // the first token that the one at p sees
    llama_pos oldest_seen(llama_pos p) const {
        if (chunked) return p - p % n_swa;
        return n_swa ? std::max(0, p - n_swa + 1) : 0;
    }
    // rows that a window keeps: what the next token may see, and a little for short rewinds
    int32_t n_window() const { return n_swa + EDGEKV_SWA_SLACK; }
    int32_t len_max() const;
    int64_t n_rows() const; // used rows of all heads
    // of the same shape, in the same place, without rows
    std::unique_ptr<edgekv_layer> alike() const;
    // new tensors with the given capacities; the first rows of each head come along, but for those
    // that wait
    void layout(const std::vector<int32_t> & cap_new);
    // whether new rows wait
    bool waits() const { return rounds_late && selects(); }
    int32_t n_rounded(int head) const { return len[head] - n_recent; }
    // rows that each head may still get, where new rows of this layer go
    int32_t room() const;
    bool has_room(int32_t n) const { return n <= room(); }
    // for n more that wait: those that have waited longest are rounded where they are too many
    void make_room(int32_t n);
    // all but the newest n_stay of them are rounded
    void round(int32_t n_stay);
    // with ALiBi: the rows' tokens go to where the rows lie, those of rows to come as well: the
    // tail is without gaps. n_past: tokens that went in
    void place_pos(llama_pos n_past);
};

// bytes of n rows from row `first` on, with what lies between them; where V is part of K, V's are
// K's
void edgekv_get_rows(const ggml_tensor * t, int64_t first, int64_t n, void * out);

// n rows of d values, nb bytes each in main memory, as rows of another type
void edgekv_convert(
    ggml_type from, const char * rows, size_t nb, int64_t n, int d, ggml_type type, void * out);

// n rows from row `first` on as rows of another type
void edgekv_convert_rows(
    const ggml_tensor * t, int64_t first, int64_t n, ggml_type type, void * out);

// whether n rows from row `first` on are numbers; throws std::bad_alloc
bool edgekv_rows_finite(const ggml_tensor * t, int64_t first, int64_t n);

// the same of n rows in main memory, nb bytes each; d: values of a row
bool edgekv_bytes_finite(ggml_type type, const char * rows, size_t nb, int64_t n, int d);

// a list of row numbers per head -> fresh tensors that hold exactly those rows, in that order
void edgekv_gather(const edgekv_tensors & from, const std::vector<int64_t> & base,
    const std::vector<std::vector<int32_t>> & keep, edgekv_layer & to);
