// Cutting llama.cpp's graph of a chunk into layers
#include "edgekv-prefill.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>

// the output of layer il is called l_out-il in most of llama.cpp's models; false if this graph cannot be cut there
bool edgekv_prefill::find_cuts(edgekv_chunk & c) const {
    const int n_layer = n_slice();
    std::unordered_map<std::string, int> by_name;
    for (int i = 0; i < c.gf->n_nodes; ++i) {
        const ggml_tensor * t = c.gf->nodes[i];
        if (strncmp(t->name, "l_out-", 6) != 0) continue;
        if (!by_name.emplace(t->name, i).second) return false; // a stack that is run more than once
    }
    c.cut.assign(1, 0);
    for (int il = 0; il < n_layer - 1; ++il) {
        const auto it = by_name.find("l_out-" + std::to_string(il));
        if (it == by_name.end()) return false;
        ggml_tensor * t = c.gf->nodes[it->second];
        const bool placeable = !t->view_src && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && ggml_nelements(t) % c.n_tokens == 0;
        const int64_t width = ggml_nelements(t)/c.n_tokens;
        const bool same_width = il == 0 || width == ggml_nelements(c.resid[0])/c.n_tokens;
        if (!placeable || !same_width || it->second + 1 <= c.cut.back()) return false;
        c.resid.push_back(t);
        c.cut.push_back(it->second + 1);
    }
    c.cut.push_back(c.gf->n_nodes); // the last slice takes the head
    std::vector<ggml_tensor *> nodes, replay;
    for (int s = 0; s < n_layer; ++s) if (!slice_nodes(c, s, nodes, replay)) return false;
    return true;
}

// Nodes of one slice. What it needs from before the cut, other than the hidden states, is computed again (scaled positions and the
// like); false if that leads back to another layer's output.
bool edgekv_prefill::slice_nodes(const edgekv_chunk & c, int slice, std::vector<ggml_tensor *> & nodes, std::vector<ggml_tensor *> & replay) const {
    nodes.clear();
    replay.clear();
    const int i0 = c.cut[slice], i1 = c.cut[slice + 1];
    std::unordered_set<const ggml_tensor *> have(c.gf->nodes + i0, c.gf->nodes + i1);
    have.insert(c.gf->leafs, c.gf->leafs + c.gf->n_leafs);
    if (slice > 0) have.insert(c.resid[slice - 1]);

    const std::unordered_set<const ggml_tensor *> other(c.resid.begin(), c.resid.end());
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
        for (ggml_tensor * s : c.gf->nodes[i]->src) if (!need(need, s)) return false;
        if (!need(need, c.gf->nodes[i]->view_src)) return false;
    }
    nodes = replay;
    nodes.insert(nodes.end(), c.gf->nodes + i0, c.gf->nodes + i1);
    return true;
}

// Inputs live in a buffer of their own, filled once for all layers: the allocator neither moves them nor overlaps them. Those that no
// node reads still need an address, because llama.cpp may write them; they share one.
void edgekv_prefill::place_inputs() {
    size_t total = 0, unused = 128;
    for (auto & c : chunks) {
        std::unordered_set<const ggml_tensor *> read;
        for (int i = 0; i < c.gf->n_nodes; ++i) for (const ggml_tensor * s : c.gf->nodes[i]->src) {
            for (; s; s = s->view_src) read.insert(s);
        }
        for (auto * t : c.inputs) {
            const size_t n = GGML_PAD(ggml_nbytes(t), 128);
            if (read.count(t))                 total += n;
            else if (strcmp(t->name, "inp_embd") == 0) t->flags &= ~GGML_TENSOR_FLAG_INPUT; // never written: the batch has tokens
            else { unused = std::max(unused, n); c.unread.insert(t); }
        }
        c.inputs.erase(std::remove_if(c.inputs.begin(), c.inputs.end(), [](ggml_tensor * t) { return !(t->flags & GGML_TENSOR_FLAG_INPUT); }), c.inputs.end());
    }
    inputs.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), total + unused));
    if (!inputs) throw std::bad_alloc();
    char * base = (char *) ggml_backend_buffer_get_base(inputs.get()), * at = base + unused;
    for (auto & c : chunks) {
        for (auto * t : c.inputs) {
            const bool apart = !c.unread.count(t);
            t->buffer = inputs.get();
            t->data   = apart ? at : base;
            if (apart) at += GGML_PAD(ggml_nbytes(t), 128);
        }
        c.res->set_inputs(&c.mctx->get_ubatch());
        for (auto & [s, t] : c.rows) {
            if (!t->data) continue; // no layer of this chunk stores rows there
            auto * x = (int64_t *) t->data;
            const int64_t n_head_kv = s->t.k->ne[1]/s->cap;
            for (int64_t i = 0; i < c.n_tokens; ++i) for (int64_t k = 0; k < n_head_kv; ++k) *x++ = k*s->cap + s->n_old + c.row + i;
        }
    }
}
