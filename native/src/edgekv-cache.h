#pragma once
// The memory of a compressed context. It is an ordinary llama.cpp cache for everything that deals
// with cells and positions (graph inputs, batches), without rows of its own: K/V live in the store.

#include "edgekv.h"
#include "edgekv-recurrent.h"
#include "edgekv-store.h"

#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"

#include <memory>
#include <string>

class edgekv_products;
struct edgekv_parked;

// opened to native/ by one friend declaration per class
struct edgekv_access {
    static void resize_cells(llama_kv_cache & kv, uint32_t n);
    // cells 0..n-1 hold positions 0..n-1 of sequence 0, as after a prompt of n tokens
    static void fill_cells(llama_kv_cache & kv, uint32_t n);
    static llama_kv_cache * cache(const llama_kv_cache_context * mctx);
    static bool has_layer(const llama_kv_cache & kv, int32_t il);
    // size of the Walsh-Hadamard matrix by which keys are stored, 0: as they are
    static int key_turn(const llama_kv_cache & kv);
    // whether all rows are numbers
    static bool finite(const llama_kv_cache & kv);
};

struct edgekv_memory {
    const uint64_t id = next_id(); // no other memory of this process has it, not even a later one
    std::unique_ptr<edgekv_store> store;
    uint32_t n_ctx = 0;
    bool archives = false;   // conversations have an archive
    std::string archive_dir; // where
    float recall = 0;        // share of the tokens that a new one recalls from it
    int index_bits = 0;      // by which it finds them: see edgekv_index
    // throws std::runtime_error if there can be no file for it
    std::unique_ptr<edgekv_archive> new_archive() const {
        auto fresh =
            std::make_unique<edgekv_archive>(store->layers, n_ctx, archive_dir, recall, index_bits);
        fresh->owner = id;
        return fresh;
    }
    int64_t n_positions = INT64_MAX; // that the model has learned one by one, if it has
    uint32_t n_outputs_max = 0;      // tokens of a batch whose logits may be asked for
    int64_t n_hidden = 0;            // last tokens of a prompt whose hidden states are wanted
    uint32_t n_several = 1;          // conversations that a step may have tokens of
    // Whose recurrent state is in a cell beside the context's, which is the first one. It stays
    // there from step to step
    std::shared_ptr<std::vector<edgekv_parked *>> seats;
    // of recurrent layers, to go back to: what they held behind the first n_mark tokens
    edgekv_recurrent_state mark;
    llama_pos n_mark = -1; // -1: nothing is marked
    // the same, to go back to from a draft
    edgekv_recurrent_state kept;
    llama_pos n_kept = -1;
    std::shared_ptr<edgekv_products> products; // of a step's graph; null before the first
    virtual ~edgekv_memory() = default;
    void forget_mark() {
        mark.clear();
        n_mark = n_kept = -1;
    }
    // the cells hold the first n_past tokens again, whatever lies behind them; K/V and recurrent
    // states stay as they are
    virtual void forget_cells(llama_pos n_past) = 0;
    // the cells hold no tokens of others than sequence 0
    virtual void forget_others() = 0;
    // the cells hold n_past tokens, whatever they held; throws std::bad_alloc
    virtual void set_cells(llama_pos n_past) = 0;

private:
    static uint64_t next_id();
};

// T: llama_kv_cache or llama_kv_cache_iswa, or llama_memory_hybrid or llama_memory_hybrid_iswa
template <typename T>
struct edgekv_cache : T, edgekv_memory {
    template <typename... A>
    explicit edgekv_cache(A &&... a) : T(std::forward<A>(a)...) {}

    llama_memory_context_ptr init_batch(
        llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;
    bool get_can_shift() const override { return false; }
    void clear(bool data) override;
    void forget_cells(llama_pos n_past) override;
    void forget_others() override;
    void set_cells(llama_pos n_past) override;
    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;
    void state_write(llama_io_write_i & io, llama_seq_id seq_id = -1,
        llama_state_seq_flags flags = 0) const override;
    void state_read(
        llama_io_read_i & io, llama_seq_id seq_id = -1, llama_state_seq_flags flags = 0) override;
};

// for edgekv_last_error: why a context could not be created (llama.cpp logs what its constructor
// throws and returns null), or a step was not computed
void edgekv_note_error(const char * what, edgekv_status status) noexcept;

// Note what the recurrent layers hold: the tokens behind it can then be taken back. Nothing happens
// to a model without such layers, whose tokens can be taken back one by one. throws std::bad_alloc
void edgekv_mark(llama_memory_i * mem);

// The same for a draft, in the memory of the last such copy; the mark stays
void edgekv_keep(llama_memory_i * mem);

// whether the rows of llama.cpp's own cache are numbers; other kinds of memory are not looked at
bool edgekv_finite(llama_memory_i * mem);

// the memory of a context that has a store
edgekv_memory & edgekv_memory_of(llama_context & ctx);

// the store of a context, or null
edgekv_store * edgekv_store_of(llama_memory_i * mem);

// The conversation is again its first n_past tokens, whatever a step that failed has left behind
// them. It is empty if recurrent layers have gone on already
void edgekv_take_back(llama_memory_i * mem, llama_pos n_past);

// the next context that this thread creates gets a store
void edgekv_want_store(bool on);

// heads of a layer that keep K and V
int32_t edgekv_n_head_kv(const llama_model & model, int32_t il);

// values of a token's hidden state between two layers
int32_t edgekv_hidden_width(const llama_model & model);
// see edgekv_model_rows_alike
bool edgekv_rows_alike(const llama_model & model);
// see edgekv_model_product_bytes
int64_t edgekv_product_bytes(const llama_model & model, int64_t n_chunk, bool again);

// how a model is read: why not layer by layer, or null
const char * edgekv_unsupported(const llama_model & model);
