// evict, while a prompt is read: from the layer in work to what stays of it
#include "edgekv-error.h"
#include "edgekv-keeper.h"

#include <algorithm>

void edgekv_keeper::begin() {
    fresh.resize(prompt.store->layers.size());
    ranked.resize(prompt.store->layers.size());
}

size_t edgekv_keeper::n_bytes() const {
    size_t n = 0;
    for (const auto & f : fresh)
        if (f) n += f->t.n_bytes();
    return n;
}

void edgekv_keeper::clear() { fresh.clear(); }

void edgekv_keeper::keep(const int32_t * counts, const int32_t * rows) {
    const auto & l = scratches.in_work();
    if (l.n_head_kv == 0) { // it has no rows
        fresh[l.il] = l.alike();
        return;
    }
    const auto & s = scratches.of(l);
    auto & whole = ranked[l.il];
    if (!l.selects() && has(l.il)) return;
    if (l.selects() && !counts) throw edgekv_error { EDGEKV_INVALID, "there are no counts" };
    bool all = true;
    std::vector<std::vector<int32_t>> lists(l.n_head_kv);
    std::vector<int64_t> base(l.n_head_kv);
    whole.assign(l.n_head_kv, {});
    for (int k = 0; k < l.n_head_kv; ++k) {
        const int32_t n = (int32_t) (l.len[k] + prompt.n_tokens);
        base[k] = s.origin(l, k, (prompt.n_tokens - 1) / s.n_step * s.n_step);
        if (l.n_swa) {
            for (int32_t r = std::max(0, n - l.n_window()); r < n; ++r) lists[k].push_back(r);
            continue;
        }
        if (counts[k] < 0 || counts[k] > n)
            throw edgekv_error { EDGEKV_INVALID,
                "a head cannot keep " + std::to_string(counts[k]) + " of " + std::to_string(n) +
                    " rows" };
        if (counts[k] && !rows) throw edgekv_error { EDGEKV_INVALID, "there are no rows" };
        lists[k].assign(rows, rows + counts[k]);
        rows += counts[k];
        std::vector<bool> seen(n, false);
        for (int32_t r : lists[k]) {
            if (r < 0 || r >= n || seen[r])
                throw edgekv_error { EDGEKV_INVALID,
                    "row " + std::to_string(r) + " does not exist or is named twice" };
            seen[r] = true;
        }
        if (counts[k] == n) { // nothing evicted: in token order, so that the tail can be taken back
            whole[k] = lists[k];
            std::sort(lists[k].begin(), lists[k].end());
        } else {
            all = false;
        }
    }
    auto f = l.alike();
    for (int k = 0; k < l.n_head_kv; ++k)
        for (int32_t r : lists[k]) {
            const bool is_listed = r < l.len[k] && !prompt.in_archive(l);
            f->pos[k].push_back(is_listed ? l.pos[k][r] : prompt.pos0 + r - l.len[k]);
        }
    if (s.shape == l) gather(base, std::move(lists), *f);
    else round(base, lists, *f);
    folded.clear();
    fresh[l.il] = std::move(f);
    evicted = evicted || !all;
}

void edgekv_keeper::gather(
    std::vector<int64_t> base, std::vector<std::vector<int32_t>> keep, edgekv_layer & to) const {
    const auto & s = scratches.of(to);
    for (int k = 0; k < to.n_head_kv && s.window; ++k) { // rows in front of these are gone
        const int32_t first_row = keep[k].front();
        base[k] += first_row;
        for (int32_t & r : keep[k]) r -= first_row;
    }
    edgekv_gather(s.t, base, keep, to);
}

edgekv_layer & edgekv_keeper::finished(int il, int head) const {
    const bool kept = !prompt.ended && il >= 0 && il < (int) fresh.size() && fresh[il];
    if (!kept || head < 0 || head >= fresh[il]->n_head_kv) {
        throw edgekv_error { EDGEKV_INVALID,
            "this layer has not been kept yet, or it has no such head" };
    }
    return *fresh[il];
}

void edgekv_keeper::shrink(int il, const int32_t * counts) {
    auto & f = finished(il, 0);
    if (!f.selects()) return;
    std::vector<std::vector<int32_t>> lists(f.n_head_kv);
    std::vector<std::vector<llama_pos>> pos(f.n_head_kv);
    for (int k = 0; k < f.n_head_kv; ++k) {
        if (counts[k] < 0 || counts[k] > f.len[k])
            throw edgekv_error { EDGEKV_INVALID, "a finished layer can only shrink" };
    }
    if (std::equal(f.len.begin(), f.len.end(), counts)) return;
    evicted = true;
    for (int k = 0; k < f.n_head_kv; ++k) {
        auto & best = ranked[il][k];
        const bool whole = !best.empty() && counts[k] < f.len[k];
        for (int32_t i = 0; i < counts[k]; ++i) {
            lists[k].push_back(whole ? best[i] : i);
            pos[k].push_back(f.pos[k][lists[k].back()]);
        }
        if (whole) best.clear(); // from now on the head lies in that order
    }
    const std::vector<int64_t> base(f.first.begin(), f.first.end());
    const auto from = std::move(f.t);
    edgekv_gather(from, base, lists, f);
    f.pos = std::move(pos);
}

void edgekv_keeper::hand_over() {
    for (const auto & f : fresh) {
        if (!f) throw edgekv_error { EDGEKV_INVALID, "not all layers were kept" };
    }
    auto & store = *prompt.store;
    const auto n_past = (llama_pos) (prompt.pos0 + prompt.n_tokens);
    for (const auto & f : fresh) f->place_pos(n_past);
    store.layers = std::move(fresh);
    store.n_past = n_past;
    if (evicted) store.boundary = n_past;
}
