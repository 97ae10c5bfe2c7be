// The memory class that owns a store, and which models may have one
#include "edgekv-cache.h"
#include "edgekv.h"
#include "edgekv-basis.h"
#include "edgekv-hooks.h"
#include "edgekv-switches.h"
#include "edgekv-kernels.h"
#include "edgekv-products.h"

#include "llama-arch.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <typeinfo>

static thread_local bool g_want_store = false;

void edgekv_want_store(bool on) { g_want_store = on; }

void edgekv_access::resize_cells(llama_kv_cache & kv, uint32_t n) {
    for (auto & c : kv.v_cells) c.resize(n);
}

void edgekv_access::fill_cells(llama_kv_cache & kv, uint32_t n) {
    auto & cells = kv.v_cells[0];
    if (n > cells.size()) throw std::runtime_error("the state holds more tokens than this context");
    cells.reset();
    for (uint32_t i = 0; i < n; ++i) {
        cells.pos_set(i, (llama_pos) i);
        cells.seq_add(i, 0);
    }
    kv.v_heads[0] = n < cells.size() ? n : 0;
}

llama_kv_cache * edgekv_access::cache(const llama_kv_cache_context * mctx) { return mctx->kv; }

bool edgekv_access::has_layer(const llama_kv_cache & kv, int32_t il) {
    return kv.map_layer_ids.count(il) > 0;
}

int edgekv_access::key_turn(const llama_kv_cache & kv) {
    const ggml_context_ptr ctx { ggml_init({ ggml_tensor_overhead(), nullptr, true }) };
    if (!ctx) throw std::bad_alloc();
    const ggml_tensor * t = kv.build_input_k_rot(ctx.get());
    return t ? (int) t->ne[0] : 0;
}

bool edgekv_access::finite(const llama_kv_cache & kv) {
    for (const auto & l : kv.layers)
        for (const ggml_tensor * t : { l.k, l.v }) {
            for (int64_t s = 0; t && s < t->ne[2]; ++s)
                if (!edgekv_rows_finite(t, s * t->ne[1], t->ne[1])) return false;
        }
    return true;
}

bool edgekv_finite(llama_memory_i * mem) {
    if (auto * both = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
        return edgekv_access::finite(*both->get_base()) && edgekv_access::finite(*both->get_swa());
    }
    auto * kv = dynamic_cast<llama_kv_cache *>(mem);
    return !kv || edgekv_access::finite(*kv);
}

edgekv_store * edgekv_store_of(const llama_kv_cache_context * mctx) {
    auto * kv = edgekv_access::cache(mctx);
    return kv ? kv->edgekv : nullptr;
}

edgekv_memory & edgekv_memory_of(llama_context & ctx) {
    return *dynamic_cast<edgekv_memory *>(ctx.get_memory());
}

bool edgekv_plans_slices(llama_memory_i * mem) { return edgekv_store_of(mem); }

edgekv_store * edgekv_store_of(llama_memory_i * mem) {
    auto * m = dynamic_cast<edgekv_memory *>(mem);
    return m ? m->store.get() : nullptr;
}

// ---- the memory's verbs: cells first, rows with them

static std::vector<llama_kv_cache *> caches(llama_kv_cache & kv) { return { &kv }; }
static std::vector<llama_kv_cache *> caches(llama_kv_cache_iswa & kv) {
    return { kv.get_base(), kv.get_swa() };
}
static std::vector<llama_kv_cache *> caches(llama_memory_hybrid & m) {
    return { m.get_mem_attn() };
}
static std::vector<llama_kv_cache *> caches(llama_memory_hybrid_iswa & m) {
    return caches(*m.get_mem_attn());
}

template <typename T>
llama_memory_context_ptr edgekv_cache<T>::init_batch(
    llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) {
    // llama.cpp would abort the process; a prompt that is read layer by layer takes its own logits
    if (!store->active && balloc.get_n_outputs() > n_outputs_max) {
        LLAMA_LOG_ERROR(
            "edgekv: this context gives the logits of %u tokens of a batch, not of %u\n",
            n_outputs_max, balloc.get_n_outputs());
        return std::make_unique<llama_kv_cache_context>(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    // who asks for a step of several conversations has made room in each
    if (!store->several.empty()) return T::init_batch(balloc, n_ubatch, embd_all);
    // the cells would have room: they hold pieces of a probe too
    if (!store->active && store->n_past + balloc.get_n_tokens() > n_ctx) {
        return std::make_unique<llama_kv_cache_context>(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    // a prompt that is read layer by layer brings its own room. Whoever calls catches what is
    // thrown: edgekv_decode, or a prompt's begin
    if (!store->active) store->reserve_tail((int32_t) balloc.get_n_tokens());
    return T::init_batch(balloc, n_ubatch, embd_all);
}

template <typename T>
void edgekv_cache<T>::clear(bool data) {
    auto * recr = edgekv_recurrent_of(this);
    T::clear(data && !recr); // recurrent states of others are in that memory
    if (data && recr)
        for (const auto * layers : { &recr->r_l, &recr->s_l, &recr->p_l })
            for (ggml_tensor * t : *layers)
                if (t) ggml_backend_tensor_memset(t, 0, 0, t->nb[1]);
    store->clear();
    forget_mark();
}

template <typename T>
void edgekv_cache<T>::forget_cells(llama_pos n_past) {
    for (auto * kv : caches(*this)) kv->seq_rm(0, n_past, -1);
    auto * recr = edgekv_recurrent_of(this);
    if (recr && recr->cells[0].has_seq_id(0)) recr->cells[0].pos = n_past - 1;
}

template <typename T>
void edgekv_cache<T>::forget_others() {
    for (auto * kv : caches(*this)) // theirs: ours would take rows back
        for (uint32_t s = 1; s < n_several; ++s)
            kv->llama_kv_cache::seq_rm((llama_seq_id) s, -1, -1);
    auto * recr = edgekv_recurrent_of(this);
    if (!recr) return;
    for (uint32_t s = 1; s < n_several; ++s) edgekv_recurrent_set(*recr, s, 0);
    recr->head = 0;
}

uint64_t edgekv_memory::next_id() {
    static std::atomic<uint64_t> n { 0 };
    return ++n;
}

template <typename T>
void edgekv_cache<T>::set_cells(llama_pos n_past) {
    for (auto * kv : caches(*this)) edgekv_access::fill_cells(*kv, (uint32_t) n_past);
}

template <typename T>
bool edgekv_cache<T>::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    // a hole in the middle: positions of kept rows are fixed
    if (p1 >= 0 && p1 < store->n_past) return false;
    auto * recr = edgekv_recurrent_of(this);
    if (!recr) {
        if (!store->trim(p0)) return false;
        return T::seq_rm(seq_id, p0, -1);
    }
    if (p0 <= 0) {
        clear(false);
        return true;
    }
    const bool back = p0 < store->n_past;
    // the state of recurrent layers knows of no token by itself
    if (back && ((p0 != n_mark && p0 != n_kept) || !store->trim(p0))) return false;
    if (back) (p0 == n_kept ? kept : mark).restore();
    if (p0 < n_kept) n_kept = -1; // other tokens may come there
    for (auto * kv : caches(*this)) kv->seq_rm(0, p0, -1);
    return true;
}

void edgekv_mark(llama_memory_i * mem) {
    auto * recr = edgekv_recurrent_of(mem);
    auto * m = dynamic_cast<edgekv_memory *>(mem);
    if (!recr || !m) return;
    m->forget_mark();
    m->mark.save(recr);
    m->n_mark = m->store->n_past;
}

void edgekv_keep(llama_memory_i * mem) {
    auto * recr = edgekv_recurrent_of(mem);
    auto * m = dynamic_cast<edgekv_memory *>(mem);
    if (!recr || !m) return;
    m->n_kept = -1;
    m->kept.save(*recr, 0, m->store->n_past);
    m->n_kept = m->store->n_past;
}

template <typename T>
std::map<ggml_backend_buffer_type_t, size_t> edgekv_cache<T>::memory_breakdown() const {
    std::map<ggml_backend_buffer_type_t, size_t> r;
    for (const auto & l : store->layers) r[l->buft] += l->t.n_bytes() + l->recent.n_bytes();
    const auto * recr = edgekv_recurrent_of(const_cast<edgekv_cache<T> *>(this));
    if (recr)
        for (const auto & [buft, n] : recr->memory_breakdown()) r[buft] += n;
    return r;
}

template <typename T>
void edgekv_cache<T>::state_write(
    llama_io_write_i & io, llama_seq_id, llama_state_seq_flags) const {
    if (auto * recr = edgekv_recurrent_of(const_cast<edgekv_cache<T> *>(this))) {
        edgekv_recurrent_state now;
        now.save(recr);
        now.write(io);
    }
    store->write(io);
}

template <typename T>
void edgekv_cache<T>::state_read(llama_io_read_i & io, llama_seq_id, llama_state_seq_flags) {
    auto * recr = edgekv_recurrent_of(this);
    edgekv_recurrent_state next;
    if (recr) next.read(recr, io);
    store->read(io, (llama_pos) this->n_ctx, recr ? next.n_past() : -1);
    next.restore();
    forget_mark();
    set_cells(store->n_past);
}

template struct edgekv_cache<llama_kv_cache>;
template struct edgekv_cache<llama_kv_cache_iswa>;
template struct edgekv_cache<llama_memory_hybrid>;
template struct edgekv_cache<llama_memory_hybrid_iswa>;

void edgekv_append(llama_memory_i * mem, const llama_ubatch & ubatch) {
    auto * store = edgekv_store_of(mem);
    if (!store) return;
    if (store->several.empty()) return store->append(ubatch.pos, (int32_t) ubatch.n_tokens);
    for (uint32_t t = 0; t < ubatch.n_tokens; ++t)
        store->several[ubatch.seq_id[t][0]]->append(ubatch.pos + t, 1);
}

void edgekv_take_back(llama_memory_i * mem, llama_pos n_past) {
    edgekv_store_of(mem)->take_back(n_past);
    const auto * recr = edgekv_recurrent_of(mem);
    if (recr && edgekv_recurrent_past(*recr) != n_past) mem->clear(false);
    else mem->seq_rm(0, n_past, -1); // of the cells: the store has no such tokens any more
}

// ---- which models

// the layer whose K and V a layer reads, as llama_model::create_memory has it
static int32_t read_by(const llama_hparams & hp, int32_t il) {
    const int32_t n = hp.n_layer_kv_from_start;
    return n < 0 || il < n ? il : n - (hp.is_swa(il) ? 2 : 1);
}

// whether no layer reads another's K and V, or all have heads like the ones they read
static bool shares_plainly(const llama_model & model) {
    const auto & hp = model.hparams;
    for (int32_t il = 0; il < (int32_t) hp.n_layer(); ++il) {
        const int32_t from = read_by(hp, il);
        if (from == il) continue;
        const bool alike = from >= 0 && hp.is_swa(from) == hp.is_swa(il) &&
            hp.n_head(from) == hp.n_head(il) && hp.n_embd_head_k(from) == hp.n_embd_head_k(il) &&
            hp.n_embd_head_v(from) == hp.n_embd_head_v(il);
        const bool tried = model.arch == LLM_ARCH_GEMMA4 || model.arch == LLM_ARCH_GEMMA3N;
        if (!tried || !alike) return false;
    }
    return true;
}

// latent attention that was tried: V is the beginning of K, and each head makes its own values of
// it
static bool is_tried_latent(llm_arch arch) {
    return arch == LLM_ARCH_DEEPSEEK2 || arch == LLM_ARCH_MISTRAL4 ||
        arch == LLM_ARCH_KIMI_LINEAR || arch == LLM_ARCH_KIMI_K3 || arch == LLM_ARCH_BAILINGMOE3;
}

const char * edgekv_unsupported(const llama_model & model) {
    const auto & hp = model.hparams;
    switch (model.arch) {
        case LLM_ARCH_LLAMA_EMBED:
        case LLM_ARCH_T5ENCODER: return "it gives embeddings and writes no text";
        case LLM_ARCH_T5: return "attention has biases of its own for each distance (T5)";
        case LLM_ARCH_QWEN4EXP:
        case LLM_ARCH_GLM5_NEXT:
            return "an indexer with a cache of its own picks the tokens, beside recurrent layers";
        case LLM_ARCH_DEEPSEEK32:
        case LLM_ARCH_GLM_DSA:
        case LLM_ARCH_DOTS3NOTE:
        case LLM_ARCH_MINIMAX_M3: return "an indexer with a cache of its own picks the tokens";
        case LLM_ARCH_HY_V4:
            if (hp.indexer_top_k) return "an indexer with a cache of its own picks the tokens";
            break;
        case LLM_ARCH_DEEPSEEK4: return "its cache holds summaries of several tokens already";
        default: break;
    }
    if (llm_arch_is_recurrent(model.arch)) return "recurrent layers hold no KV cache";
    if (hp.is_mla() && !is_tried_latent(model.arch))
        return "its latent attention (MLA) is of a kind that edgekv has not been tried with";
    if (!hp.causal_attn) return "attention is not causal";
    if (hp.use_alibi && hp.swa_type != LLAMA_SWA_TYPE_NONE)
        return "ALiBi and sliding windows are mixed";
    if (!shares_plainly(model))
        return "layers share K and V in a way that edgekv has not been tried with";
    const bool chunked = hp.swa_type == LLAMA_SWA_TYPE_CHUNKED && model.arch == LLM_ARCH_LLAMA4;
    if (hp.swa_type != LLAMA_SWA_TYPE_NONE && hp.swa_type != LLAMA_SWA_TYPE_STANDARD && !chunked)
        return "its sliding window has no fixed width";
    return nullptr;
}

int32_t edgekv_n_head_kv(const llama_model & model, int32_t il) {
    const auto & hp = model.hparams;
    if (il < 0 || il >= (int32_t) hp.n_layer()) return 0;
    const bool both = model.arch == LLM_ARCH_FALCON_H1; // each layer attends and recurs
    // or is a feed-forward part
    const bool parts = model.arch == LLM_ARCH_NEMOTRON_H || model.arch == LLM_ARCH_NEMOTRON_H_MOE;
    if (parts && hp.n_ff(il) > 0) return 0;
    return (hp.is_recr(il) && !both) || read_by(hp, il) != il ? 0 : (int32_t) hp.n_head_kv(il);
}

int32_t edgekv_hidden_width(const llama_model & model) {
    const auto & hp = model.hparams;
    return (int32_t) (model.arch == LLM_ARCH_GEMMA3N ? hp.n_altup * hp.n_embd : hp.n_embd);
}

int64_t edgekv_product_bytes(const llama_model & model, int64_t n_chunk, bool again) {
    if (!edgekv_switches::products()) return 0;
    size_t n_words = 0;
    std::map<int, size_t> unpacked; // words of each layer
    for (const auto & [name, t] : llama_internal_get_tensor_map(&model)) {
        int il;
        const bool of_layer = sscanf(name.c_str(), "blk.%d.", &il) == 1 && t->ne[1] > 1;
        if (!of_layer) continue;
        const int64_t n_used = t->ne[2] > 1 ? model.hparams.n_expert_used(il) : 1;
        const size_t n = edgekv_cpu().product_room(t, n_chunk * n_used);
        n_words = std::max(n_words, n);
        if (n > 0 && again) unpacked[il] += edgekv_cpu().product_unpacked(t, n_chunk);
    }
    size_t n_most = 0;
    for (const auto & [il, n] : unpacked) n_most = std::max(n_most, n);
    return (int64_t) (n_words * sizeof(uint32_t)) +
        (int64_t) std::min(n_most * sizeof(uint32_t), edgekv_products::MOST_UNPACKED);
}

// whether a tensor of recurrent layers is none that a token is multiplied by, whatever its shape
static bool is_elementwise(const std::string & name) {
    const auto has = [&](const char * part) { return name.find(part) != std::string::npos; };
    const auto last = name.substr(name.rfind('.') + 1); // of those that are no "weight"
    return has(".ssm_conv1d") || has(".shortconv.conv.") || has(".ssm_norm.") || last == "ssm_a" ||
        last == "ssm_d";
}

// whether a graph reads states where those of several conversations lie: PLaMo 2's looks for the
// second one's beyond its place
static bool takes_several(const llama_model & model) { return model.arch != LLM_ARCH_PLAMO2; }

bool edgekv_rows_alike(const llama_model & model) {
    if (!edgekv_switches::products() || !takes_several(model)) return false;
    const auto & tensors = llama_internal_get_tensor_map(&model);
    const bool has_output = std::any_of(
        tensors.begin(), tensors.end(), [](const auto & x) { return x.first == "output.weight"; });
    // those that a token takes a row of
    const auto is_table = [&](const std::string & name) {
        return name == "token_embd.weight" ? has_output
                                           : name == "position_embd.weight" ||
                name == "token_types.weight" || name == "per_layer_token_embd.weight";
    };
    return std::all_of(tensors.begin(), tensors.end(), [&](const auto & x) {
        const auto & [name, t] = x;
        // what is taken for one token is taken by the kernel for a few
        return t->ne[1] <= 1 || is_table(name) || is_elementwise(name) ||
            edgekv_cpu().product_room(t, 1) > 0;
    });
}

// Bytes at which a head's rows may begin (a power of two). Vulkan binds them at their offset, which
// must be what the device asks for; CUDA reads q8_0 rows as whole numbers of 4 bytes before it
// attends to them
static size_t unit_of(ggml_backend_buffer_type_t buft) {
    const std::string name = ggml_backend_buft_name(buft);
    return name.rfind("Vulkan", 0) == 0 ? ggml_backend_buft_get_alignment(buft)
        : name.rfind("CUDA", 0) == 0    ? 4
                                        : 1;
}

static int row_step(const edgekv_layer & l) {
    const size_t unit = unit_of(l.buft);
    int n = 1;
    while (n * l.row_bytes_k() % unit || n * l.row_bytes_v() % unit) n *= 2;
    return n;
}

// Where quantised keys have more bits than values, a window has 8 for both. Its rows are few,
// whatever the length, and no budget takes one (docs/results/quality.md).
static void set_window_types(edgekv_layer & l) {
    constexpr int64_t n = 256;
    constexpr auto eight = GGML_TYPE_Q8_0;
    const bool fits = (l.d_k | l.d_v) % ggml_blck_size(eight) == 0;
    if (fits && ggml_is_quantized(l.type_k) && ggml_is_quantized(l.type_v) &&
        ggml_row_size(l.type_k, n) > ggml_row_size(l.type_v, n))
        l.type_k = l.type_v = eight;
}

// whether rows are halves until they have to be rounded: our kernels on the CPU read both kinds.
// Other types than those that are rounded have to be halves too
static bool rounds_late(const edgekv_layer & l, const edgekv_store & store) {
    const auto fits = [](ggml_type type) {
        return ggml_is_quantized(type) || type == GGML_TYPE_F16;
    };
    const bool rounds = ggml_is_quantized(l.type_k) || ggml_is_quantized(l.type_v);
    return rounds && fits(l.type_k) && fits(l.type_v) && !l.v_in_k && l.max_bias == 0.0f &&
        ggml_backend_buft_is_host(l.buft) && !store.graph_attend && !store.node_attend &&
        !edgekv_switches::rounded();
}

// attends: [n_layer] whether a layer keeps K and V; the others are layers without heads
static std::unique_ptr<edgekv_store> make_store(const llama_model & model,
    const llama_memory_params & p, const llama_cparams & c, const std::vector<bool> & attends) {
    const auto & hp = model.hparams;
    auto store = std::make_unique<edgekv_store>();
    const uint32_t first =
        (uint32_t) (std::find(attends.begin(), attends.end(), true) - attends.begin());
    for (uint32_t il = 0; il < hp.n_layer(); ++il) {
        const uint32_t like = attends[il] ? il : first; // head sizes must be those of some rows
        auto l = std::make_unique<edgekv_layer>();
        l->il = il;
        l->reads = read_by(hp, il);
        l->n_head = attends[il] ? hp.n_head(il) : 0;
        l->n_head_kv = attends[il] ? hp.n_head_kv(il) : 0;
        l->d_k = hp.n_embd_head_k(like);
        l->d_v = hp.is_mla() ? (int) hp.n_lora_kv : (int) hp.n_embd_head_v(like);
        l->type_k = p.type_k;
        l->type_v = p.type_v;
        l->v_in_k = hp.is_mla();
        l->n_swa = attends[il] && hp.is_swa(il) ? hp.n_swa : 0;
        if (l->n_swa) set_window_types(*l);
        l->chunked = l->n_swa && hp.swa_type == LLAMA_SWA_TYPE_CHUNKED;
        l->max_bias = hp.use_alibi ? hp.f_max_alibi_bias : 0.0f;
        l->buft = c.offload_kqv ? ggml_backend_dev_buffer_type(model.dev_layer(il))
                                : ggml_backend_cpu_buffer_type();
        l->row_step = row_step(*l);
        l->rounds_late = rounds_late(*l, *store);
        l->len.assign(l->n_head_kv, 0);
        l->pos.resize(l->n_head_kv);
        l->layout(std::vector<int32_t>(l->n_head_kv, 0));
        store->layers.push_back(std::move(l));
    }
    store->place_pos();
    return store;
}

// whether each layer keeps K and V, whether each has a recurrent state
struct layer_kinds {
    std::vector<bool> attends, recurs;
};

static layer_kinds kinds_of(const llama_hparams & hp, llama_memory_i & probe) {
    std::vector<llama_kv_cache *> kv;
    if (auto * m = dynamic_cast<llama_memory_hybrid *>(&probe)) kv = caches(*m);
    else if (auto * m = dynamic_cast<llama_memory_hybrid_iswa *>(&probe)) kv = caches(*m);
    const auto * recr = edgekv_recurrent_of(&probe);
    layer_kinds kinds;
    for (int32_t il = 0; il < (int32_t) hp.n_layer(); ++il) {
        const bool has = !recr || std::any_of(kv.begin(), kv.end(), [&](auto * c) {
            return edgekv_access::has_layer(*c, il);
        });
        kinds.attends.push_back(has && hp.n_head_kv(il) > 0 && read_by(hp, il) == il);
        kinds.recurs.push_back(recr && recr->r_l[il]);
    }
    return kinds;
}

static llama_memory_i * create_memory(
    const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams) {
    g_want_store = false; // the probe below must get upstream's own
    std::unique_ptr<llama_memory_i> probe;
    {
        llama_cparams small = cparams;
        small.n_ctx_seq = 256;
        probe.reset(model.create_memory(params, small));
    }
    g_want_store = true;
    // a whitelist of classes: anything newer or odder keeps upstream's cache
    if (!probe) return nullptr;
    const auto & is = typeid(*probe);
    if (is != typeid(llama_kv_cache) && is != typeid(llama_kv_cache_iswa) &&
        is != typeid(llama_memory_hybrid) && is != typeid(llama_memory_hybrid_iswa)) {
        return nullptr;
    }
    const auto & hp = model.hparams;
    const layer_kinds kinds = kinds_of(hp, *probe);
    if (std::find(kinds.attends.begin(), kinds.attends.end(), true) == kinds.attends.end())
        return nullptr;
    probe.reset();
    if (!cparams.flash_attn)
        throw std::runtime_error("a compressed cache needs flash attention (-fa on or auto)");
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR)
        throw std::runtime_error(
            "a compressed cache cannot be cut over the GPUs by heads: use split_mode=LLAMA_SPLIT_MODE_LAYER");
    if (cparams.n_seq_max != 1 && !cparams.kv_unified)
        throw std::runtime_error(
            "several sequences of a compressed cache share its context: give --kv-unified");

    if (cparams.n_seq_max != 1 && !takes_several(model))
        throw std::runtime_error(
            "conversations of this model are written one by one: leave --cont-batching out");

    // one layer with one row: enough for the cache to know its types, head sizes and rotation
    int32_t first_base = -1, first_swa = -1;
    for (uint32_t il = 0; il < hp.n_layer(); ++il) {
        if (!kinds.attends[il]) continue;
        auto & f = hp.is_swa(il) ? first_swa : first_base;
        if (f < 0) f = il;
    }
    const auto filter = [=](int32_t il) { return il == first_base || il == first_swa; };
    const auto recurs = [&](int32_t il) { return (bool) kinds.recurs[il]; };
    const auto with_store = [&](auto kv) -> llama_memory_i * {
        kv->store = make_store(model, params, cparams, kinds.attends);
        for (auto * c : caches(*kv)) {
            edgekv_access::resize_cells(*c, cparams.n_ctx_seq + EDGEKV_PROBE_MAX);
            c->edgekv = kv->store.get();
        }
        const auto both = caches(*kv); // of layers that attend to everything, and of windows
        const int turn = edgekv_access::key_turn(*both.front()),
                  turn_swa = edgekv_access::key_turn(*both.back());
        for (auto & l : kv->store->layers)
            l->basis = edgekv_basis::make(model, cparams, *l, l->n_swa ? turn_swa : turn);
        if (model.pos_embd) kv->n_positions = model.pos_embd->ne[1];
        kv->n_ctx = (uint32_t) std::min<int64_t>(cparams.n_ctx_seq, kv->n_positions);
        kv->n_outputs_max = cparams.n_outputs_max;
        kv->n_several = cparams.n_seq_max;
        kv->seats = std::make_shared<std::vector<edgekv_parked *>>(kv->n_several);
        return kv.release();
    };
    const auto state = GGML_TYPE_F32;     // as llama.cpp's
    const uint32_t n = cparams.n_seq_max; // recurrent states
    if (is == typeid(llama_kv_cache)) {
        return with_store(std::make_unique<edgekv_cache<llama_kv_cache>>(model, hp, params.type_k,
            params.type_v, false, false, true, 1u, 1u, 1u, hp.n_swa, hp.swa_type, nullptr, filter,
            nullptr, nullptr));
    }
    if (is == typeid(llama_kv_cache_iswa)) {
        return with_store(
            std::make_unique<edgekv_cache<llama_kv_cache_iswa>>(model, params.type_k, params.type_v,
                false, false, true, true, 1u, 1u, 1u, 1u, nullptr, filter, nullptr, nullptr));
    }
    if (is == typeid(llama_memory_hybrid)) {
        return with_store(std::make_unique<edgekv_cache<llama_memory_hybrid>>(model, params.type_k,
            params.type_v, false, 1u, 1u, hp.n_swa, hp.swa_type, state, state, n, n, 0u,
            cparams.offload_kqv, true, filter, recurs));
    }
    return with_store(std::make_unique<edgekv_cache<llama_memory_hybrid_iswa>>(model, params.type_k,
        params.type_v, false, true, 1u, 1u, 1u, state, state, n, n, 0u, cparams.offload_kqv, true,
        filter, recurs));
}

llama_memory_i * edgekv_create_memory(
    const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams) {
    if (!g_want_store || edgekv_unsupported(model)) return nullptr;
    try {
        return create_memory(model, params, cparams);
    } catch (const std::exception & e) {
        edgekv_note_error(e.what(), EDGEKV_UNSUPPORTED);
        throw;
    }
}

uint32_t edgekv_extra_nodes(llama_memory_i * mem) {
    const auto * store = mem ? edgekv_store_of(mem) : nullptr;
    uint32_t n = 0;
    if (store)
        for (const auto & l : store->layers) {
            const uint32_t n_seq = dynamic_cast<edgekv_memory *>(mem)->n_several;
            if (n_seq > 1) n += 16 * n_seq; // views of each token, its rows, its attention
            // of flash attention; ALiBi makes a mask for each head besides
            const int n_calls = l->max_bias != 0.0f ? 3 * l->n_head : l->n_head_kv;
            n +=
                10 + (store->graph_attend || !ggml_backend_buft_is_host(l->buft) ? 8 * n_calls : 0);
        }
    return n;
}
