#pragma once
// CPU kernels of edgekv. They are compiled into the CPU backend, so that they get its instruction
// set, and work on plain memory: no graph, no allocation outside the thread's own workspace.

#include "../../include/edgekv-lost.h"
#include "../edgekv-alibi.h"

#include "ggml.h"
#include "ggml-backend.h"

#include <atomic>
#include <cstdint>

#ifdef __cplusplus
extern "C" {
#endif

// Rows of one layer: KV head k owns rows [first[k], first[k] + len[k]) of k and v, one row per
// token.
struct edgekv_rows {
    const char * k; // row r of K at k + r*nb_k
    const char * v; // null where only K is read
    size_t nb_k, nb_v;
    enum ggml_type type_k, type_v;
    int d_k, d_v, n_head, n_head_kv;
    const int32_t * first; // [n_head_kv]
    const int32_t * len;   // [n_head_kv], the rows of the new tokens included
    float scale;           // of q.k
    float softcap;         // 0 = none
    // [n_head] or null: a logit that takes part in the softmax and has no value
    const float * sinks;
    // ALiBi (edgekv-alibi.h), where max_bias is not 0: head h's logit of row r is
    // slope(h)*(pos[last] - pos[r]) lower, last being the last row that the query sees, its own.
    // Row numbers are the layer's
    const float * pos = nullptr; // [rows] token index of each row
    float max_bias = 0;
    // a prompt's: what is multiplied may be rounded to bf16, where the processor is faster with
    // that (edgekv-fastest.h). Norms and the columns made of them have to agree on it
    bool rounded = false;
    // the last n_recent rows of each head lie elsewhere, in halves: head k's in rows
    // [k*cap_recent, ..) of these. For few tokens only
    const char *recent_k = nullptr, *recent_v = nullptr;
    int n_recent = 0, cap_recent = 0;
};

// Queries: row of token t, head h at q + t*nb_t + h*nb_h (floats).
// Token t sees rows [start ? start[t] : 0, len[k] - n_after[t]) of KV head k.
struct edgekv_queries {
    const float * q;
    int64_t stride_t, stride_h; // in floats
    int n_tokens;
    // [n_tokens] rows of a head that come after this token's own; null = n_tokens - 1 - t
    const int32_t * n_after;
    const int32_t * start; // [n_tokens] first visible row (sliding window); null = 0
    // attend on a device: one part more, which recall has computed; [n_tokens][n_head][2 + d_v] or
    // null
    const float * recalled = nullptr;
};

// attend: part p of n_parts of all rows of all heads; out [n_parts][n_tokens][n_head][2 + d_v]:
// maximum, sum, weighted values
GGML_BACKEND_API void edgekv_cpu_attend_part(const struct edgekv_rows * rows,
    const struct edgekv_queries * qs, float * out, int part, int n_parts);
// attend: fold the parts of head h, token t into dst [n_tokens][n_head][d_v]
GGML_BACKEND_API void edgekv_cpu_attend_combine(const struct edgekv_rows * rows, int n_tokens,
    const float * parts, int n_parts, float * dst, int ith, int nth);

// attend, for many tokens: all rows, dst [n_tokens][n_head][d_v]. Each of nth threads calls it with
// the same `next`, which starts at 0. norm [n_tokens][n_head][2] or null: of each query's softmax
// the maximum, as a power of two, and 1/sum. Without rows->v only that.
GGML_BACKEND_API void edgekv_cpu_attend_prompt(const struct edgekv_rows * rows,
    const struct edgekv_queries * qs, float * dst, float * norm, std::atomic<int32_t> * next,
    int nth);

// codes: a key, less the mean, is a sum of n_dims basis vectors. They are in n_parts parts, and a
// code of 4 bits says which of 16 centres a part's values are near (product quantisation: Jegou et
// al., 2011). Of a whole key's code the parts come in order; 32 keys are a block, and in it each
// part has 16 bytes: byte j is key j in the low bits and key 16 + j in the high ones
#define EDGEKV_CENTRES 16
#define EDGEKV_BLOCK 32
struct edgekv_codebook {
    int d, n_parts, n_dims;
    enum ggml_type type;         // of the basis
    const char * basis;          // rows [n_dims] of d values
    const ggml_fp16_t * centres; // [n_dims][EDGEKV_CENTRES]
    const float * mean;          // [d]
    const int32_t * ends;        // [n_parts]: the dims of a part end before
};
// What fits the keys [n][d]: fills in all of `book` but its type, which is given, as are sizes
GGML_BACKEND_API void edgekv_cpu_codes_learn(const struct edgekv_codebook * book,
    const float * keys, int n, char * basis, ggml_fp16_t * centres, float * mean, int32_t * ends);
// the codes of keys [n][d], which are the keys from `first` on of those in `codes`
GGML_BACKEND_API void edgekv_cpu_codes_put(
    const struct edgekv_codebook * book, const float * keys, int n, int64_t first, uint8_t * codes);
// out [n_query][n]: how much larger each key's logit is than the smallest there can be, in steps.
// step [n_query]: of a logit. q: queries, stride floats apart. n: a multiple of EDGEKV_BLOCK
GGML_BACKEND_API void edgekv_cpu_codes_score(const struct edgekv_codebook * book,
    const uint8_t * codes, int n, const float * q, int64_t stride, int n_query, uint16_t * out,
    float * step);

// recall: what one KV head has beside its rows in the store. By the index each query head's
// probability of each row is known roughly. A token attends to the rows that some head gives more
// than `least`, at most n_most, and to groups, which stand for those of their rows that it does not
// take
#define EDGEKV_GROUPS 256 // at most
struct edgekv_recalled {
    int n, n_most, d_k, d_v;
    float least;
    struct edgekv_codebook book;
    const uint8_t * codes;
    const uint32_t * resident; // a bit for each row: the store has it
    const uint8_t * label;     // [n] the row's group
    // rows of all tokens
    const char *k, *v;
    size_t nb_k, nb_v;
    enum ggml_type type_k, type_v;
    // means of keys and values, [n_groups][d_k] and [d_v], and how many rows
    int n_groups;
    const ggml_fp16_t *group_k, *group_v;
    const int32_t * members;
    float scale, softcap;
};
// Up to n_groups by k-means of the keys of the first n_found rows; how many there are. Fills in the
// labels of all rows but the first n_before, which have them, and means and members without the
// residents. Of `a` n, sizes, rows and residents count
GGML_BACKEND_API int edgekv_cpu_recall_groups(const struct edgekv_recalled * a, int n_found,
    int n_before, int n_groups, uint8_t * label, ggml_fp16_t * keys, ggml_fp16_t * values,
    int32_t * members);
// q: n_query queries of one token, stride floats apart; out [n_query][2 + d_v] as a part of attend.
// Returns how many rows it looked up
GGML_BACKEND_API int edgekv_cpu_recall(
    const struct edgekv_recalled * a, const float * q, int64_t stride, int n_query, float * out);

// Column statistics, indexed by the row number in the layer (first[k] + j). Null = not wanted.
// They accumulate over calls; n_seen = queries per head seen before this call.
struct edgekv_columns {
    float * sum;     // [rows]               sum over queries, mean over the group's heads
    float * max;     // [rows]               maximum over queries and heads
    float * entropy; // [rows]               sum over queries and heads of -a log a
    float * mean;    // [n_head/n_head_kv][rows] running mean per query head (for the variance)
    float * m2;      // [n_head/n_head_kv][rows] running sum of squared deviations
    int64_t n_rows;
    int64_t n_seen;
};

// score, over part p of each head's rows; norm: what attend left
GGML_BACKEND_API void edgekv_cpu_score_columns(const struct edgekv_rows * rows,
    const struct edgekv_queries * qs, const float * norm, const struct edgekv_columns * cols,
    int part, int n_parts);

// How stored keys of a head become whole ones: plus the centre [d], turned, divided by the scale
// [d], turned; turn: size of the Walsh-Hadamard matrix, 0: none. Null: nothing of the kind
struct edgekv_key_basis {
    const float *centre = nullptr, *scale = nullptr;
    int turn = 0;
};
// x [n] times the orthonormal Walsh-Hadamard matrix, block by block; size: a power of two that
// divides n, 0: nothing
GGML_BACKEND_API void edgekv_cpu_turn(float * x, int64_t n, int size);
GGML_BACKEND_API void edgekv_cpu_whole_keys(
    const struct edgekv_key_basis * basis, int64_t n, int d, float * keys);

// Rows of one head by number: row r at base + r*nb. Folding writes to them.
struct edgekv_numbered {
    char * base;
    size_t nb;
    enum ggml_type type;
    int d;
    struct edgekv_key_basis basis = {};
};

// product of a quantised weight with many tokens, for a MUL_MAT node, or for a MUL_MAT_ID node of
// experts' weights: how many words of work it takes, 0 if the kernel takes no such node
#define EDGEKV_PRODUCT_MIN 64
// tokens of a step that have the same bits each as alone, with a weight that edgekv-few.h takes
#define EDGEKV_ALIKE_MAX 16
GGML_BACKEND_API size_t edgekv_cpu_product_words(const struct ggml_tensor * node);

// tokens from which weights are taken that llama.cpp has repacked, and multiplies in 8 bits: bf16
// is faster from so many on, f32 never is
GGML_BACKEND_API int64_t edgekv_cpu_product_min_repacked(enum ggml_type type);

// words of work for a weight and that many tokens, those of all experts together, 0 if the kernel
// does not take it: they are too few, or it is not quantised. One that is not loaded is as in its
// file
GGML_BACKEND_API size_t edgekv_cpu_product_room(
    const struct ggml_tensor * weight, int64_t n_tokens);

// words of a weight, unpacked as the kernel for that many tokens reads it; 0 if it would not be
// read faster so
GGML_BACKEND_API size_t edgekv_cpu_product_unpacked(
    const struct ggml_tensor * weight, int64_t n_tokens);

struct edgekv_product_job {
    uint32_t * words;
    bool has_words; // the product before made them: same tokens, a weight of the same type
    // null, or where the unpacked weight stays; is_unpacked: it is there
    uint32_t * unpacked;
    bool is_unpacked;
    std::atomic<int32_t> n_ready, next; // 0 when the node begins
    double ms = 0;                      // that it took, from thread 0
    bool levels = false;                // weights and tokens were multiplied in 8 bits
    bool has_unpacked = false;          // `unpacked` has it now
};
// The function of a custom node with the sources of that MUL_MAT or MUL_MAT_ID; job:
// edgekv_product_job. All nth threads have to run it side by side.
GGML_BACKEND_API void edgekv_cpu_product(struct ggml_tensor * dst, int ith, int nth, void * job);

// multiply-adds that a thread can do in a second as these products are made, in 8 bits or not, with
// what is multiplied in the nearest cache; takes some 20 ms
GGML_BACKEND_API double edgekv_cpu_product_peak(bool levels);

// merge, search: for each of `gone` the row of `kept` (at least one) whose key has the largest
// cosine, the first of equal ones; keys of length 0 have cosine 0. Part p of n_parts of `gone`;
// out: cosine [n_gone], nearest [n_gone] as index into kept
GGML_BACKEND_API void edgekv_cpu_merge_nearest(const struct edgekv_numbered * keys,
    const int32_t * gone, int n_gone, const int32_t * kept, int n_kept, float * cosine,
    int32_t * nearest, int part, int n_parts);

// what rows receive: row i gets the sources of the i-th list
struct edgekv_shares {
    int n;
    const int32_t * rows;    // [n]
    const float * own;       // [n] weight of the row itself
    const int32_t * counts;  // [n] lengths of the lists
    const int32_t * sources; // the lists, one after another; no source is among `rows`
    const float * weights;   // of each source
};

// merge, fold: each row becomes own*row + sum of weight*source, summed in f32 and written in the
// rows' type; other rows keep their bytes
GGML_BACKEND_API void edgekv_cpu_merge_fold(
    const struct edgekv_numbered * to, const struct edgekv_shares * shares);

// the linear map of the score kvzap, see edgekv_prefill_predict
struct edgekv_map {
    const float * weights; // [d_v + d_k/2 + 4]
    bool neighbours;       // RoPE turns values 2 i and 2 i + 1 together, else i and i + d_k/2
    // rows are stored times a Walsh-Hadamard matrix of this size, block by block; 0: they are not
    int turn_k, turn_v;
};

// predict: sum [d] of the keys [first, first + n), each with length 1
GGML_BACKEND_API void edgekv_cpu_key_sum(
    const struct edgekv_numbered * keys, int first, int n, float * sum);

// predict: out[first, first + n), of the rows of those numbers; sum: of all keys, as above;
// unlike, in the same places: -cosine of a key with it
GGML_BACKEND_API void edgekv_cpu_predict(const struct edgekv_numbered * keys,
    const struct edgekv_numbered * values, const float * sum, const struct edgekv_map * map,
    int first, int n, float * out, float * unlike);

// moments: lower [d (d + 1)/2], row by row, += the sum over n rows x, `step` floats apart, of the
// products of x - mean [d] with itself
GGML_BACKEND_API void edgekv_cpu_moments(
    const float * x, int64_t step, int n, int d, const float * mean, float * lower);

// FWHT, for ggml's node of it: part ith of nth, to the same bits. false: it is left to ggml
GGML_BACKEND_API bool edgekv_cpu_fwht(struct ggml_tensor * dst, int ith, int nth);

// centroids: see edgekv_centroids; how many there are
GGML_BACKEND_API int edgekv_cpu_centroids(const struct edgekv_lost * lost,
    const struct edgekv_centroid_params * params, float * keys, float * values, int32_t * label);

// rows [r0, r0 + n) of a tensor of flat rows as f32
GGML_BACKEND_API void edgekv_cpu_rows_to_f32(
    enum ggml_type type, const char * base, size_t nb, int64_t r0, int n, int d, float * out);

// All of them, as libllama gets them: by the name "edgekv_cpu_kernels" from the CPU backend, which
// may be one of several libraries, each for other processors
struct edgekv_cpu_kernels {
    decltype(&edgekv_cpu_attend_part) attend_part;
    decltype(&edgekv_cpu_attend_combine) attend_combine;
    decltype(&edgekv_cpu_attend_prompt) attend_prompt;
    decltype(&edgekv_cpu_codes_learn) codes_learn;
    decltype(&edgekv_cpu_codes_put) codes_put;
    decltype(&edgekv_cpu_recall) recall;
    decltype(&edgekv_cpu_recall_groups) recall_groups;
    decltype(&edgekv_cpu_score_columns) score_columns;
    decltype(&edgekv_cpu_product_words) product_words;
    decltype(&edgekv_cpu_product_room) product_room;
    decltype(&edgekv_cpu_product_unpacked) product_unpacked;
    decltype(&edgekv_cpu_product) product;
    decltype(&edgekv_cpu_product_peak) product_peak;
    decltype(&edgekv_cpu_merge_nearest) merge_nearest;
    decltype(&edgekv_cpu_merge_fold) merge_fold;
    decltype(&edgekv_cpu_key_sum) key_sum;
    decltype(&edgekv_cpu_predict) predict;
    decltype(&edgekv_cpu_moments) moments;
    decltype(&edgekv_cpu_centroids) centroids;
    decltype(&edgekv_cpu_rows_to_f32) rows_to_f32;
    decltype(&edgekv_cpu_turn) turn;
    decltype(&edgekv_cpu_whole_keys) whole_keys;
    // ggml's own: those of ggml-base know no vectors
    void (*f16_to_f32)(const ggml_fp16_t * x, float * y, int64_t n);
    void (*f32_to_f16)(const float * x, ggml_fp16_t * y, int64_t n);
};
GGML_BACKEND_API const struct edgekv_cpu_kernels * edgekv_cpu_kernels_of_backend(void);

#ifdef __cplusplus
}
#endif

namespace edgekv {

// visible rows of token t in KV head k: [lo, hi)
inline void visible(
    const edgekv_rows & rows, const edgekv_queries & qs, int t, int k, int & lo, int & hi) {
    lo = qs.start ? qs.start[t] : 0;
    hi = rows.len[k] - (qs.n_after ? qs.n_after[t] : qs.n_tokens - 1 - t);
}

} // namespace edgekv
