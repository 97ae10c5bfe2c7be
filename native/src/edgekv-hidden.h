#pragma once
// Hidden states of a whole prompt between two layers: [n_tokens, width] f32, f16, or f32 in a temporary file.
// They are read and written in order, once per layer, one chunk at a time.

#include "ggml-cpp.h"
#include "edgekv.h"

#include <cstdio>
#include <cstdint>
#include <string>
#include <vector>

class edgekv_hidden {
public:
    // in_place: graphs may read and write the f32 states where they are; else they come and go with load and save, a chunk at a time.
    // throws std::bad_alloc, or std::runtime_error when the file cannot be had
    edgekv_hidden(edgekv_hidden_mode mode, int64_t width, int64_t n_tokens, bool in_place, const std::string & dir);
    ~edgekv_hidden();

    // where graphs find the states of a chunk, null if not in place
    float * place(int64_t first) const;
    ggml_backend_buffer_t buffer() const { return buf.get(); }
    // n states into a tensor; false if the file cannot be read
    bool    load(int64_t first, int64_t n, ggml_tensor * to);
    // n states from a tensor; false if the file cannot take them
    bool    save(int64_t first, int64_t n, const ggml_tensor * from);
    size_t  n_bytes() const; // in memory

private:
    float * staged(const ggml_tensor * t, int64_t n);

    edgekv_hidden_mode mode;
    int64_t width;
    ggml_backend_buffer_ptr buf;  // in place
    std::vector<float> whole;     // f32, not in place
    std::vector<uint16_t> half;
    std::FILE * file = nullptr;
    std::vector<float> staging;   // a chunk, for tensors that lie on a device
};
