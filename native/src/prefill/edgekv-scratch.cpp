// Memory for layers in full
#include "edgekv-scratch.h"
#include "edgekv-error.h"

#include <algorithm>

static bool alike(const edgekv_layer & l, const edgekv_layer & m) {
    const edgekv_shape & shape = l;
    return m.n_head_kv == l.n_head_kv && m.n_head == l.n_head && shape == m && m.buft == l.buft;
}

// whether a layer of this slice has the scratch already
bool edgekv_scratches::taken(int scratch, int slice) const {
    const auto first = of_layer.begin() + prompt.begin(slice),
               last = of_layer.begin() + prompt.ends[slice];
    return std::find(first, last, scratch) != last;
}

void edgekv_scratches::make() {
    const auto & layers = prompt.store->layers;
    all.clear();
    of_layer.assign(layers.size(), -1);
    for (size_t il = 0; il < layers.size(); ++il) {
        const auto & l = *layers[il];
        if (l.n_head_kv == 0) continue; // nothing is stored
        const int slice = prompt.slice_of((int) il);
        for (int j = 0; j < prompt.begin(slice) && of_layer[il] < 0; ++j) {
            if (alike(l, *layers[j]) && !taken(of_layer[j], slice)) of_layer[il] = of_layer[j];
        }
        if (of_layer[il] < 0) {
            of_layer[il] = count();
            all.push_back(std::make_unique<edgekv_scratch>());
        }
        auto & s = *all[of_layer[il]];
        const int n_nobodys = ggml_backend_buft_is_host(l.buft) ? 0 : EDGEKV_FLASH_ROWS - 1;
        s.n_old = std::max<int64_t>(s.n_old, l.len_max() + n_nobodys);
    }
    for (const auto & p : layers) {
        const auto & l = *p;
        if (l.n_head_kv == 0) continue;
        auto & s = *all[index(l)];
        if (s.t.k) continue;
        s.cap = (s.n_old + prompt.n_rows + l.row_step - 1) / l.row_step * l.row_step;
        s.t = edgekv_tensors::make(l.buft, l, s.cap * l.n_head_kv, "scratch");
        if (l.max_bias != 0.0f) s.pos.resize(s.cap * l.n_head_kv);
        if (l.row_step > 1 || !ggml_backend_buft_is_host(l.buft)) {
            // masked rows are multiplied too: they must be numbers
            ggml_backend_buffer_clear(s.t.buf.get(), 0);
        }
    }
}

void edgekv_scratches::clear() {
    all.clear();
    device_work = {};
}

void edgekv_scratches::lay_out_old(const edgekv_layer & l) {
    if (l.n_head_kv == 0) return;
    auto & s = *all[index(l)];
    std::vector<int32_t> to(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k) to[k] = (int32_t) s.first(l, k);
    s.t.copy_heads(l.t, l.first, to, l.len);
    for (int k = 0; k < l.n_head_kv && !s.pos.empty(); ++k) {
        float * p = s.pos.data() + to[k];
        for (llama_pos x : l.pos[k]) *p++ = (float) x;
        for (int64_t j = 0; j < prompt.n_rows; ++j) *p++ = (float) (prompt.pos0 + j);
    }
}

const edgekv_layer & edgekv_scratches::in_work() const {
    const int il = prompt.il_done;
    const bool is_read = !prompt.ended && !prompt.broken && il >= 0;
    if (!is_read || (prompt.layer(il).n_head_kv && !of(prompt.layer(il)).t.k)) {
        throw edgekv_error { EDGEKV_INVALID, "no layer is in work" };
    }
    return prompt.layer(il);
}

edgekv_head_rows edgekv_scratches::rows_read(int head) const {
    const auto & l = in_work();
    if (head < 0 || head >= l.n_head_kv) throw edgekv_error { EDGEKV_INVALID, "no such head" };
    const auto & s = of(l);
    return { &s.t, s.first(l, head), (int32_t) (l.len[head] + prompt.n_tokens), nullptr };
}

size_t edgekv_scratches::n_bytes() const {
    size_t n = 0;
    for (const auto & s : all) n += s->n_bytes();
    return n;
}
