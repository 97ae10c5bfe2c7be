#pragma once
// Products of weights with a chunk's tokens by edgekv's kernel: the nodes of a planned graph are
// custom nodes while it is computed. Planned and allocated they are llama.cpp's own.

#include "edgekv-pages.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-impl.h"

#include <array>
#include <deque>
#include <memory>

class edgekv_products {
public:
    void find(const ggml_cgraph & graph); // throws std::bad_alloc

    size_t n_bytes() const { return n_words * sizeof(uint32_t); }
    void rest() { edgekv_give_back_pages(words.get(), n_bytes()); } // until the next layer

    struct running { // while it lives
        explicit running(edgekv_products & products);
        ~running();
        running(const running &) = delete;
        running & operator=(const running &) = delete;
        edgekv_products & products;
    };

private:
    struct taken {
        ggml_tensor * node;
        std::array<int32_t, GGML_MAX_OP_PARAMS / sizeof(int32_t)> params; // MUL_MAT's
        edgekv_product_job job;
    };
    std::deque<taken> nodes;           // never moved: jobs have addresses
    std::unique_ptr<uint32_t[]> words; // of one product; the tokens, as llama.cpp's work memory
    size_t n_words = 0;
};
