// Reading a prompt layer by layer: what is asked for, and the loops turned round
#include "edgekv-prefill.h"
#include "edgekv-cache.h"
#include "edgekv-compute.h"
#include "edgekv-context.h"
#include "edgekv-device.h"
#include "edgekv-error.h"
#include "edgekv-switches.h"
#include "cpu/edgekv-cpu.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

static edgekv_error no_memory(const char * for_what) {
    return { EDGEKV_NO_MEMORY,
        std::string("not enough memory for ") + for_what +
            ": try a shorter prompt, a smaller --ubatch-size or --kv-hidden disk" };
}

// ---- begin: check, take memory, build graphs

static void check_params(const edgekv_prefill_params & p) {
    if (p.n_tokens < 1 || p.n_pieces < 0 || !p.tokens) {
        throw edgekv_error { EDGEKV_INVALID, "there are no tokens to read" };
    }
    const bool no_pieces = p.n_pieces && !p.pieces;
    const bool no_observers = p.n_observers < 0 || (p.n_observers && !p.observers);
    const bool no_mode = p.hidden < EDGEKV_HIDDEN_F32 || p.hidden >= EDGEKV_HIDDEN_MODES;
    if (no_pieces || no_observers || no_mode) {
        throw edgekv_error { EDGEKV_INVALID, "a parameter of the prompt is null or out of range" };
    }
}

static bool has_quantised_layers(const llama_model & model) {
    const auto & all = llama_internal_get_tensor_map(&model);
    return std::any_of(all.begin(), all.end(), [](const auto & named) {
        return named.first.rfind("blk.", 0) == 0 && ggml_is_quantized(named.second->type);
    });
}

void edgekv_prefill::read_params(llama_context * ctx, const edgekv_prefill_params & params) {
    auto & p = prompt;
    p.ctx = ctx;
    p.store = edgekv_store_of(ctx->get_memory());
    if (!p.store) {
        throw edgekv_error { EDGEKV_UNSUPPORTED, "this context keeps llama.cpp's own cache" };
    }
    if (p.store->active) {
        throw edgekv_error { EDGEKV_INVALID, "a prompt is being read already" };
    }
    check_params(params);
    const auto & memory = edgekv_memory_of(*ctx);
    const auto n_ctx = (int64_t) memory.n_ctx;
    p.n_tokens = params.n_tokens;
    p.n_ubatch = ctx->get_cparams().n_ubatch;
    p.logits = params.logits;
    p.n_hidden = memory.n_hidden;
    if (params.most_work > 0) p.most_work = (size_t) params.most_work;
    // logits of a large vocabulary take a MiB each; so many tokens are enough for our products
    if (p.logits) p.n_ubatch = std::min<int64_t>(p.n_ubatch, EDGEKV_PRODUCT_MIN);
    p.rounded = !edgekv_switches::f32_attend() && has_quantised_layers(ctx->get_model());
    p.pos0 = p.store->n_past;
    if (p.pos0 + p.n_tokens > n_ctx) {
        throw edgekv_error { EDGEKV_INVALID,
            "the prompt has " + std::to_string(p.n_tokens) + " tokens, the context has room for " +
                std::to_string(n_ctx - p.pos0) + ": use a larger --ctx-size or a shorter prompt" };
    }
    p.n_all = p.n_rows = p.n_tokens;
    for (int i = 0; i < params.n_pieces; ++i) {
        const int32_t n = params.pieces[i];
        if (n < 1 || n > EDGEKV_PROBE_MAX) {
            throw edgekv_error { EDGEKV_INVALID, "a piece of the probe is empty or too long" };
        }
        p.pieces.push_back(n);
        p.n_all += n;
        p.n_rows = std::max(p.n_rows, p.n_tokens + n);
    }
    if (p.pos0 + p.n_rows > memory.n_positions) {
        throw edgekv_error { EDGEKV_INVALID,
            "this method reads the prompt twice, and the model has learned " +
                std::to_string(memory.n_positions) +
                " positions: use a shorter prompt or another --kv-method" };
    }
    const int32_t n_vocab = ctx->get_model().vocab.n_tokens();
    for (int64_t i = 0; i < p.n_all; ++i) {
        if (params.tokens[i] < 0 || params.tokens[i] >= n_vocab) {
            throw edgekv_error { EDGEKV_INVALID,
                "token " + std::to_string(params.tokens[i]) + " is not in the vocabulary" };
        }
    }
    for (int i = 0; i < params.n_observers; ++i) observers.add(params.observers[i]);
    p.tokens.assign(params.tokens, params.tokens + p.n_all);
    progress = params.progress;
    progress_data = params.data;
}

void edgekv_prefill::make_memory(const edgekv_prefill_params & params) {
    if (prompt.store->graph_attend || !prompt.on_cpu()) masks.make();
    prompt.by_layer = !edgekv_switches::whole() && params.hidden != EDGEKV_HIDDEN_NONE;
    const auto make = [&] {
        prompt.cut();
        scratches.make();
        observers.make();
        chunks.build();
    };
    try {
        make();
    } catch (const edgekv_chunks::not_by_layer &) { // start again, all layers at once
        prompt.by_layer = false;
        forget();
        observers.clear();
        make();
    }
    chunks.place_inputs();
    slices.reserve(params.hidden, params.dir ? params.dir : "");
}

// What is large goes back to the system as soon as it is freed. glibc keeps more with everything
// that was freed, up to 64 MiB; what a prompt needs for a moment would stay until its end. The
// environment may say otherwise.
static void return_what_is_large() {
#ifdef __GLIBC__
    static const bool done = getenv("MALLOC_MMAP_THRESHOLD_") || getenv("GLIBC_TUNABLES") ||
        (mallopt(M_MMAP_THRESHOLD, 1 << 20) && mallopt(M_TRIM_THRESHOLD, 2 << 20));
    (void) done;
#endif
}

std::unique_ptr<edgekv_prefill> edgekv_prefill::begin(
    llama_context * ctx, const edgekv_prefill_params & params) {
    auto p = std::unique_ptr<edgekv_prefill>(new edgekv_prefill());
    p->begin_us = ggml_time_us();
    return_what_is_large();
    p->read_params(ctx, params);
    auto & store = *p->prompt.store;
    p->begin_archive();
    store.place_pos(); // missing where memory was when rows moved last
    if (!edgekv_context::make_ready(*ctx)) throw no_memory("the logits");
    p->before.save(edgekv_recurrent_of(ctx->get_memory()));
    store.active = p.get(); // from here on the destructor cleans up
    try {
        p->make_memory(params);
    } catch (const std::bad_alloc &) { throw no_memory("this prompt"); }
    p->keeper.begin();
    p->note_peak();
    return p;
}

// A conversation that lost its archive, to a full disk say, gets none before it is cleared
void edgekv_prefill::begin_archive() {
    auto & store = *prompt.store;
    const auto & memory = edgekv_memory_of(*prompt.ctx);
    if (memory.archives && !store.archive && store.boundary == 0) {
        try {
            store.archive = memory.new_archive();
        } catch (const std::exception & e) { store.lose_archive(e.what()); }
    }
    store.catch_up();
    prompt.use_archive();
}

// The rows of a layer that was read. Where the file cannot take them the prompt is read to its end
void edgekv_prefill::archive(const edgekv_layer & l) {
    if (!prompt.store->archive || !loses_archive.empty()) return;
    try {
        scratches.archive(l);
    } catch (const std::exception & e) { loses_archive = e.what(); }
}

edgekv_prefill::~edgekv_prefill() {
    auto * store = prompt.store;
    if (store && store->paused == this) store->paused = nullptr;
    if (!store || store->active != this) return;
    scratches.clear();
    observers.clear();
    slices.clear();
    chunks.clear();
    ggml_backend_sched_reset(prompt.ctx->get_sched());
    if (!prompt.ended) forget();
    if (!prompt.ended && prompt.pos0 == 0) store->archive.reset(); // as if nothing had begun
    if (!loses_archive.empty()) store->lose_archive(loses_archive.c_str());
    store->active = nullptr;
    ++store->version;
    edgekv_device::report();
    edgekv_trim_heap(); // the process would look as big as at its peak
}

// cells and recurrent states of tokens that were not read in the end
void edgekv_prefill::forget() {
    edgekv_memory_of(*prompt.ctx).forget_cells(prompt.pos0);
    before.restore();
}

void edgekv_prefill::lose_context() noexcept {
    prompt.ctx = nullptr;
    prompt.store = nullptr;
    slices.clear();
    chunks.clear();
    scratches.clear();
    keeper.clear();
    masks.clear();
    observers.clear();
    before.clear();
    half.clear();
}

// ---- run: one layer over all chunks

void edgekv_prefill::run(int il) {
    auto & p = prompt;
    const int n_layer = (int) p.store->layers.size();
    const bool in_order = il == p.il_done + 1 && il < n_layer && (il == 0 || keeper.has(il - 1));
    if (p.ended || p.broken || !in_order) {
        throw edgekv_error { EDGEKV_INVALID,
            "layers are read in order, and each is kept before the next" };
    }
    observers.begin_layer(il);
    p.broken = true; // until it is read to its end

    const int slice = p.slice_of(il);
    if (il == p.begin(slice)) run_chunks(slice);
    p.il_done = il;
    p.broken = false;
    if (p.layer(il).selects()) archive(p.layer(il));
    note_peak();
    if (p.by_layer && il + 1 == n_layer) { // no layer comes that would need them
        slices.drop_work();
        chunks.drop_inputs();
        observers.drop_work();
    }
    if (!p.layer(il).selects()) keep(nullptr, nullptr);
}

// all chunks through a slice
void edgekv_prefill::run_chunks(int slice) {
    const auto & p = prompt;
    const int begin = p.begin(slice), end = p.ends[slice];
    const int n_slices = (int) chunks.all().size() * p.n_slice();
    try {
        for (int l = begin; l < end; ++l) scratches.lay_out_old(p.layer(l));
    } catch (const std::exception & e) { // it cannot be read
        loses_archive = e.what();
        throw;
    }
    const auto * recurrent = edgekv_recurrent_of(p.ctx->get_memory());
    edgekv_recurrent_rows at_end; // of the prompt: each piece goes on there, and the conversation
    for (const auto & c : chunks.all()) {
        const bool is_piece = c.first >= p.n_tokens;
        // a piece begins; the first one finds it so
        if (recurrent && is_piece && c.row == p.n_tokens) {
            if (at_end.rows.empty()) at_end.save(*recurrent, begin, end);
            else at_end.restore();
        }
        for (int l = begin; l < end; ++l) scratches.make_room(p.layer(l), c.row);
        slices.run(c, slice);
        if (observers.counts_columns(c, begin, end)) slices.rest(); // makes room for what is seen
        for (int l = begin; l < end; ++l) observers.observe(c, l);
        ++n_done;
        const bool goes_on = !progress || progress(n_done, n_slices, progress_data);
        if (!goes_on || p.store->active != this) { // or it was paused, and not resumed
            throw edgekv_error { EDGEKV_CANCELLED, "cancelled" };
        }
    }
    at_end.restore();
    slices.rest();
    for (int l = begin; l < end; ++l) observers.end_layer(l);
}

// ---- pause: the context is for others

void edgekv_prefill::pause() {
    auto & store = *prompt.store;
    if (store.active != this || store.paused || prompt.ended) {
        throw edgekv_error { EDGEKV_INVALID, "this prompt cannot wait now" };
    }
    half.save(edgekv_recurrent_of(prompt.ctx->get_memory()));
    logits = edgekv_context::logits(*prompt.ctx);
    edgekv_context::has_output(*prompt.ctx); // of whoever comes, who may know its logits
    slices.forget_plan();
    ggml_backend_sched_reset(prompt.ctx->get_sched());
    forget();
    layers_before.clear();
    for (const auto & l : store.layers) layers_before.push_back(l.get());
    store.active = nullptr;
    store.paused = this;
    ++store.version;
}

// whether the context has the conversation that was there before: graphs point to its layers
bool edgekv_prefill::is_mine() const {
    const auto & now = prompt.store->layers;
    return prompt.store->n_past == prompt.pos0 &&
        std::equal(now.begin(), now.end(), layers_before.begin(), layers_before.end(),
            [](const auto & a, const edgekv_layer * b) { return a.get() == b; });
}

void edgekv_prefill::resume() {
    auto & store = *prompt.store;
    if (store.paused != this || store.active || !is_mine()) {
        throw edgekv_error { EDGEKV_INVALID,
            "this prompt does not wait, or another conversation is in its place" };
    }
    if (!edgekv_context::make_ready(*prompt.ctx)) throw no_memory("the logits");
    edgekv_memory_of(*prompt.ctx).set_cells((llama_pos) (prompt.pos0 + prompt.n_tokens));
    half.restore();
    half.clear();
    edgekv_context::put_logits(*prompt.ctx, logits);
    store.paused = nullptr;
    store.active = this;
    ++store.version;
}

constexpr int64_t MANY_TO_JUDGE = 512;

void edgekv_prefill::keep(const int32_t * counts, const int32_t * rows) {
    keeper.keep(counts, rows);
    note_peak();
    const auto & l = prompt.layer(prompt.il_done);
    if (!prompt.alone(l.il) && l.n_head_kv) scratches.drop(l);
    // what it was judged with, before the next one comes; of a few tokens it is little, and
    // the next layer takes the old rows' room
    if (prompt.n_tokens > MANY_TO_JUDGE) edgekv_trim_heap();
}

// ---- end

// a head of a layer
using edgekv_head_of = std::pair<const edgekv_layer *, int>;

struct edgekv_grouping {
    edgekv_archive & archive;
    std::vector<edgekv_head_of> heads;
    std::atomic<bool> failed { false };
};

static void group_heads(ggml_tensor *, int ith, int nth, void * data) {
    auto & job = *(edgekv_grouping *) data;
    for (size_t i = ith; i < job.heads.size(); i += nth)
        if (!job.archive.group(*job.heads[i].first, job.heads[i].second)) job.failed = true;
}

void edgekv_group(llama_context & ctx, edgekv_store & store) {
    auto & archive = *store.archive;
    edgekv_grouping job { archive, {}, {} };
    for (const auto & l : store.layers) {
        if (!archive.recalls(*l)) continue;
        archive.set_resident(*l, archive.n_known);
        for (int k = 0; k < l->n_head_kv; ++k) job.heads.emplace_back(l.get(), k);
    }
    if (job.heads.empty()) return;
    edgekv_compute(edgekv_context::cpu(ctx), [&](ggml_context * c0) {
        return ggml_custom_4d(c0, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, group_heads,
            std::min((int) job.heads.size(), 64), &job);
    });
    if (job.failed) throw edgekv_error { EDGEKV_FAILED, "the archive cannot be written" };
}

void edgekv_prefill::end_archive() {
    auto & store = *prompt.store;
    if (!store.archive) return;
    store.archive->n_tokens = store.archive->n_known = store.n_past;
    store.archive->went_back = false;
    try {
        edgekv_group(*prompt.ctx, store);
    } catch (const std::exception & e) { loses_archive = e.what(); }
}

void edgekv_prefill::end() {
    if (prompt.ended) throw edgekv_error { EDGEKV_INVALID, "the prompt has ended already" };
    keeper.hand_over();
    const auto n_past = prompt.store->n_past;
    auto & memory = edgekv_memory_of(*prompt.ctx);
    if (!prompt.pieces.empty()) memory.forget_cells(n_past);
    memory.forget_mark();
    edgekv_context::has_read(*prompt.ctx, prompt.n_tokens, begin_us);
    end_archive();
    prompt.ended = true;
}

void edgekv_prefill::note_peak() const {
    prompt.store->note_peak(before.n_bytes() + chunks.n_bytes() + slices.n_bytes() +
        masks.n_bytes() + scratches.n_bytes() + observers.n_bytes() + keeper.n_bytes() +
        prompt.last_hidden.capacity() * sizeof(float));
}
