// Cutting llama.cpp's graph of a chunk into layers
#include "edgekv-graph.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>

// the layer that a node of this name is the output of, -1: none; views of outputs are named after
// them
static int layer_of(const char * name, const char * prefix) {
    const size_t n = strlen(prefix);
    if (strncmp(name, prefix, n) != 0) return -1;
    char * end = nullptr;
    const long il = strtol(name + n, &end, 10);
    return end != name + n && *end == 0 ? (int) il : -1;
}

// the layers' outputs, by layer; false if one comes twice: a stack that is run more than once
static bool find_outputs(
    const ggml_cgraph & gf, const char * prefix, std::unordered_map<int, int> & nodes) {
    for (int i = 0; i < gf.n_nodes; ++i) {
        const int il = layer_of(gf.nodes[i]->name, prefix);
        if (il >= 0 && !nodes.emplace(il, i).second) return false;
    }
    return true;
}

// false if this graph cannot be cut at the outputs of its layers
bool edgekv_graph::find_cuts(int n_slice) {
    std::unordered_map<int, int> outputs;
    // nearly all call it l_out; Nemotron-H gives that name to a part of some layers
    for (const char * prefix : { "nemotron_h_block_out-", "l_out-", "ffn_residual-" }) {
        if (outputs.empty() && !find_outputs(*gf, prefix, outputs)) return false;
    }
    cut.assign(1, 0);
    for (int il = 0; il < n_slice - 1; ++il) {
        const auto it = outputs.find(il);
        if (it == outputs.end()) return false;
        ggml_tensor * t = gf->nodes[it->second];
        const bool placeable = !t->view_src && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) &&
            ggml_nelements(t) % n_tokens == 0;
        const int64_t width = ggml_nelements(t) / n_tokens;
        const bool same_width = il == 0 || width == ggml_nelements(resid[0]) / n_tokens;
        if (!placeable || !same_width || it->second + 1 <= cut.back()) return false;
        resid.push_back(t);
        resid_op.push_back(t->op);
        cut.push_back(it->second + 1);
    }
    cut.push_back(gf->n_nodes); // the last slice takes the head
    return find_slices();
}

bool edgekv_graph::find_slices() {
    slices.resize(cut.size() - 1);
    for (size_t i = 0; i < slices.size(); ++i)
        if (!find_slice((int) i, slices[i])) return false;
    return true;
}

// Nodes of one slice. What it needs from before the cut, other than the hidden states, is computed
// again (scaled positions and the like); false if that leads back to another layer's output.
bool edgekv_graph::find_slice(int i, edgekv_slice & slice) const {
    const int i0 = cut[i], i1 = cut[i + 1];
    std::unordered_set<const ggml_tensor *> have(gf->nodes + i0, gf->nodes + i1);
    have.insert(gf->leafs, gf->leafs + gf->n_leafs);
    if (i > 0) have.insert(resid[i - 1]);

    const std::unordered_set<const ggml_tensor *> other(resid.begin(), resid.end());
    // depth first; the chains are a few nodes long
    auto need = [&](auto && self, ggml_tensor * t) -> bool {
        if (!t || have.count(t)) return true;
        if (other.count(t)) return false;
        if (t->op == GGML_OP_NONE && !t->view_src) return true; // a weight or a row tensor
        for (ggml_tensor * s : t->src)
            if (!self(self, s)) return false;
        if (!self(self, t->view_src)) return false;
        have.insert(t);
        slice.nodes.push_back(t);
        return true;
    };
    for (int j = i0; j < i1; ++j) {
        for (ggml_tensor * s : gf->nodes[j]->src)
            if (!need(need, s)) return false;
        if (!need(need, gf->nodes[j]->view_src)) return false;
    }
    slice.nodes.insert(slice.nodes.end(), gf->nodes + i0, gf->nodes + i1);
    if (n_outputs == 0 && i1 == gf->n_nodes) drop_unread(slice.nodes);

    std::unordered_set<const ggml_tensor *> read;
    for (const ggml_tensor * t : slice.nodes) {
        read.insert(std::begin(t->src), std::end(t->src));
        read.insert(t->view_src);
        for (const ggml_tensor * s : t->src) // a view's tensor may be nobody's source
            if (s) read.insert(s->view_src);
    }
    for (int j = 0; j < gf->n_leafs; ++j) {
        ggml_tensor * t = gf->leafs[j];
        if (!(t->flags & GGML_TENSOR_FLAG_INPUT) && read.count(t)) slice.weights.push_back(t);
    }
    return true;
}

// whether a node's result lies in another tensor: rows of the cache, a recurrent state
static bool writes(const ggml_tensor & t) {
    const bool is_view = t.op == GGML_OP_VIEW || t.op == GGML_OP_RESHAPE ||
        t.op == GGML_OP_PERMUTE || t.op == GGML_OP_TRANSPOSE;
    return t.view_src && !is_view;
}

// Behind the last layer's K and V nobody reads what its tokens become, but for the prompt's last
// one: of the others' nodes stays what writes, what observers and heads want, and what these are
// made of.
void edgekv_graph::drop_unread(std::vector<ggml_tensor *> & nodes) const {
    std::unordered_set<const ggml_tensor *> read(observing.begin(), observing.end());
    if (has_hidden) read.insert(res->get_h_nextn());
    std::vector<ggml_tensor *> left;
    for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
        ggml_tensor * t = *it;
        if (!writes(*t) && !read.count(t)) continue;
        read.insert(std::begin(t->src), std::end(t->src));
        read.insert(t->view_src);
        left.push_back(t);
    }
    nodes.assign(left.rbegin(), left.rend());
}

void edgekv_graph::keep_sources() {
    sources.resize(gf->n_nodes);
    for (int i = 0; i < gf->n_nodes; ++i) {
        std::copy_n(gf->nodes[i]->src, GGML_MAX_SRC, sources[i].begin());
    }
}

void edgekv_graph::restore_sources() {
    for (size_t i = 0; i < sources.size(); ++i)
        std::copy_n(sources[i].begin(), GGML_MAX_SRC, gf->nodes[i]->src);
}

void edgekv_graph::restore() {
    restore_sources();
    for (size_t i = 0; i < resid.size(); ++i) {
        resid[i]->op = resid_op[i];
        resid[i]->flags &= ~(GGML_TENSOR_FLAG_INPUT | GGML_TENSOR_FLAG_OUTPUT);
    }
}
