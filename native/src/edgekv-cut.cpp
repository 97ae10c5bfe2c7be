// Cutting llama.cpp's graph of a chunk into layers
#include "edgekv-prefill.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>

// the layers' outputs, by layer; false if one comes twice: a stack that is run more than once
static bool find_outputs(const ggml_cgraph & gf, const char * prefix, std::unordered_map<int, int> & nodes) {
    const size_t n = strlen(prefix);
    for (int i = 0; i < gf.n_nodes; ++i) {
        const char * name = gf.nodes[i]->name;
        if (strncmp(name, prefix, n) == 0 && !nodes.emplace(atoi(name + n), i).second) return false;
    }
    return true;
}

// false if this graph cannot be cut at the outputs of its layers
bool edgekv_prefill::find_cuts(edgekv_graph & g) const {
    const int n_layer = n_slice();
    std::unordered_map<int, int> outputs;
    // nearly all call it l_out; Nemotron-H gives that name to a part of some layers
    for (const char * prefix : { "nemotron_h_block_out-", "l_out-", "ffn_residual-" }) {
        if (outputs.empty() && !find_outputs(*g.gf, prefix, outputs)) return false;
    }
    g.cut.assign(1, 0);
    for (int il = 0; il < n_layer - 1; ++il) {
        const auto it = outputs.find(il);
        if (it == outputs.end()) return false;
        ggml_tensor * t = g.gf->nodes[it->second];
        const bool placeable = !t->view_src && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && ggml_nelements(t) % g.n_tokens == 0;
        const int64_t width = ggml_nelements(t)/g.n_tokens;
        const bool same_width = il == 0 || width == ggml_nelements(g.resid[0])/g.n_tokens;
        if (!placeable || !same_width || it->second + 1 <= g.cut.back()) return false;
        g.resid.push_back(t);
        g.resid_op.push_back(t->op);
        g.cut.push_back(it->second + 1);
    }
    g.cut.push_back(g.gf->n_nodes); // the last slice takes the head
    std::vector<ggml_tensor *> nodes, replay;
    for (int s = 0; s < n_layer; ++s) if (!slice_nodes(g, s, nodes, replay)) return false;
    return true;
}

// Nodes of one slice. What it needs from before the cut, other than the hidden states, is computed again (scaled positions and the
// like); false if that leads back to another layer's output.
bool edgekv_prefill::slice_nodes(const edgekv_graph & g, int slice, std::vector<ggml_tensor *> & nodes, std::vector<ggml_tensor *> & replay) const {
    nodes.clear();
    replay.clear();
    const int i0 = g.cut[slice], i1 = g.cut[slice + 1];
    std::unordered_set<const ggml_tensor *> have(g.gf->nodes + i0, g.gf->nodes + i1);
    have.insert(g.gf->leafs, g.gf->leafs + g.gf->n_leafs);
    if (slice > 0) have.insert(g.resid[slice - 1]);

    const std::unordered_set<const ggml_tensor *> other(g.resid.begin(), g.resid.end());
    // depth first; the chains are a few nodes long
    auto need = [&](auto && self, ggml_tensor * t) -> bool {
        if (!t || have.count(t)) return true;
        if (other.count(t)) return false;
        if (t->op == GGML_OP_NONE && !t->view_src) return true; // a weight or a row tensor
        for (ggml_tensor * s : t->src) if (!self(self, s)) return false;
        if (!self(self, t->view_src)) return false;
        have.insert(t);
        replay.push_back(t);
        return true;
    };
    for (int i = i0; i < i1; ++i) {
        for (ggml_tensor * s : g.gf->nodes[i]->src) if (!need(need, s)) return false;
        if (!need(need, g.gf->nodes[i]->view_src)) return false;
    }
    nodes = replay;
    nodes.insert(nodes.end(), g.gf->nodes + i0, g.gf->nodes + i1);
    return true;
}

// Inputs live in a buffer of their own, filled once for all layers: the allocator neither moves them nor overlaps them. A chunk has its
// own values; but `bind` fills the numbers of its rows, and llama.cpp's rotations are the same for all. Inputs that no node reads still
// need an address, because llama.cpp may write them; they share one.
void edgekv_prefill::place_inputs() {
    enum { ITS_OWN, ROWS, ROTATION, UNREAD };
    const auto size = [](const ggml_tensor * t) { return (size_t) GGML_PAD(ggml_nbytes(t), 128); };
    std::unordered_map<const ggml_tensor *, int> kinds;
    std::map<std::pair<std::string, int64_t>, char *> rotations; // by name and width: windows may have heads of another size
    const auto rotation_of = [](const ggml_tensor * t) { return std::make_pair(std::string(t->name), t->ne[0]); };
    size_t total = 0, unread = 128;
    for (auto & g : graphs) {
        std::unordered_set<const ggml_tensor *> read;
        for (int i = 0; i < g->gf->n_nodes; ++i) for (const ggml_tensor * s : g->gf->nodes[i]->src) {
            for (; s; s = s->view_src) read.insert(s);
        }
        for (auto * t : g->inputs) {
            if (!read.count(t) && strcmp(t->name, "inp_embd") == 0) t->flags &= ~GGML_TENSOR_FLAG_INPUT; // never written: the batch has tokens
        }
        g->inputs.erase(std::remove_if(g->inputs.begin(), g->inputs.end(), [](ggml_tensor * t) { return !(t->flags & GGML_TENSOR_FLAG_INPUT); }), g->inputs.end());
        for (auto * t : g->inputs) {
            const auto is_it = [&](const auto & x) { return x.second == t; };
            const bool is_row = std::any_of(g->rows.begin(), g->rows.end(), is_it) || std::any_of(g->heads.begin(), g->heads.end(), is_it);
            const bool is_rot = strcmp(t->name, "attn_inp_k_rot") == 0 || strcmp(t->name, "attn_inp_v_rot") == 0;
            kinds[t] = !read.count(t) ? UNREAD : is_row ? ROWS : is_rot ? ROTATION : ITS_OWN;
            if (kinds[t] == ROWS)   total += size(t);
            if (kinds[t] == ROTATION && rotations.emplace(rotation_of(t), nullptr).second) total += size(t);
            if (kinds[t] == UNREAD) unread = std::max(unread, size(t));
        }
    }
    for (const auto & c : chunks) for (auto * t : c.graph->inputs) if (kinds[t] == ITS_OWN) total += size(t);

    inputs.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), total + unread));
    if (!inputs) throw std::bad_alloc();
    char * base = (char *) ggml_backend_buffer_get_base(inputs.get()), * at = base + unread;
    const auto take = [&](const ggml_tensor * t) { char * here = at; at += size(t); return here; };
    for (auto & g : graphs) for (auto * t : g->inputs) {
        t->buffer = inputs.get();
        t->data   = kinds[t] == ROWS ? take(t) : base;
        if (kinds[t] != ROTATION) continue;
        char *& here = rotations[rotation_of(t)];
        if (!here) here = take(t);
        t->data = here;
    }
    for (auto & c : chunks) {
        for (auto * t : c.graph->inputs) {
            if (kinds[t] == ITS_OWN) t->data = take(t);
            c.inputs.push_back(t->data);
        }
        c.graph->res->set_inputs(&c.mctx->get_ubatch());
        for (auto * t : c.graph->inputs) {
            const auto turns = [&](const auto & path) { return path.rotation == t; };
            if (!wants_queries || !key_rotation.empty() || std::none_of(query_paths.begin(), query_paths.end(), turns)) continue;
            key_rotation.assign((const float *) t->data, (const float *) t->data + ggml_nelements(t));
        }
    }
}
