#pragma once
// Slices of graphs, run one after the other: the scheduler's plan, and the hidden states in and
// out.

#include "edgekv.h"
#include "edgekv-chunks.h"
#include "edgekv-hidden.h"
#include "edgekv-products.h"

#include <memory>
#include <string>
#include <vector>

// a slice of a graph as the scheduler has it
struct edgekv_planned {
    edgekv_graph * graph = nullptr;
    int slice = -1;
    ggml_cgraph gf;
    // moved: views of what has another address for each chunk
    std::vector<ggml_tensor *> nodes, leafs, moved;
};

class edgekv_slices {
public:
    edgekv_slices(const edgekv_prompt & prompt, const edgekv_chunks & chunks)
        : prompt(prompt), chunks(chunks) {}

    // room for the hidden states, and on devices for the largest graphs; dir: of a temporary file.
    // throws std::bad_alloc, std::runtime_error
    void reserve(edgekv_hidden_mode mode, const std::string & dir);
    void run(const edgekv_chunk & c, int slice); // throws edgekv_error, std::bad_alloc
    void rest() { products.rest(); }             // a layer has been read
    void drop_work() {                           // no layer comes any more
        hidden.reset();
        products = {};
    }
    void forget_plan() { planned = {}; } // the scheduler is going to serve others
    void clear();
    size_t n_bytes() const { return products.n_bytes() + (hidden ? hidden->n_bytes() : 0); }

private:
    void prepare(edgekv_graph & g, int slice);
    void plan(edgekv_graph & g, int slice);

    const edgekv_prompt & prompt;
    const edgekv_chunks & chunks;
    edgekv_planned planned;
    edgekv_products products;
    std::unique_ptr<edgekv_hidden> hidden;
};
