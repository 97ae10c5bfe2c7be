#pragma once
// A conversation beside its context: it changes places with the one in the context. The rows stay
// where they are in memory; only who points to them changes.

#include "edgekv-cache.h"

struct edgekv_parked {
    // an empty conversation for a context; throws std::bad_alloc
    explicit edgekv_parked(const edgekv_memory & m);

    // The conversation in the context and this one change places. The state of recurrent layers,
    // which graphs point to, is copied. Throws edgekv_error, and std::bad_alloc, after which the
    // one in the context may be gone. No prompt is being read, and no graph is at work
    void swap(llama_memory_i * mem);
    size_t n_bytes() const;
    int64_t n_bytes_archive() const { return archive ? archive->n_bytes() : 0; }

private:
    uint64_t owner; // the context's memory
    std::vector<std::unique_ptr<edgekv_layer>> layers;
    llama_pos n_past = 0, boundary = 0;
    std::unique_ptr<edgekv_archive> archive;
    std::string lost_archive;
    size_t n_bytes_peak = 0;
    edgekv_recurrent_state recurrent;
    edgekv_recurrent_state mark;
    llama_pos n_mark = -1;
};
