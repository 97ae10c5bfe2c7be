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

    // The conversation in the context and this one change places. The state of recurrent layers,
    // which graphs point to, is copied. Throws edgekv_error, and std::bad_alloc, after which the
    // one in the context may be gone. No prompt is being read, and no graph is at work
    void swap(llama_memory_i * mem);
    size_t n_bytes() const;
    int64_t n_bytes_archive() const { return store.archive ? store.archive->n_bytes() : 0; }

    const uint64_t owner; // the context's memory
    edgekv_store store;

private:
    edgekv_recurrent_state recurrent;
    edgekv_recurrent_state mark;
    llama_pos n_mark = -1;
};
