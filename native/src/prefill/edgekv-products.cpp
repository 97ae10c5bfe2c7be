#include "edgekv-products.h"
#include "edgekv-kernels.h"

#include <algorithm>
#include <cstring>

static void grow(std::unique_ptr<uint32_t[]> & p, size_t & n, size_t n_wanted) {
    if (n_wanted <= n) return;
    p.reset();
    n = 0;
    p.reset(new uint32_t[n_wanted]);
    n = n_wanted;
    edgekv_want_large_pages(p.get(), n * sizeof(uint32_t));
}

// whether the tokens of two products are the same as words, and lie at the same place
static bool same_words(const ggml_tensor & a, const ggml_tensor & b) {
    const ggml_tensor &v = *a.src[0], &w = *b.src[0];
    const bool alike = v.type == w.type &&
        ggml_backend_buffer_get_type(v.buffer) == ggml_backend_buffer_get_type(w.buffer) &&
        !v.extra == !w.extra;
    return alike && a.src[1] == b.src[1] && a.src[2] == b.src[2];
}

void edgekv_products::find(const ggml_cgraph & graph, bool again, size_t most) {
    nodes.clear();
    size_t n_most = 0;
    for (int i = 0; i < graph.n_nodes; ++i) {
        const size_t n = edgekv_cpu().product_words(graph.nodes[i]);
        if (n == 0) continue;
        n_most = std::max(n_most, n);
        const ggml_tensor * before = nodes.empty() ? nullptr : nodes.back().node;
        nodes.emplace_back();
        auto & now = nodes.back();
        now.node = graph.nodes[i];
        now.op = now.node->op;
        now.job.has_words = before && same_words(*before, *now.node);
    }
    const size_t n_bytes = n_most * sizeof(uint32_t);
    if (n_bytes > most) return nodes.clear();
    grow(words, n_words, n_most);
    if (again) keep_unpacked(std::min(most - n_bytes, MOST_UNPACKED));
}

// A chunk that has another graph finds what is there.
void edgekv_products::keep_unpacked(size_t most) {
    const bool is_first = weights.empty();
    size_t n_all = 0;
    for (auto & n : nodes) {
        const ggml_tensor * w = n.node->src[0];
        const size_t size = edgekv_cpu().product_unpacked(w, ggml_nrows(n.node->src[1]));
        if (is_first && size > 0 && (n_all + size) * sizeof(uint32_t) <= most &&
            weights.emplace(w->data, weight { n_all, false }).second)
            n_all += size;
        const auto found = weights.find(w->data);
        if (found != weights.end()) n.kept = &found->second;
    }
    grow(unpacked, n_unpacked, n_all);
}

void edgekv_products::rest() {
    weights.clear();
    for (auto & n : nodes) n.kept = nullptr;
    edgekv_give_back_pages(words.get(), n_words * sizeof(uint32_t));
    edgekv_give_back_pages(unpacked.get(), n_unpacked * sizeof(uint32_t));
}

edgekv_products::running::running(
    edgekv_products & products, edgekv_work & work, edgekv_work & of_levels)
    : products(products), work(work), of_levels(of_levels) {
    for (auto & n : products.nodes) {
        n.job.words = products.words.get();
        n.job.unpacked = n.kept ? products.unpacked.get() + n.kept->begin : nullptr;
        n.job.is_unpacked = n.kept && n.kept->is_unpacked;
        n.job.n_ready = n.job.next = 0;
        n.job.ms = 0;
        n.job.has_unpacked = false;
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
        n.node->op = n.op;
        edgekv_work & done_in = n.job.levels ? of_levels : work;
        done_in.ms += n.job.ms;
        done_in.n += (double) ggml_nelements(n.node) * (double) n.node->src[0]->ne[0];
        if (n.kept && done && n.job.has_unpacked) n.kept->is_unpacked = true;
    }
}
