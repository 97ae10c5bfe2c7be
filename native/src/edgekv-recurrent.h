#pragma once
// The state of a model's recurrent layers. It has a fixed size, every token changes it, and no
// token can be taken out of it again: whoever wants to go back needs a copy.

#include "llama-memory-recurrent.h"

#include <utility>
#include <vector>

class llama_io_read_i;
class llama_io_write_i;

// the recurrent part of a context's memory, or null where a model has none
llama_memory_recurrent * edgekv_recurrent_of(llama_memory_i * mem);

// bytes of a conversation's state
size_t edgekv_recurrent_bytes(llama_memory_i * mem);

// Copies of what layers [begin, end) hold of a conversation, in main memory. Its cell is the
// context's, or one beside it that a step of several conversations uses.
struct edgekv_recurrent_rows {
    std::vector<std::pair<ggml_tensor *, std::vector<char>>> rows;

    // throws std::bad_alloc
    void make(const llama_memory_recurrent & m, size_t begin, size_t end);
    void save(const llama_memory_recurrent & m, size_t begin, size_t end,
        uint32_t cell = 0); // the same, filled; those that were made are used again
    void restore(uint32_t cell = 0) const;
    size_t n_bytes() const;
};

// a copy of all of it; nothing for a model without recurrent layers
struct edgekv_recurrent_state {
    void save(llama_memory_recurrent * m);                                  // throws std::bad_alloc
    void save(llama_memory_recurrent & m, uint32_t cell, llama_pos n_past); // the same
    // what `write` wrote, for m, where nothing changes before `restore`; throws std::runtime_error,
    // std::bad_alloc
    void read(llama_memory_recurrent * m, llama_io_read_i & io);
    void write(llama_io_write_i & io) const;
    void restore() const;                  // it is the context's
    void put(uint32_t cell) const;         // beside the context's
    llama_pos n_past() const { return n; } // tokens in it
    void clear() { *this = {}; }
    size_t n_bytes() const { return rows.n_bytes(); }

private:
    llama_memory_recurrent * memory = nullptr;
    llama_pos n = 0;
    edgekv_recurrent_rows rows; // none of a conversation without tokens: its first one clears them
};

// tokens in it
llama_pos edgekv_recurrent_past(const llama_memory_recurrent & m);
// a cell holds a conversation of n_past tokens, or none; bytes stay as they are
void edgekv_recurrent_set(llama_memory_recurrent & m, uint32_t cell, llama_pos n_past);
