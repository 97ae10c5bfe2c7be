#pragma once
// Hidden states of a whole prompt between two layers: [n_tokens, width] f32 or f16 in main memory,
// f32 in a temporary file or on a device. They are read and written in order, once per layer, one
// chunk at a time.

#include "ggml-cpp.h"
#include "edgekv.h"

#include <cstdio>
#include <cstdint>
#include <string>
#include <vector>

class edgekv_hidden {
public:
    // device: where graphs compute; null: on the CPU. They read and write f32 states where those
    // are if that is their own memory (with DEVICE, which needs one that has all layers, the
    // device's). Else states come and go with load and save, a chunk at a time, through memory that
    // the device copies from at full speed (pinned), if it has such. throws std::bad_alloc, or
    // std::runtime_error when the file cannot be had
    edgekv_hidden(edgekv_hidden_mode mode, int64_t width, int64_t n_tokens,
        ggml_backend_dev_t device, const std::string & dir);
    ~edgekv_hidden();

    // where graphs find the states of a chunk, null if not in place
    float * place(int64_t first) const;
    ggml_backend_buffer_t buffer() const { return in_place ? buf.get() : nullptr; }
    // n states into a tensor; false if the file cannot be read
    bool load(int64_t first, int64_t n, ggml_tensor * to);
    // n states from a tensor; false if the file cannot take them
    bool save(int64_t first, int64_t n, const ggml_tensor * from);
    void drop(int64_t first, int64_t n); // nobody reads these n states again
    size_t n_bytes() const;              // in memory

private:
    ggml_backend_buffer_ptr allocate(size_t n_bytes) const;
    float * f32(int64_t first) const;
    ggml_fp16_t * f16(int64_t first) const;
    float * staged(const ggml_tensor * t, int64_t n);

    edgekv_hidden_mode mode;
    int64_t width;
    ggml_backend_buffer_type_t buft;
    bool in_place;
    ggml_backend_buffer_ptr buf; // all states, f32 or f16
    // with f16, of each token: its state is stored divided by two to that power
    std::vector<int8_t> exponents;
    std::FILE * file = nullptr;
    ggml_backend_buffer_ptr staging; // a chunk, for tensors that lie on a device
};
