#pragma once
// The ragged store: per layer one K and one V tensor of flat rows [d_head, n_rows]. KV head k owns rows [first[k], first[k] + cap[k]),
// of which len[k] are used: kept rows first, then the tail of new tokens. Rows move as bytes and are never quantised again.

#include "ggml-cpp.h"
#include "llama.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct edgekv_prefill;
struct edgekv_table;
class llama_io_write_i;
class llama_io_read_i;

// flat rows of K and V in one buffer
struct edgekv_tensors {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           k = nullptr;
    ggml_tensor *           v = nullptr;

    // throws std::bad_alloc when the backend has no memory
    static edgekv_tensors make(ggml_backend_buffer_type_t buft, ggml_type type_k, ggml_type type_v, int d_k, int d_v, int64_t n_rows, const char * name);
    size_t n_bytes() const;
    // rows [src, src + n) of another set of tensors of the same shape to rows [dst, dst + n), K and V
    void copy_rows(const edgekv_tensors & from, int64_t src, int64_t dst, int64_t n);
    // the same of each head: n[h] rows from src[h] on to dst[h]
    void copy_heads(const edgekv_tensors & from, const std::vector<int32_t> & src, const std::vector<int32_t> & dst, const std::vector<int32_t> & n);
};

// one matrix in a buffer of its own
struct edgekv_matrix {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           t = nullptr;

    static edgekv_matrix make(ggml_backend_buffer_type_t buft, ggml_type type, int64_t ne0, int64_t ne1, const char * name); // throws std::bad_alloc
    size_t n_bytes() const { return buf ? ggml_backend_buffer_get_size(buf.get()) : 0; }
};

struct edgekv_layer {
    int       il = 0, n_head = 0, n_head_kv = 0, d_k = 0, d_v = 0; // a layer without attention has no heads
    ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
    int       n_swa = 0;                     // sliding window in tokens, 0 = attends to everything
    ggml_backend_buffer_type_t buft = nullptr;
    float     max_bias = 0;                  // ALiBi's; 0 = none
    int       row_step = 1;                  // heads begin at multiples of it: some devices bind a head's rows at aligned offsets only

    edgekv_tensors        t;
    std::vector<int32_t>  first, len, cap;   // [n_head_kv], in rows
    std::vector<std::vector<llama_pos>> pos; // [n_head_kv][len]: token index of each row
    edgekv_matrix         row_pos;           // with ALiBi: the same for kernels, F32 [1, rows]; gone whenever rows move, see place_pos

    bool    selects() const { return n_head_kv > 0 && n_swa == 0; } // entries are chosen: it attends to everything
    int32_t len_max() const;
    int64_t n_rows()  const;                 // used rows of all heads
    std::unique_ptr<edgekv_layer> alike() const; // of the same shape, in the same place, without rows
    // new tensors with the given capacities; the first len[k] rows of each head come along
    void layout(const std::vector<int32_t> & cap_new);
    // with ALiBi: the rows' tokens go to where the rows lie, those of rows to come as well: the tail is without gaps. n_past: tokens that went in
    void place_pos(llama_pos n_past);
};

struct edgekv_store {
    std::vector<std::unique_ptr<edgekv_layer>> layers; // by model layer
    uint64_t  version  = 0;       // changes whenever tensors move: graphs that point to them are stale
    llama_pos n_past   = 0;       // tokens that went in
    llama_pos boundary = 0;       // tokens before this one were selected from: they cannot be taken back one by one
    bool      graph_attend = false; // one flash-attention call per head instead of the CPU kernel
    bool      node_attend  = false; // the node that devices have a kernel for, on the CPU too
    std::map<ggml_backend_buffer_type_t, std::unique_ptr<edgekv_table>> tables; // made when a graph wants them
    ggml_backend_sched_t sched = nullptr; // whose graphs read and write the rows; set with each of them, null before the first

    edgekv_store();
    ~edgekv_store(); // a prompt that is being read learns that its context is gone
    size_t    n_bytes_peak = 0;   // highest sum of store, scratch and hidden states so far
    edgekv_prefill * active = nullptr; // the prompt being read

    size_t n_bytes() const;
    void   note_peak(size_t n_bytes_extra = 0);
    // waits for graphs that are still at work on the rows: a device goes on behind our back
    void   settle() const { if (sched) ggml_backend_sched_synchronize(sched); }
    void   place_pos(); // of all layers; after anything that moved rows
    // room for n more rows in every head; sliding-window layers drop what no future token sees
    void   reserve_tail(int32_t n);
    // forget tokens >= p0; false if that cannot be done exactly
    bool   trim(llama_pos p0);
    // the same for tokens of a step that failed, wherever it did: their rows may be there in some layers only
    void   take_back(llama_pos p0) noexcept;
    void   clear() noexcept;
    // room that no row uses goes back to the allocator
    void   shrink_to_fit();

    void   write(llama_io_write_i & io) const;
    // n_ctx: most tokens that it may hold; n_tokens: as many as it must hold, if not -1. throws std::runtime_error or std::bad_alloc
    // and leaves the store as it was
    void   read(llama_io_read_i & io, llama_pos n_ctx, llama_pos n_tokens = -1);
};

// whether n rows from row `first` on are numbers; throws std::bad_alloc
bool edgekv_rows_finite(const ggml_tensor * t, int64_t first, int64_t n);

// a list of row numbers per head -> fresh tensors that hold exactly those rows, in that order
void edgekv_gather(const edgekv_tensors & from, const std::vector<int64_t> & base, const std::vector<std::vector<int32_t>> & keep, edgekv_layer & to);
