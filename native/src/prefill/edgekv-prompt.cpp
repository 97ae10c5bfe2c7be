// Where the layers of a prompt lie
#include "edgekv-prompt.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>

void edgekv_prompt::cut() {
    const int n_layer = (int) store->layers.size();
    int n_alone = by_layer ? n_layer : 0;
    for (const auto & l : store->layers)
        if (l->reads != l->il) n_alone = std::min(n_alone, l->reads);
    ends.clear();
    for (int il = 0; il < n_alone; ++il) ends.push_back(il + 1);
    if (n_alone < n_layer) ends.push_back(n_layer);
}

void edgekv_prompt::use_archive() {
    archived.clear();
    if (!store->archive || pos0 == 0) return;
    archived.resize(store->layers.size());
    for (const auto & l : store->layers) {
        if (!l->selects()) continue;
        auto whole = l->alike();
        whole->first.assign(l->n_head_kv, 0);
        whole->len.assign(l->n_head_kv, pos0);
        whole->n_recent = pos0; // none of them has been rounded
        archived[l->il] = std::move(whole);
    }
}

ggml_backend_dev_t edgekv_prompt::device() const {
    for (const auto & l : store->layers) {
        if (!ggml_backend_buft_is_host(l->buft)) return ggml_backend_buft_get_device(l->buft);
    }
    return nullptr;
}

bool edgekv_prompt::on_one_device() const {
    return store->only_device(ctx->get_model().hparams.n_layer());
}
