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
    // chunk_tokens: most tokens that are worked on at once. throws std::runtime_error when memory or the file cannot be had
    edgekv_hidden(edgekv_hidden_mode mode, int64_t width, int64_t n_tokens, int64_t chunk_tokens, const std::string & dir);
    ~edgekv_hidden();

    ggml_backend_buffer_t buffer() const { return buf.get(); }
    // the chunk's states as f32; valid until the next load
    float * load(int64_t first, int64_t n);
    // what load gave has been overwritten: keep it. false if the file cannot take it
    bool    save(int64_t first, int64_t n);
    // the place that load would give, without reading
    float * place(int64_t first) const;
    size_t  n_bytes() const; // in memory

private:
    edgekv_hidden_mode mode;
    int64_t width;
    ggml_backend_buffer_ptr buf; // f32: everything, else one chunk
    std::vector<uint16_t> half;
    std::FILE * file = nullptr;
};
