#pragma once
// What is asked of the backends of a context that llama.cpp does not ask.

#include "ggml-cpp.h"

#include <vector>

struct llama_context;

// whether all devices of a context computed what they were given, as far as they say so only when
// they are asked: Metal tells of a failure only when it is given something again
bool edgekv_devices_are_well(llama_context & ctx);

// While this lives, CUDA does not write down what it computes in case it comes again: of a prompt
// nothing does, and each chunk of each layer would stay for seconds
class edgekv_unrecorded {
public:
    explicit edgekv_unrecorded(const std::vector<ggml_backend_ptr> & backends);
    ~edgekv_unrecorded();
    edgekv_unrecorded(const edgekv_unrecorded &) = delete;
    edgekv_unrecorded & operator=(const edgekv_unrecorded &) = delete;

private:
    std::vector<void (*)(bool)> all;
};
