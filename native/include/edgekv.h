#pragma once
// The whole C API of edgekv. Everything is added to libllama; nothing of llama.h changes.
//
// Functions return 0 on success and a negative edgekv_status otherwise; edgekv_last_error() then
// says why, in one line that can be shown to a user. Nothing here throws or aborts for a user's
// mistake. A context belongs to one thread at a time, as in llama.h.

#include "edgekv-lost.h"
#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EDGEKV_PROBE_MAX 2560 // tokens of one piece, at most

#define EDGEKV_ABI 26 // changes with any signature or struct below

enum edgekv_status {
    EDGEKV_OK = 0,
    EDGEKV_CANCELLED = -1,   // the callback said so; the context is as before the prompt
    EDGEKV_INVALID = -2,     // an argument is wrong
    EDGEKV_UNSUPPORTED = -3, // this model or context cannot do that
    EDGEKV_NO_MEMORY = -4,
    EDGEKV_FAILED = -5,
};

// where hidden states wait: in main memory, in a file, or as f32 on the device that has all layers
// (without one: as F32) NONE: they do not wait, all layers are read at once, each with memory of
// its own
enum edgekv_hidden_mode {
    EDGEKV_HIDDEN_F32 = 0,
    EDGEKV_HIDDEN_F16 = 1,
    EDGEKV_HIDDEN_DISK = 2,
    EDGEKV_HIDDEN_DEVICE = 3,
    EDGEKV_HIDDEN_NONE = 4,
    EDGEKV_HIDDEN_MODES = 5
};

// column statistics (see native/src/cpu/edgekv-cpu.h); EDGEKV_STAT_QUERIES: see
// edgekv_prefill_queries
enum edgekv_stat {
    EDGEKV_STAT_MEAN = 1,
    EDGEKV_STAT_VAR = 2,
    EDGEKV_STAT_MAX = 4,
    EDGEKV_STAT_ENTROPY = 8,
    EDGEKV_STAT_QUERIES = 16
};

LLAMA_API int edgekv_abi(void);
LLAMA_API const char * edgekv_last_error(void);
LLAMA_API int edgekv_last_status(void); // of the call that failed last

// What llama_set_abort_callback wants: whether a bool, which another thread or a signal handler may
// write, is set
LLAMA_API bool edgekv_is_set(void * flag);

// What this thread asks grammars until the end has a second in all, and is given up where *stop is
// set; null: nobody stops it. Such questions nest: the outermost one counts
LLAMA_API void edgekv_grammar_begin(bool * stop);
LLAMA_API void edgekv_grammar_end(void);

// memory that was freed goes back to the system; some C libraries keep it otherwise
LLAMA_API void edgekv_trim_heap(void);

// ---- what llama.cpp logs, in the whole process

LLAMA_API void edgekv_log_init(void); // nothing is printed from now on
// everything goes to standard error, or nothing
LLAMA_API void edgekv_log_verbose(bool on);
// what this thread causes is not printed in either case
LLAMA_API void edgekv_log_mute(bool on);
// the first error that was logged since the last call; never null
LLAMA_API const char * edgekv_log_error(void);

// ---- contexts

// the next context that this thread creates keeps its K/V in a ragged store (n_seq_max 1, flash
// attention)
LLAMA_API void edgekv_next_context(bool on);
// why this model keeps llama.cpp's own cache, or null
LLAMA_API const char * edgekv_why_unsupported(const struct llama_model * model);
// KV heads of a layer whose entries are cached; 0 where a layer has no attention, or there is no
// such layer
LLAMA_API int32_t edgekv_model_n_head_kv(const struct llama_model * model, int32_t il);
// values of a token's hidden state between two layers: n_embd, or several streams of them
LLAMA_API int32_t edgekv_model_hidden_width(const struct llama_model * model);
// bytes that products with its quantised weights work with on the CPU while a prompt is read in
// chunks of up to n_chunk tokens; again: several chunks meet the same weights
LLAMA_API int64_t edgekv_model_product_bytes(
    const struct llama_model * model, int64_t n_chunk, bool again);
// whether a token's products with the model's weights are the same however many tokens a step has:
// logits of a step with tokens of several conversations are then those of each alone
LLAMA_API bool edgekv_model_rows_alike(const struct llama_model * model);
LLAMA_API bool edgekv_has_store(const struct llama_context * ctx);
// EDGEKV_INVALID if llama.cpp's own cache holds values that are no numbers, which a loaded state
// may have brought. Without flash attention they reach every later token, of other conversations
// too, until llama_memory_clear(.., true). A store refuses such a state itself
LLAMA_API int edgekv_check_finite(const struct llama_context * ctx);

// what llama.cpp itself allocates for a context, over all devices; of a model without weights
// (no_alloc) what it would allocate
struct edgekv_context_bytes {
    int64_t cache;   // its own cache, or the store
    int64_t compute; // buffers of the scheduler
};
LLAMA_API int edgekv_context_bytes_get(
    const struct llama_context * ctx, struct edgekv_context_bytes * out);
// bytes free on the device that has the rows of all layers; 0 where there is no such one
LLAMA_API int64_t edgekv_device_free(const struct llama_context * ctx);

struct edgekv_layer_info {
    int32_t n_head, n_head_kv, d_k, d_v;
    int32_t type_k, type_v; // ggml_type
    int32_t n_swa;          // sliding window in tokens, 0 = none
    // one row of K and V of one KV head; with ALiBi its token's index too
    int32_t bytes_row;
    // the layer whose K and V it attends to; another one in models that share them
    int32_t reads;
    // 1: V is the first d_v values of K (latent attention), and has no bytes of its own
    int32_t v_in_k;
    // 1: keys are scaled, and the mean of their bias is taken from them, before they are stored,
    // and whole where rows are read as f32; no softmax changes by it
    int32_t has_basis;
    // 1: rows are f16 until they have to be rounded to the cache's types, while a prompt is read
    // and the newest behind it
    int32_t rounds_late;
};
LLAMA_API int32_t edgekv_n_layer(const struct llama_context * ctx);
LLAMA_API int edgekv_layer_get(
    const struct llama_context * ctx, int32_t il, struct edgekv_layer_info * out);
// rows of each KV head that attention reads, [n_head_kv]
LLAMA_API int edgekv_len(const struct llama_context * ctx, int32_t il, int32_t * out);
// token index of each row of one head, [len]
LLAMA_API int edgekv_pos(const struct llama_context * ctx, int32_t il, int32_t head, int32_t * out);
// rows of one head as f32: k [len, d_k], v [len, d_v]; either may be null
LLAMA_API int edgekv_rows_f32(
    const struct llama_context * ctx, int32_t il, int32_t head, float * k, float * v);
// rows of one head as stored bytes; nothing is written to v where V is part of K
LLAMA_API int edgekv_rows_bytes(
    const struct llama_context * ctx, int32_t il, int32_t head, void * k, void * v);

struct edgekv_memory_info {
    int64_t n_past;    // tokens that went in
    int64_t boundary;  // tokens that selection has seen: the tail begins here
    int64_t bytes_now; // of the store, read from its buffers
    // store + scratch + hidden states + masks at the highest point since the last clear
    int64_t bytes_peak;
    // state of recurrent layers; 0: tokens behind the boundary can be taken back one by one
    int64_t bytes_recurrent;
    int64_t bytes_mark;    // copy of it that edgekv_mark_tokens made
    int64_t n_mark;        // tokens in that copy; -1: there is none
    int64_t bytes_archive; // in its file
    int64_t bytes_index;   // in memory
    // 1: a prompt is read behind the rows of all tokens, which the archive has
    int64_t has_archive;
    // 1: besides, the conversation can go back to any token
    int64_t can_go_back;
    // 1: it went back behind the boundary, and the next token is to be read as a prompt
    int64_t went_back;
    // tokens that the next step may have so that rows are rounded, and move, behind the same tokens
    // as if each had a step of its own
    int64_t n_alike;
    int64_t bytes_recalled; // that tokens looked up in the archive since the conversation began
};
LLAMA_API int edgekv_memory_get(const struct llama_context * ctx, struct edgekv_memory_info * out);

// The conversation as it is can be returned to by taking the later tokens back, until it is
// compressed. For models with recurrent layers, which have no other way back; costs a copy of their
// state. Nothing happens to other models
LLAMA_API int edgekv_mark_tokens(struct llama_context * ctx);
// The same for a draft: it stays until the conversation changes places or is compressed, and so
// does the mark
LLAMA_API int edgekv_keep_state(struct llama_context * ctx);

// Rows that wait in f16 are rounded now. Tokens that come see the same rows then, however many more
// come before the conversation is taken back to where it is
LLAMA_API int edgekv_round_rows(struct llama_context * ctx);

// From now on a conversation that begins in this context has an archive: the rows of all its
// tokens, of layers that attend to everything, in a file without a name in `dir` (null: TMPDIR). A
// prompt is then read behind all of them, and what is kept is chosen from all of them. recall: the
// share of the tokens whose rows each new token reads from there, besides those that were kept; it
// finds them by an index of index_bits bits (4 to 128, in fours) for each 64 values of a key. 0:
// none. EDGEKV_UNSUPPORTED with ALiBi, or to recall on a device; EDGEKV_FAILED if there can be no
// such file
LLAMA_API int edgekv_archive_on(
    struct llama_context * ctx, const char * dir, float recall, int index_bits);

// An archive apart from its conversation. Rows that two archives have in common are in one file
// until one of both is written to there
struct edgekv_archive;
struct edgekv_archive_info {
    int64_t n_tokens;     // whose rows it has
    int64_t n_known;      // that the last prompt's end knew: these may be recalled
    int64_t n_judged;     // whose keys the index goes by
    int64_t bytes;        // in its file
    int64_t bytes_memory; // of its index
};
// That of the conversation, for edgekv_archive_free; null if there is none, or no memory
LLAMA_API struct edgekv_archive * edgekv_archive_take(const struct llama_context * ctx);
// why the conversation has none any more; empty: it has, or never had
LLAMA_API const char * edgekv_archive_lost(const struct llama_context * ctx);
// An archive without rows for a context after edgekv_archive_on; bytes are not looked at
LLAMA_API struct edgekv_archive * edgekv_archive_new(
    struct llama_context * ctx, const struct edgekv_archive_info * info);
LLAMA_API int edgekv_archive_get(const struct edgekv_archive * a, struct edgekv_archive_info * out);
// Its rows are pieces: n_tokens of one tensor and KV head each. Bytes of one, -1 behind the last
LLAMA_API int64_t edgekv_archive_piece_bytes(const struct edgekv_archive * a, int32_t i);
LLAMA_API int edgekv_archive_piece_get(const struct edgekv_archive * a, int32_t i, void * rows);
// EDGEKV_INVALID for rows that are no numbers
LLAMA_API int edgekv_archive_piece_put(struct edgekv_archive * a, int32_t i, const void * rows);
// the index of an archive whose pieces are there
LLAMA_API int edgekv_archive_index(
    struct llama_context * ctx, struct edgekv_archive * a, int64_t n_judged);
// The conversation has this archive from now on; the argument stays the caller's. alone: the
// conversation is the archive's tokens, of which no row is in memory: it is to be taken back by
// some tokens, which are then read as a prompt
LLAMA_API int edgekv_archive_put(
    struct llama_context * ctx, const struct edgekv_archive * a, bool alone);
LLAMA_API void edgekv_archive_free(struct edgekv_archive * a);

// keep only these rows: counts [n_head_kv], rows: the heads' row numbers one after another, each
// list in the order to be stored
LLAMA_API int edgekv_evict(
    struct llama_context * ctx, int32_t il, const int32_t * counts, const int32_t * rows);
// n rows of one head are written anew, in the type of the cache: k [n, d_k], v [n, d_v], all finite
// as f16; other rows keep their bytes. Where V is part of K, v must say the same
LLAMA_API int edgekv_write_rows(struct llama_context * ctx, int32_t il, int32_t head, int32_t n,
    const int32_t * rows, const float * k, const float * v);
// from now on rows are stored as llama.cpp's cache stores them: keys with their bias, and rounded
// at once; EDGEKV_INVALID unless the store is empty
LLAMA_API int edgekv_make_plain(struct llama_context * ctx);
// room that no row uses goes back to the allocator
LLAMA_API int edgekv_trim_capacity(struct llama_context * ctx);

// ---- heads for further tokens (MTP), in a context of their own: LLAMA_CONTEXT_TYPE_MTP

// why this model, loaded with load_mtp, has none that can be used here, or null
LLAMA_API const char * edgekv_why_no_heads(const struct llama_model * model);
// From now on steps keep hidden states as heads take them: of every token of the batch, or of those
// with logits; and a prompt that is read layer by layer those of its last n_last tokens
LLAMA_API void edgekv_keep_hidden(struct llama_context * ctx, bool every, int32_t n_last);
// [n_embd_out] of a token of the last step: of its batch, or, as llama_get_logits_ith counts, of
// those with logits; null if it has none
LLAMA_API const float * edgekv_hidden_ith(struct llama_context * ctx, int32_t i);

// ---- several conversations take turns in a context with a store

struct edgekv_parked;

// a place for a conversation beside the one in the context, empty; null on failure. It may outlive
// the context, for edgekv_parked_bytes and edgekv_parked_free
LLAMA_API struct edgekv_parked * edgekv_parked_new(struct llama_context * ctx);
// The conversation in the context and the one in the place change places. Rows are not copied; the
// state of recurrent layers is. EDGEKV_INVALID while a prompt is being read, and for a place of
// another context. After an error the place is as before
LLAMA_API int edgekv_parked_swap(struct llama_context * ctx, struct edgekv_parked * p);
// One token of each of n conversations in one pass over the weights: those in the places, and the
// one in the context where a place is null. They stay where they are. Logits of token i: those of
// llama_get_logits_ith(ctx, i). The context was made with n_seq_max > n and kv_unified. With
// recurrent layers the one in the context comes first. All are as before after an error:
// EDGEKV_INVALID, or EDGEKV_UNSUPPORTED on a device or with an archive. Where recurrent layers had
// gone on already when a step failed, its conversations are lost: the context's is empty, and those
// in places cannot be used
LLAMA_API int edgekv_step_several(struct llama_context * ctx, int32_t n,
    struct edgekv_parked * const * places, const llama_token * tokens);
LLAMA_API int64_t edgekv_parked_bytes(const struct edgekv_parked * p);         // that it takes
LLAMA_API int64_t edgekv_parked_archive_bytes(const struct edgekv_parked * p); // of its file
LLAMA_API void edgekv_parked_free(struct edgekv_parked * p);

// ---- prefill: a prompt, layer by layer

struct edgekv_observer {
    // tokens of the prompt (and of the pieces behind it) whose queries judge the keys
    int32_t begin, end;
    uint32_t stats; // edgekv_stat, or-ed
    // EDGEKV_STAT_QUERIES looks at one of so many tokens of each ubatch; 0: at all, as 1
    int32_t every;
};

struct edgekv_prefill;

// called between chunks; false cancels
typedef bool (*edgekv_progress)(int32_t done, int32_t total, void * data);

struct edgekv_prefill_params {
    // the prompt, then the pieces of the probe, whose K/V are never stored
    const llama_token * tokens;
    int32_t n_tokens; // of the prompt
    // null, or [n_tokens, n_vocab] for the logits of every token of the prompt: the context has
    // those of the last one alone
    float * logits;
    // their lengths: each piece is read behind the prompt and sees no other piece
    const int32_t * pieces;
    int32_t n_pieces;
    const struct edgekv_observer * observers;
    int32_t n_observers;
    enum edgekv_hidden_mode hidden;
    const char * dir; // for EDGEKV_HIDDEN_DISK; null = TMPDIR
    // bytes that products with weights may work with, see edgekv_model_product_bytes; 0: any. A
    // graph that needs more has llama.cpp's products
    int64_t most_work;
    edgekv_progress progress;
    void * data;
};

// builds the graphs and takes the memory; null on failure. The context must not be used otherwise
// until end or free.
LLAMA_API struct edgekv_prefill * edgekv_prefill_begin(
    struct llama_context * ctx, const struct edgekv_prefill_params * params);
// false: this model's graph cannot be cut, or EDGEKV_HIDDEN_NONE was asked for: all layers were
// read at once (same result)
LLAMA_API bool edgekv_prefill_by_layer(const struct edgekv_prefill * p);
// compute layer il (in order); afterwards its statistics and rows can be read until the next call
LLAMA_API int edgekv_prefill_run(struct edgekv_prefill * p, int32_t il);
// milliseconds that column statistics have taken so far
LLAMA_API double edgekv_prefill_score_ms(const struct edgekv_prefill * p);
// what the CPU's kernels have done so far: milliseconds and multiply-adds of products with weights,
// of those in 8 bits, then of attention; llama.cpp's own are not counted
LLAMA_API int edgekv_prefill_work(const struct edgekv_prefill * p, double out[6]);
// multiply-adds that a thread can do in a second as products with weights are made here, in 8 bits
// (levels) or not; 0 if that cannot be measured
LLAMA_API double edgekv_product_peak(bool levels);
// rows of the layer in work: head k has old[k] rows of earlier turns, then n_tokens
LLAMA_API int edgekv_prefill_old(const struct edgekv_prefill * p, int32_t il, int32_t * old);
// statistic of one observer: out [n_head_kv, n_rows_max], n_rows_max = max(edgekv_len) + n_tokens;
// head k's row j at [k, j], the rest 0
LLAMA_API int edgekv_prefill_stat(
    const struct edgekv_prefill * p, int32_t observer, enum edgekv_stat stat, float * out);
// an observer's queries before RoPE, of one query head: mean [d_k] and covariance [d_k, d_k]
LLAMA_API int edgekv_prefill_queries(
    const struct edgekv_prefill * p, int32_t observer, int32_t head, float * mean, float * cov);
// the layer's queries have been looked at: their memory goes back
LLAMA_API int edgekv_prefill_drop_queries(struct edgekv_prefill * p, int32_t observer);
// what turns such a query q into one that meets stored keys, on average over the next n_future
// positions: k . (R q) is a logit. out: R [d_k, d_k], scales and the rotation of quantised caches
// included
LLAMA_API int edgekv_prefill_rotation(
    const struct edgekv_prefill * p, int32_t n_future, float * out);
// hidden states of the prompt's last tokens, see edgekv_keep_hidden, once the last layer has run:
// how many there are. out: [n, n_embd_out], or null
LLAMA_API int32_t edgekv_prefill_hidden(const struct edgekv_prefill * p, float * out);
// K and V of the layer in work as f32, [old + n_tokens, d]; either may be null
LLAMA_API int edgekv_prefill_rows(
    const struct edgekv_prefill * p, int32_t head, float * k, float * v);
// the same of n of its rows, [n, d]; from a device only these travel
LLAMA_API int edgekv_prefill_some_rows(const struct edgekv_prefill * p, int32_t head, int32_t n,
    const int32_t * rows, float * k, float * v);
// what a linear map of the score kvzap (edgekv/methods/kvzap.py) says of each row of one head of
// the layer in work: out [old + n_tokens]. weights [d_v + d_k/2 + 4]; neighbours: RoPE turns values
// 2 i and 2 i + 1 of a key together, else i and i + d_k/2; turn_k, turn_v: K and V are stored times
// a Walsh-Hadamard matrix of this size, block by block, 0: as they are. unlike: KeyDiff's score,
// -cosine of each key with the mean direction of all
LLAMA_API int edgekv_prefill_predict(const struct edgekv_prefill * p, int32_t head,
    const float * weights, int32_t n_weights, bool neighbours, int32_t turn_k, int32_t turn_v,
    float * out, float * unlike);
// evict: the layer in work keeps these rows (numbers as above). Sliding-window layers keep their
// window by themselves.
LLAMA_API int edgekv_prefill_keep(
    struct edgekv_prefill * p, const int32_t * counts, const int32_t * rows);

// Merging comes before rows are evicted. Rows are those of one head of the layer in work, numbered
// as in keep, or of a finished layer, numbered in the order in which shrink cuts them.

// search: for each of the rows `gone` the one of `kept` whose key has the largest cosine with its
// own, the first of equal ones. cosine, nearest: [n_gone]; nearest is an index into kept
LLAMA_API int edgekv_prefill_nearest(const struct edgekv_prefill * p, int32_t il, int32_t head,
    int32_t n_gone, const int32_t * gone, int32_t n_kept, const int32_t * kept, float * cosine,
    int32_t * nearest);

// what rows receive: rows[i] becomes own[i]*rows[i] + the sum of weight*source over its counts[i]
// sources, keys and values alike
struct edgekv_merge {
    int32_t n;
    const int32_t * rows;   // [n]
    const float * own;      // [n]
    const int32_t * counts; // [n]
    // of rows[0], then of rows[1] ...; none of them receives anything
    const int32_t * sources;
    const float * weights; // of each source
};
// merge: summed in f32, written in the type of the cache; other rows keep their bytes
LLAMA_API int edgekv_prefill_merge(
    struct edgekv_prefill * p, int32_t il, int32_t head, const struct edgekv_merge * m);

// summary: up to n_groups rows that stand for those that a head loses. keys [n_groups, d_k], values
// [n_groups, d_v]: the first *n_found; label [n] or null: the group of each lost row
LLAMA_API int edgekv_centroids(const struct edgekv_lost * lost,
    const struct edgekv_centroid_params * params, float * keys, float * values, int32_t * n_found,
    int32_t * label);

// a finished layer shrinks to its first counts[k] rows
LLAMA_API int edgekv_prefill_shrink(struct edgekv_prefill * p, int32_t il, const int32_t * counts);
// all layers are kept: they become the conversation, logits of the prompt's last token are at
// llama_get_logits_ith(ctx, -1)
LLAMA_API int edgekv_prefill_end(struct edgekv_prefill * p);
// Between two chunks, which is where `progress` is called: the conversation is as before the
// prompt, until edgekv_prefill_resume. Meanwhile it may wait in an edgekv_parked, and others may
// use the context, read short prompts too. EDGEKV_INVALID if another prompt of the context waits
// already
LLAMA_API int edgekv_prefill_pause(struct edgekv_prefill * p);
// The prompt is half read again, as it was when it was paused, and `progress` may return.
// EDGEKV_INVALID if the context does not hold the conversation that it held then; after any error
// nothing can be done with the prompt but edgekv_prefill_free
LLAMA_API int edgekv_prefill_resume(struct edgekv_prefill * p);
// gives everything back; without edgekv_prefill_end the conversation stays as before
LLAMA_API void edgekv_prefill_free(struct edgekv_prefill * p);

#ifdef __cplusplus
}
#endif
