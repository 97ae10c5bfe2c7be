#pragma once
// A conversation beside its context: it changes places with the one in the context. The rows stay
// where they are in memory; only who points to them changes.

#include "edgekv-cache.h"

struct edgekv_parked;

// see edgekv_step_several; throws edgekv_error, std::bad_alloc
void edgekv_several(
    llama_context & ctx, int32_t n, edgekv_parked * const * places, const llama_token * tokens);

struct edgekv_parked {
    // an empty conversation for a context; throws std::bad_alloc
    explicit edgekv_parked(const edgekv_memory & m);
    ~edgekv_parked();
    edgekv_parked(const edgekv_parked &) = delete;
    edgekv_parked & operator=(const edgekv_parked &) = delete;

    // The conversation in the context and this one change places. The state of recurrent layers,
    // which graphs point to, is copied. Throws edgekv_error, and std::bad_alloc, after which the
    // one in the context may be gone. No prompt is being read, and no graph is at work
    void swap(llama_memory_i * mem);
    // The state of recurrent layers goes into a cell beside the context's, and whoever has that
    // makes way; throws std::bad_alloc, after which all are as before
    void enter(llama_memory_recurrent & m, uint32_t cell);
    // It goes back into main memory; nothing if it is there. The same
    void leave(llama_memory_recurrent & m);
    // of a step that failed with the state half changed: it cannot be used any more
    void lose();
    void check_there() const; // throws edgekv_error if it is lost
    size_t n_bytes() const;
    int64_t n_bytes_archive() const { return store.archive ? store.archive->n_bytes() : 0; }

    const uint64_t owner; // the context's memory
    edgekv_store store;

private:
    std::shared_ptr<std::vector<edgekv_parked *>> seats;
    uint32_t cell = 0; // that has the state of recurrent layers; 0: `recurrent` is it
    bool lost = false;
    edgekv_recurrent_state recurrent;
    edgekv_recurrent_state mark;
    llama_pos n_mark = -1;
};
