#include "edgekv-products.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cstring>

void edgekv_products::find(const ggml_cgraph & graph) {
    nodes.clear();
    size_t n_most = 0;
    for (int i = 0; i < graph.n_nodes; ++i) {
        const size_t n = edgekv_cpu().product_words(graph.nodes[i]);
        if (n == 0) continue;
        n_most = std::max(n_most, n);
        nodes.emplace_back();
        nodes.back().node = graph.nodes[i];
    }
    if (n_most <= n_words) return;
    words.reset();
    n_words = 0;
    words.reset(new uint32_t[n_most]);
    n_words = n_most;
}

edgekv_products::running::running(edgekv_products & products) : products(products) {
    for (auto & n : products.nodes) {
        n.job.words = products.words.get();
        n.job.n_ready = n.job.next = 0;
        memcpy(n.params.data(), n.node->op_params, sizeof(n.node->op_params));
        const ggml_custom_op_params custom = { edgekv_cpu().product, GGML_N_TASKS_MAX, &n.job };
        memset(n.node->op_params, 0, sizeof(n.node->op_params));
        memcpy(n.node->op_params, &custom, sizeof(custom));
        n.node->op = GGML_OP_CUSTOM;
    }
}

edgekv_products::running::~running() {
    for (auto & n : products.nodes) {
        memcpy(n.node->op_params, n.params.data(), sizeof(n.node->op_params));
        n.node->op = GGML_OP_MUL_MAT;
    }
}
