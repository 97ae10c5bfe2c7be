// Memory for layers in full
#include "edgekv-scratch.h"
#include "edgekv-archive.h"
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

static int64_t nobodys(const edgekv_layer & l) {
    return ggml_backend_buft_is_host(l.buft) ? 0 : EDGEKV_FLASH_ROWS - 1;
}

// Rows of a head that are enough for a window, if the prompt is longer; else 0. A slide never
// overwrites what it reads. The pieces of a probe all go on from the prompt's end, which stays.
int64_t edgekv_scratches::sliding_rows(const edgekv_layer & l) const {
    if (!l.n_swa || l.max_bias != 0.0f || !prompt.pieces.empty()) return 0;
    if (l.chunked && !prompt.by_kernel(l)) return 0; // chunks of several lengths
    const auto & layers = prompt.store->layers;
    const bool takes_turns = prompt.alone(l.il) &&
        std::any_of(layers.begin(), layers.end(),
            [&](const auto & m) { return m->selects() && alike(l, *m) && prompt.alone(m->il); });
    if (takes_turns) return 0; // with layers that need all rows
    const int64_t n = nobodys(l) + 2 * l.n_window() + prompt.n_ubatch;
    return n < nobodys(l) + l.len_max() + prompt.n_rows ? n : 0;
}

void edgekv_scratch::slide(int64_t row, int n_head_kv) {
    const int64_t end = at(row - n_step) + n_step;
    std::vector<int32_t> from, to;
    for (int k = 0; k < n_head_kv; ++k) {
        from.push_back((int32_t) (k * cap + end - window));
        to.push_back((int32_t) (k * cap + front));
    }
    t.copy_heads(t, from, to, std::vector<int32_t>(n_head_kv, (int32_t) window));
}

void edgekv_scratches::make_room(const edgekv_layer & l, int64_t row) {
    if (l.n_head_kv == 0) return;
    auto & s = *all[index(l)];
    if (s.slides_before(row)) s.slide(row, l.n_head_kv);
}

void edgekv_scratches::make() {
    const int n_layer = (int) prompt.store->layers.size();
    all.clear();
    of_layer.assign(n_layer, -1);
    for (int il = 0; il < n_layer; ++il) {
        const auto & l = prompt.layer(il);
        if (l.n_head_kv == 0) continue; // nothing is stored
        const int slice = prompt.slice_of(il);
        for (int j = 0; j < prompt.begin(slice) && of_layer[il] < 0; ++j) {
            const auto & m = prompt.layer(j);
            const bool same = alike(l, m) && sliding_rows(l) == sliding_rows(m);
            if (same && !taken(of_layer[j], slice)) of_layer[il] = of_layer[j];
        }
        if (of_layer[il] < 0) {
            of_layer[il] = count();
            all.push_back(std::make_unique<edgekv_scratch>());
        }
        auto & s = *all[of_layer[il]];
        s.n_old = std::max(s.n_old, l.len_max() + nobodys(l));
    }
    for (int il = 0; il < n_layer; ++il) {
        const auto & l = prompt.layer(il);
        if (l.n_head_kv == 0) continue;
        auto & s = *all[index(l)];
        if (s.t.k) continue;
        int64_t n_rows = s.n_old + prompt.n_rows;
        if (const int64_t n = sliding_rows(l)) {
            s.window = l.n_window();
            s.front = nobodys(l);
            s.n_step = prompt.n_ubatch;
            n_rows = n;
        }
        s.cap = (n_rows + l.row_step - 1) / l.row_step * l.row_step;
        s.shape = prompt.by_layer ? edgekv_in_full(l) : (const edgekv_shape &) l;
        s.t = edgekv_tensors::make(l.buft, s.shape, s.cap * l.n_head_kv, "scratch");
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

// the rows in the store
static void copy_kept(const edgekv_layer & l, const std::vector<int32_t> & to, edgekv_tensors & t) {
    std::vector<int32_t> n_rounded(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k) n_rounded[k] = l.n_rounded(k);
    t.copy_heads(l.t, l.first, to, n_rounded);
    for (int k = 0; k < l.n_head_kv && l.n_recent; ++k)
        t.copy_rows(l.recent, (int64_t) k * l.cap_recent, to[k] + n_rounded[k], l.n_recent);
}

void edgekv_scratches::lay_out_old(const edgekv_layer & l) {
    if (l.n_head_kv == 0) return;
    auto & s = *all[index(l)];
    std::vector<int32_t> to(l.n_head_kv);
    for (int k = 0; k < l.n_head_kv; ++k) to[k] = (int32_t) s.origin(l, k, 0);
    if (prompt.in_archive(l)) {
        for (int k = 0; k < l.n_head_kv; ++k)
            prompt.store->archive->get(l, k, 0, l.len[k], s.t, to[k]);
    } else copy_kept(l, to, s.t);
    for (int k = 0; k < l.n_head_kv && !s.pos.empty(); ++k) {
        float * p = s.pos.data() + to[k];
        for (llama_pos x : l.pos[k]) *p++ = (float) x;
        for (int64_t j = 0; j < prompt.n_rows; ++j) *p++ = (float) (prompt.pos0 + j);
    }
}

void edgekv_scratches::archive(const edgekv_layer & l) const {
    const auto & s = of(l);
    for (int k = 0; k < l.n_head_kv; ++k)
        prompt.store->archive->put(
            l, k, prompt.pos0, prompt.n_tokens, s.t, s.origin(l, k, 0) + l.len[k], true);
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
    if (s.window) throw edgekv_error { EDGEKV_INVALID, "this layer has its last rows only" };
    return { &s.t, s.origin(l, head, 0), (int32_t) (l.len[head] + prompt.n_tokens), nullptr };
}

size_t edgekv_scratches::n_bytes() const {
    size_t n = 0;
    for (const auto & s : all) n += s->n_bytes();
    return n;
}
