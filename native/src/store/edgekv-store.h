#pragma once
// The ragged store: the rows of all layers (edgekv-layer.h), and how many tokens went in.

#include "edgekv-archive.h"
#include "edgekv-layer.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct edgekv_table;
struct llm_graph_context;
class llama_io_write_i;
class llama_io_read_i;

// Queries, keys and values of a layer as llama.cpp's graph has them, [d, n_head or n_head_kv,
// n_tokens], and what attention needs besides
struct edgekv_attention {
    // the layer that asks; k and v: null where it reads another's
    int il;
    ggml_tensor *q, *k, *v, *sinks; // sinks: may be null
    float scale;
};

// Who reads a prompt into a store. While it does, graphs attend as it says
struct edgekv_reader {
    // nodes of one layer: store its rows, attend to those of l; returns [d_v, n_head, n_tokens]
    virtual ggml_tensor * attend(
        const llm_graph_context & g, const edgekv_layer & l, const edgekv_attention & a) = 0;
    // the context is being freed: all memory goes back, and nothing can be read any more
    virtual void lose_context() noexcept = 0;

protected:
    ~edgekv_reader() = default;
};

struct edgekv_store {
    std::vector<std::unique_ptr<edgekv_layer>> layers; // by model layer
    // changes whenever tensors move: graphs that point to them are stale
    uint64_t version = 0;
    llama_pos n_past = 0; // tokens that went in
    // tokens before this one were selected from: they cannot be taken back one by one
    llama_pos boundary = 0;
    bool graph_attend = false; // one flash-attention call per head instead of the CPU kernel
    bool node_attend = false;  // the node that devices have a kernel for, on the CPU too
    // made when a graph wants them
    std::map<ggml_backend_buffer_type_t, std::unique_ptr<edgekv_table>> tables;
    // whose graphs read and write the rows; set with each of them, null before the first
    ggml_backend_sched_t sched = nullptr;

    edgekv_store();
    ~edgekv_store();         // a prompt that is being read learns that its context is gone
    size_t n_bytes_peak = 0; // highest sum of store, scratch and hidden states so far
    std::unique_ptr<edgekv_archive> archive; // null: of this conversation there is none
    std::string lost_archive;                // why not any more
    edgekv_reader * active = nullptr;        // null: no prompt is being read
    edgekv_reader * paused = nullptr;        // whose prompt waits half read, null: nobody's
    // of a step for several conversations: whose rows the tokens of each sequence attend to; empty:
    // all tokens are this store's
    std::vector<edgekv_store *> several;

    // that has the rows of all n_layer layers of the model; null: the CPU, or several
    ggml_backend_dev_t only_device(uint32_t n_layer) const;
    size_t n_bytes() const;
    void note_peak(size_t n_bytes_extra = 0);
    // waits for graphs that are still at work on the rows: a device goes on behind our back
    void settle() const {
        if (sched) ggml_backend_sched_synchronize(sched);
    }
    void place_pos(); // of all layers; after anything that moved rows
    // room for n more rows in every head; sliding-window layers drop what no future token sees
    void reserve_tail(int32_t n);
    // Tokens that one step may have instead of several, so that rows move and are rounded behind
    // the same ones: as many as there is room for, or as the next one makes room for
    int32_t n_alike() const;
    // n more rows in every head, for tokens at pos, which the graph of a step is about to write;
    // reserve_tail has made room for them, and take_back undoes it
    void append(const llama_pos * pos, int32_t n);
    // whether the archive has the rows of all tokens, or those that it lacks are the newest and as
    // they were
    bool has_archive() const { return archive && archive->n_tokens >= boundary; }
    // the archive gets the rows that it lacks; where it cannot, there is none any more, and the
    // reason is thrown
    void catch_up();
    void lose_archive(const char * why) noexcept;
    // whether an archive has rows of all layers: none has a window
    bool has_all_layers() const;
    // whether the conversation can go back to any token, recurrent states aside
    bool can_go_back() const { return has_archive() && has_all_layers(); }
    // forget tokens >= p0 of those before the boundary; false if the archive cannot bring them back
    bool go_back(llama_pos p0);
    // forget tokens >= p0; false if that cannot be done exactly
    bool trim(llama_pos p0);
    // the same for tokens of a step that failed, wherever it did: their rows may be there in some
    // layers only
    void take_back(llama_pos p0) noexcept;
    void clear() noexcept;
    // no row waits in halves any more
    void round_all();
    // room that no row uses goes back to the allocator
    void shrink_to_fit();

    // rows that wait stay halves
    void write(llama_io_write_i & io) const;
    // n_ctx: most tokens that it may hold; n_tokens: as many as it must hold, if not -1. throws
    // std::runtime_error or std::bad_alloc and leaves the store as it was
    void read(llama_io_read_i & io, llama_pos n_ctx, llama_pos n_tokens = -1);
};
