#pragma once
// Products of weights with a chunk's tokens by edgekv's kernel: the nodes of a planned graph are
// custom nodes while it is computed. Planned and allocated they are llama.cpp's own.

#include "edgekv-pages.h"
#include "edgekv-prompt.h"
#include "cpu/edgekv-cpu.h"

#include "ggml-impl.h"

#include <array>
#include <deque>
#include <map>
#include <memory>

class edgekv_products {
public:
    // of a layer's weights as many stay unpacked from chunk to chunk
    static constexpr size_t MOST_UNPACKED = 64u << 20;

    // again: many chunks meet the same weights, as edgekv_product_bytes takes for granted; most:
    // bytes, see edgekv_prefill_params. throws std::bad_alloc
    void find(const ggml_cgraph & graph, bool again, size_t most);

    size_t n_bytes() const { return (n_words + n_unpacked) * sizeof(uint32_t); }
    void rest(); // until the next layer

    struct running { // while it lives
        running(edgekv_products & products, edgekv_work & work, edgekv_work & of_levels);
        ~running();
        running(const running &) = delete;
        running & operator=(const running &) = delete;
        edgekv_products & products;
        edgekv_work &work, &of_levels;
        bool done = false; // all nodes have run
    };

private:
    struct weight { // unpacked
        size_t begin = 0;
        bool is_unpacked = false;
    };
    struct taken {
        ggml_tensor * node;
        ggml_op op;
        std::array<int32_t, GGML_MAX_OP_PARAMS / sizeof(int32_t)> params; // llama.cpp's
        edgekv_product_job job;
        weight * kept = nullptr;
    };
    void keep_unpacked(size_t most); // bytes

    std::deque<taken> nodes;                // never moved: jobs have addresses
    std::map<const void *, weight> weights; // by their data
    std::unique_ptr<uint32_t[]> words; // of one product; the tokens, as llama.cpp's work memory
    std::unique_ptr<uint32_t[]> unpacked;
    size_t n_words = 0, n_unpacked = 0;
};
