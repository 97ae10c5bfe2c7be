// The C API: checks arguments, turns exceptions into codes.
#include "edgekv.h"
#include "edgekv-cache.h"
#include "edgekv-basis.h"
#include "edgekv-error.h"
#include "edgekv-grammar.h"
#include "edgekv-heads.h"
#include "edgekv-parked.h"
#include "edgekv-prefill.h"
#include "edgekv-kernels.h"

#include "llama-context.h"
#include "llama-model.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#ifdef __GLIBC__
#include <malloc.h>
#endif

static thread_local std::string g_error;
static thread_local int g_status = EDGEKV_OK;

void edgekv_note_error(const char * what, edgekv_status status) noexcept {
    g_status = status;
    try {
        g_error = what;
    } catch (const std::bad_alloc &) {
        g_error.clear(); // the status says enough
    }
}

static int fail(edgekv_status status, const char * what) noexcept {
    edgekv_note_error(what, status);
    return status;
}

template <typename F>
static int guard(F && f) {
    try {
        f();
        return EDGEKV_OK;
    } catch (const edgekv_error & e) {
        return fail(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return fail(EDGEKV_NO_MEMORY, "not enough memory");
    } catch (const std::exception & e) { return fail(EDGEKV_FAILED, e.what()); }
}

template <typename T>
static T & given(T * x) {
    if (!x) throw edgekv_error { EDGEKV_INVALID, "an argument is null" };
    return *x;
}

static edgekv_store & store_of(const llama_context * ctx) {
    auto * s = ctx ? edgekv_store_of(ctx->get_memory()) : nullptr;
    if (!s) throw edgekv_error { EDGEKV_UNSUPPORTED, "this context keeps llama.cpp's own cache" };
    return *s;
}

static edgekv_layer & layer_of(const llama_context * ctx, int32_t il) {
    auto & s = store_of(ctx);
    if (il < 0 || il >= (int32_t) s.layers.size())
        throw edgekv_error { EDGEKV_INVALID, "no such layer" };
    return *s.layers[il];
}

static edgekv_layer & layer_of(const llama_context * ctx, int32_t il, int32_t head) {
    auto & l = layer_of(ctx, il);
    if (head < 0 || head >= l.n_head_kv) throw edgekv_error { EDGEKV_INVALID, "no such head" };
    return l;
}

// devices write rows while the program goes on
static void settled(const llama_context * ctx) { const_cast<llama_context *>(ctx)->synchronize(); }

int edgekv_abi(void) { return EDGEKV_ABI; }
const char * edgekv_last_error(void) { return g_error.c_str(); }
int edgekv_last_status(void) { return g_status; }

bool edgekv_is_set(void * flag) {
    return ((const std::atomic<bool> *) flag)->load(std::memory_order_relaxed);
}

void edgekv_grammar_begin(bool * stop) {
    auto & clock = edgekv_grammar;
    if (clock.depth++ > 0) return;
    clock.stop = stop;
    clock.until = std::chrono::steady_clock::now() + std::chrono::seconds(clock.seconds);
}

void edgekv_grammar_end(void) { --edgekv_grammar.depth; }

void edgekv_trim_heap(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

void edgekv_next_context(bool on) {
    edgekv_want_store(on);
    g_error.clear();
    g_status = EDGEKV_OK;
}
const char * edgekv_why_unsupported(const llama_model * model) {
    return model ? edgekv_unsupported(*model) : "there is no model";
}

const char * edgekv_why_no_heads(const llama_model * model) {
    return model ? edgekv_no_heads(*model) : "there is no model";
}

int32_t edgekv_model_n_head_kv(const llama_model * model, int32_t il) {
    return model ? edgekv_n_head_kv(*model, il) : 0;
}

int64_t edgekv_model_product_bytes(const llama_model * model, int64_t n_chunk, bool again) {
    return model ? edgekv_product_bytes(*model, n_chunk, again) : 0;
}

bool edgekv_model_rows_alike(const llama_model * model) {
    return model && edgekv_rows_alike(*model);
}

int32_t edgekv_model_hidden_width(const llama_model * model) {
    return model ? edgekv_hidden_width(*model) : 0;
}

int edgekv_context_bytes_get(const llama_context * ctx, edgekv_context_bytes * out) {
    return guard([&] {
        edgekv_context_bytes sum = {};
        for (const auto & [buft, bytes] : given(ctx).memory_breakdown()) {
            sum.cache += (int64_t) bytes.context;
            sum.compute += (int64_t) bytes.compute;
        }
        given(out) = sum;
    });
}

int64_t edgekv_device_free(const llama_context * ctx) {
    const auto * s = ctx ? edgekv_store_of(ctx->get_memory()) : nullptr;
    const auto device = s ? s->only_device(ctx->get_model().hparams.n_layer()) : nullptr;
    size_t free = 0, total = 0;
    if (device) ggml_backend_dev_memory(device, &free, &total);
    return (int64_t) free;
}

int edgekv_check_finite(const llama_context * ctx) {
    return guard([&] {
        settled(&given(ctx));
        if (!edgekv_finite(ctx->get_memory()))
            throw edgekv_error { EDGEKV_INVALID, "the state holds values that are no numbers" };
    });
}

bool edgekv_has_store(const llama_context * ctx) {
    return ctx && edgekv_store_of(ctx->get_memory());
}

int32_t edgekv_n_layer(const llama_context * ctx) {
    auto * s = ctx ? edgekv_store_of(ctx->get_memory()) : nullptr;
    return s ? (int32_t) s->layers.size() : 0;
}

int edgekv_layer_get(const llama_context * ctx, int32_t il, edgekv_layer_info * out) {
    return guard([&] {
        const auto & l = layer_of(ctx, il);
        given(out) = { l.n_head, l.n_head_kv, l.d_k, l.d_v, l.type_k, l.type_v, l.n_swa,
            (int32_t) (l.row_bytes_k() + l.row_bytes_v() +
                (l.max_bias != 0.0f ? sizeof(float) : 0)),
            l.reads, l.v_in_k, (bool) l.basis, l.rounds_late };
    });
}

int edgekv_len(const llama_context * ctx, int32_t il, int32_t * out) {
    return guard([&] {
        const auto & l = layer_of(ctx, il);
        if (l.n_head_kv) std::copy(l.len.begin(), l.len.end(), &given(out));
    });
}

int edgekv_pos(const llama_context * ctx, int32_t il, int32_t head, int32_t * out) {
    return guard([&] {
        const auto & l = layer_of(ctx, il, head);
        if (l.len[head]) std::copy(l.pos[head].begin(), l.pos[head].end(), &given(out));
    });
}

int edgekv_rows_bytes(const llama_context * ctx, int32_t il, int32_t head, void * k, void * v) {
    return guard([&] {
        const auto & l = layer_of(ctx, il, head);
        settled(ctx);
        auto read = [&](const ggml_tensor * t, const ggml_tensor * recent, void * out) {
            if (!out) return;
            const int32_t n = l.n_rounded(head);
            edgekv_get_rows(t, l.first[head], n, out);
            if (l.n_recent)
                edgekv_convert_rows(recent, (int64_t) head * l.cap_recent, l.n_recent, t->type,
                    (char *) out + n * t->nb[1]);
        };
        read(l.t.k, l.recent.k, k);
        if (!l.v_in_k) read(l.t.v, l.recent.v, v);
    });
}

int edgekv_rows_f32(const llama_context * ctx, int32_t il, int32_t head, float * k, float * v) {
    return guard([&] {
        const auto & l = layer_of(ctx, il, head);
        settled(ctx);
        auto read = [&](const ggml_tensor * t, int64_t first, int32_t n, int d, float * out) {
            if (!out || n == 0) return;
            std::vector<char> host(n * t->nb[1]);
            edgekv_get_rows(t, first, n, host.data());
            edgekv_cpu().rows_to_f32(t->type, host.data(), t->nb[1], 0, n, d, out);
        };
        const int32_t n = l.n_rounded(head);
        const int64_t first = l.first[head], recent = (int64_t) head * l.cap_recent;
        read(l.t.k, first, n, l.d_k, k);
        read(l.t.v, first, n, l.d_v, v);
        read(l.recent.k, recent, l.n_recent, l.d_k, k ? k + (int64_t) n * l.d_k : nullptr);
        read(l.recent.v, recent, l.n_recent, l.d_v, v ? v + (int64_t) n * l.d_v : nullptr);
        if (k) edgekv_whole_keys(l, head, l.len[head], k);
    });
}

int edgekv_memory_get(const llama_context * ctx, edgekv_memory_info * out) {
    return guard([&] {
        auto & s = store_of(ctx);
        s.note_peak();
        const auto & m = *dynamic_cast<const edgekv_memory *>(ctx->get_memory());
        given(out) = { s.n_past, s.boundary, (int64_t) s.n_bytes(), (int64_t) s.n_bytes_peak,
            (int64_t) edgekv_recurrent_bytes(ctx->get_memory()), (int64_t) m.mark.n_bytes(),
            m.n_mark, s.archive ? s.archive->n_bytes() : 0,
            s.archive ? (int64_t) s.archive->n_bytes_memory() : 0, s.has_archive(), s.can_go_back(),
            s.archive && s.archive->went_back, s.n_alike(),
            s.archive ? s.archive->n_bytes_recalled() : 0 };
    });
}

// whether attention of few tokens is a node of ours
static bool can_recall(const edgekv_store & store, const edgekv_layer & l) {
    if (store.graph_attend || l.v_in_k) return false;
    const auto * device = l.kernels();
    return ggml_backend_buft_is_host(l.buft) ||
        (device && device->attends(l.type_k, l.type_v, l.d_k, l.d_v));
}

int edgekv_archive_on(llama_context * ctx, const char * dir, float recall, int index_bits) {
    return guard([&] {
        if (index_bits < 4 || index_bits > edgekv_index::MOST_BITS)
            throw edgekv_error { EDGEKV_INVALID, "an index has 4 to 128 bits for 64 values" };
        auto & m = edgekv_memory_of((store_of(ctx), *ctx));
        for (const auto & l : m.store->layers) {
            if (l->max_bias != 0.0f)
                throw edgekv_error { EDGEKV_UNSUPPORTED, "a model with ALiBi has no archive" };
            if (recall > 0 && l->selects() && !can_recall(*m.store, *l))
                throw edgekv_error { EDGEKV_UNSUPPORTED,
                    "tokens of this model cannot be recalled: its rows are latent, or lie on a device"
                    " that edgekv has no kernel for" };
        }
        m.archive_dir = dir ? dir : "";
        m.recall = recall;
        m.index_bits = index_bits;
        m.new_archive(); // there can be one
        m.archives = true;
    });
}

int edgekv_keep_state(llama_context * ctx) {
    return guard([&] {
        if (store_of(ctx).active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read" };
        edgekv_keep(ctx->get_memory());
    });
}

int edgekv_mark_tokens(llama_context * ctx) {
    return guard([&] {
        if (store_of(ctx).active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read" };
        settled(ctx);
        edgekv_mark(ctx->get_memory());
    });
}

int edgekv_round_rows(llama_context * ctx) {
    return guard([&] {
        auto & s = store_of(ctx);
        if (s.active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read" };
        settled(ctx);
        s.round_all();
    });
}

int edgekv_evict(llama_context * ctx, int32_t il, const int32_t * counts, const int32_t * rows) {
    return guard([&] {
        auto & s = store_of(ctx);
        auto & l = layer_of(ctx, il);
        if (s.active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read" };
        if (l.n_swa)
            throw edgekv_error { EDGEKV_INVALID,
                "a sliding-window layer keeps its window by itself" };
        if (!l.n_head_kv) throw edgekv_error { EDGEKV_INVALID, "this layer has no attention" };
        given(counts);
        settled(ctx);
        s.round_all();
        std::vector<std::vector<int32_t>> keep(l.n_head_kv);
        std::vector<std::vector<llama_pos>> pos(l.n_head_kv);
        std::vector<int64_t> base(l.first.begin(), l.first.end());
        for (int k = 0; k < l.n_head_kv; ++k) {
            if (counts[k] < 0 || counts[k] > l.len[k])
                throw edgekv_error { EDGEKV_INVALID, "a head cannot keep more rows than it has" };
            std::vector<bool> seen(l.len[k], false);
            for (int32_t i = 0; i < counts[k]; ++i) {
                const int32_t r = given(rows);
                ++rows;
                if (r < 0 || r >= l.len[k] || seen[r])
                    throw edgekv_error { EDGEKV_INVALID, "a row does not exist or is named twice" };
                seen[r] = true;
                keep[k].push_back(r);
                pos[k].push_back(l.pos[k][r]);
            }
        }
        edgekv_gather(l.t, base, keep, l);
        l.pos = std::move(pos);
        s.boundary = s.n_past;
        ++s.version;
        s.place_pos();
    });
}

int edgekv_write_rows(llama_context * ctx, int32_t il, int32_t head, int32_t n,
    const int32_t * rows, const float * k, const float * v) {
    return guard([&] {
        const auto & l = layer_of(ctx, il, head);
        if (store_of(ctx).active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read" };
        if (n < 0) throw edgekv_error { EDGEKV_INVALID, "there are no rows to write" };
        if (n == 0) return;
        for (int32_t i = 0; i < n; ++i) {
            if ((&given(rows))[i] < 0 || rows[i] >= l.len[head])
                throw edgekv_error { EDGEKV_INVALID, "a row to write does not exist" };
        }
        settled(ctx);
        store_of(ctx).round_all();
        const float * values = &given(v);
        std::vector<float> keys(&given(k), &given(k) + (int64_t) n * l.d_k);
        edgekv_store_keys(l, head, n, keys.data());
        for (int64_t i = 0; i < n && l.v_in_k; ++i) {
            const float * value = values + i * l.d_v;
            if (!std::equal(value, value + l.d_v, keys.begin() + i * l.d_k))
                throw edgekv_error { EDGEKV_INVALID, "V of this model is the beginning of K" };
        }
        struct part {
            ggml_tensor * t;
            int d;
            const float * x;
        };
        std::vector<part> parts = { { l.t.k, l.d_k, keys.data() } };
        if (!l.v_in_k) parts.push_back({ l.t.v, l.d_v, values });
        // nothing is written unless all can be: an infinite half, of a value or a block's scale,
        // would reach every later token
        for (const auto & [t, d, x] : parts) {
            for (int64_t i = 0; i < (int64_t) n * d; ++i) {
                if (!(std::fabs(x[i]) <= 65504.0f))
                    throw edgekv_error { EDGEKV_INVALID, "a row to write is not finite" };
            }
        }
        for (const auto & [t, d, x] : parts) {
            std::vector<char> row(t->nb[1]);
            for (int32_t i = 0; i < n; ++i) {
                ggml_quantize_chunk(t->type, x + (int64_t) i * d, row.data(), 0, 1, d, nullptr);
                ggml_backend_tensor_set(
                    t, row.data(), (l.first[head] + rows[i]) * t->nb[1], row.size());
            }
        }
    });
}

int edgekv_make_plain(llama_context * ctx) {
    return guard([&] {
        auto & s = store_of(ctx);
        if (s.active || s.paused || s.n_past > 0)
            throw edgekv_error { EDGEKV_INVALID, "there are keys already" };
        ctx->synchronize();
        for (auto & l : s.layers) {
            l->basis = nullptr;
            l->rounds_late = false;
        }
        ++s.version;
    });
}

int edgekv_trim_capacity(llama_context * ctx) {
    return guard([&] {
        auto & s = store_of(ctx);
        ctx->synchronize();
        s.shrink_to_fit();
    });
}

// ---- several conversations

static llama_memory_i * idle(llama_context * ctx) {
    if (store_of(ctx).active) throw edgekv_error { EDGEKV_INVALID, "a prompt is being read" };
    ctx->synchronize();
    return ctx->get_memory();
}

edgekv_parked * edgekv_parked_new(llama_context * ctx) {
    edgekv_parked * p = nullptr;
    guard([&] {
        idle(ctx);
        p = new edgekv_parked(edgekv_memory_of(*ctx));
    });
    return p;
}

int edgekv_parked_swap(llama_context * ctx, edgekv_parked * p) {
    return guard([&] { given(p).swap(idle(ctx)); });
}

int edgekv_step_several(
    llama_context * ctx, int32_t n, edgekv_parked * const * places, const llama_token * tokens) {
    return guard([&] {
        idle(ctx);
        given(places);
        given(tokens);
        edgekv_several(*ctx, n, places, tokens);
    });
}

// ---- archives apart from their conversation

edgekv_archive * edgekv_archive_take(const llama_context * ctx) {
    edgekv_archive * a = nullptr;
    guard([&] {
        const auto & s = store_of(ctx);
        if (s.archive) a = new edgekv_archive(*s.archive);
    });
    return a;
}

edgekv_archive * edgekv_archive_new(llama_context * ctx, const edgekv_archive_info * info) {
    edgekv_archive * a = nullptr;
    guard([&] {
        const auto & m = edgekv_memory_of((store_of(ctx), *ctx));
        const auto & x = given(info);
        if (!m.archives) throw edgekv_error { EDGEKV_INVALID, "this context has no archives" };
        if (x.n_tokens < 0 || x.n_tokens > m.n_ctx || x.n_known < 0 || x.n_known > x.n_tokens ||
            x.n_judged < 0 || x.n_judged > x.n_tokens)
            throw edgekv_error { EDGEKV_INVALID, "the archive's numbers are out of range" };
        auto fresh = m.new_archive();
        fresh->n_tokens = (llama_pos) x.n_tokens;
        fresh->n_known = (llama_pos) x.n_known;
        a = fresh.release();
    });
    return a;
}

const char * edgekv_archive_lost(const llama_context * ctx) {
    const auto * s = ctx ? edgekv_store_of(ctx->get_memory()) : nullptr;
    return s && !s->archive ? s->lost_archive.c_str() : "";
}

int edgekv_archive_get(const edgekv_archive * a, edgekv_archive_info * out) {
    return guard([&] {
        const auto & x = given(a);
        given(out) = { x.n_tokens, x.n_known, x.n_judged(), x.n_bytes(),
            (int64_t) x.n_bytes_memory() };
    });
}

int64_t edgekv_archive_piece_bytes(const edgekv_archive * a, int32_t i) {
    return a && i >= 0 ? a->piece_bytes((size_t) i) : -1;
}

int edgekv_archive_piece_get(const edgekv_archive * a, int32_t i, void * rows) {
    return guard([&] { given(a).get_piece((size_t) i, (char *) &given((char *) rows)); });
}

int edgekv_archive_piece_put(edgekv_archive * a, int32_t i, const void * rows) {
    return guard([&] { given(a).put_piece((size_t) i, &given((const char *) rows)); });
}

int edgekv_archive_index(llama_context * ctx, edgekv_archive * a, int64_t n_judged) {
    return guard([&] { given(a).index_again(store_of(ctx).layers, n_judged); });
}

int edgekv_archive_put(llama_context * ctx, const edgekv_archive * a, bool alone) {
    return guard([&] {
        auto * mem = idle(ctx);
        auto & m = edgekv_memory_of((store_of(ctx), *ctx));
        auto & s = *m.store;
        auto mine = std::make_unique<edgekv_archive>(given(a));
        if (mine->owner != m.id)
            throw edgekv_error { EDGEKV_INVALID, "the archive is of another context" };
        if (alone) {
            if (edgekv_recurrent_of(mem) || !s.has_all_layers())
                throw edgekv_error { EDGEKV_UNSUPPORTED,
                    "an archive without rows of windows and states is not enough" };
            mem->clear(false);
            m.set_cells(mine->n_tokens);
            s.n_past = s.boundary = mine->n_tokens;
            mine->went_back = true;
            s.archive = std::move(mine);
            return;
        }
        mine->cut(s.n_past);
        if (mine->n_tokens < s.boundary)
            throw edgekv_error { EDGEKV_INVALID, "the archive ends too early" };
        s.archive = std::move(mine);
        s.lost_archive.clear();
        ++s.version;
        if (!s.archive->is_grouped()) edgekv_group(*ctx, s);
    });
}

void edgekv_archive_free(edgekv_archive * a) { delete a; }

int64_t edgekv_parked_archive_bytes(const edgekv_parked * p) {
    return p ? p->n_bytes_archive() : 0;
}
int64_t edgekv_parked_bytes(const edgekv_parked * p) { return p ? (int64_t) p->n_bytes() : 0; }
void edgekv_parked_free(edgekv_parked * p) { delete p; }

// ---- prefill

template <typename P>
static P & begun(P * p) {
    if (!given(p).prompt.store) {
        throw edgekv_error { EDGEKV_INVALID, "the model was closed while it read this prompt" };
    }
    return *p;
}

template <typename P>
static P & reading(P * p) {
    if (begun(p).prompt.store->paused == p) {
        throw edgekv_error { EDGEKV_INVALID, "this prompt waits half read" };
    }
    return *p;
}

edgekv_prefill * edgekv_prefill_begin(llama_context * ctx, const edgekv_prefill_params * params) {
    edgekv_prefill * p = nullptr;
    guard([&] {
        store_of(ctx);
        p = edgekv_prefill::begin(ctx, given(params)).release();
    });
    return p;
}

bool edgekv_prefill_by_layer(const edgekv_prefill * p) { return p && p->prompt.by_layer; }
double edgekv_prefill_score_ms(const edgekv_prefill * p) { return p ? p->observers.ms : 0.0; }
int edgekv_prefill_work(const edgekv_prefill * p, double out[6]) {
    return guard([&] {
        const auto & x = given(p).prompt;
        const double all[] = { x.weights.ms, x.weights.n, x.levels.ms, x.levels.n, x.attention.ms,
            x.attention.n };
        std::copy(std::begin(all), std::end(all), &given(out));
    });
}

int32_t edgekv_prefill_hidden(const edgekv_prefill * p, float * out) {
    if (!p || !p->prompt.ctx || p->prompt.n_hidden == 0) return 0;
    const auto & all = p->prompt.last_hidden;
    const size_t width = p->prompt.ctx->get_model().hparams.n_embd_out();
    const size_t n = std::min<size_t>(all.size() / width, p->prompt.n_hidden);
    if (out) std::copy(all.end() - n * width, all.end(), out);
    return (int32_t) n;
}

double edgekv_product_peak(bool levels) {
    double peak = 0;
    guard([&] { peak = edgekv_cpu().product_peak(levels); });
    return peak;
}

int edgekv_prefill_run(edgekv_prefill * p, int32_t il) {
    return guard([&] { reading(p).run(il); });
}
int edgekv_prefill_end(edgekv_prefill * p) {
    return guard([&] { reading(p).end(); });
}
int edgekv_prefill_pause(edgekv_prefill * p) {
    return guard([&] { reading(p).pause(); });
}
int edgekv_prefill_resume(edgekv_prefill * p) {
    return guard([&] { begun(p).resume(); });
}
void edgekv_prefill_free(edgekv_prefill * p) { delete p; }

int edgekv_prefill_old(const edgekv_prefill * p, int32_t il, int32_t * old) {
    return guard([&] {
        const auto & prompt = reading(p).prompt;
        layer_of(prompt.ctx, il); // there is one
        const auto & l = prompt.layer(il);
        if (l.n_head_kv) std::copy(l.len.begin(), l.len.end(), &given(old));
    });
}

int edgekv_prefill_stat(const edgekv_prefill * p, int32_t observer, edgekv_stat stat, float * out) {
    return guard([&] { reading(p).observers.stat(observer, stat, &given(out)); });
}

int edgekv_prefill_rows(const edgekv_prefill * p, int32_t head, float * k, float * v) {
    return guard([&] { reading(p).keeper.rows(head, k, v); });
}

int edgekv_prefill_some_rows(
    const edgekv_prefill * p, int32_t head, int32_t n, const int32_t * rows, float * k, float * v) {
    return guard([&] { reading(p).keeper.some_rows(head, { n, rows }, k, v); });
}

int edgekv_prefill_predict(const edgekv_prefill * p, int32_t head, const float * weights,
    int32_t n_weights, bool neighbours, int32_t turn_k, int32_t turn_v, float * out,
    float * unlike) {
    return guard([&] {
        const edgekv_map map = { weights, neighbours, turn_k, turn_v };
        reading(p).keeper.predict(head, map, n_weights, &given(out), &given(unlike));
    });
}

int edgekv_prefill_queries(
    const edgekv_prefill * p, int32_t observer, int32_t head, float * mean, float * cov) {
    return guard([&] { reading(p).observers.queries(observer, head, &given(mean), &given(cov)); });
}

int edgekv_prefill_drop_queries(edgekv_prefill * p, int32_t observer) {
    return guard([&] { reading(p).observers.drop_queries(observer); });
}

int edgekv_prefill_rotation(const edgekv_prefill * p, int32_t n_future, float * out) {
    return guard([&] { reading(p).observers.rotation(n_future, &given(out)); });
}

int edgekv_prefill_keep(edgekv_prefill * p, const int32_t * counts, const int32_t * rows) {
    return guard([&] { reading(p).keep(counts, rows); });
}

int edgekv_prefill_nearest(const edgekv_prefill * p, int32_t il, int32_t head, int32_t n_gone,
    const int32_t * gone, int32_t n_kept, const int32_t * kept, float * cosine, int32_t * nearest) {
    return guard([&] {
        reading(p).keeper.nearest(il, head, { n_gone, gone }, { n_kept, kept }, cosine, nearest);
    });
}

int edgekv_prefill_merge(edgekv_prefill * p, int32_t il, int32_t head, const edgekv_merge * m) {
    return guard([&] { reading(p).keeper.merge(il, head, given(m)); });
}

int edgekv_centroids(const edgekv_lost * lost, const edgekv_centroid_params * params, float * keys,
    float * values, int32_t * n_found, int32_t * label) {
    return guard([&] {
        const auto & l = given(lost);
        const auto & p = given(params);
        given(l.keys), given(l.values), given(l.queries), given(keys), given(values);
        if (l.n_kept > 0) given(l.kept), given(l.kept_values);
        constexpr int32_t MOST = 1 << 20; // so that products of two of them are far from overflow
        for (const int32_t x :
            { l.n, l.n_queries, l.d_k, l.d_v, p.n_groups, p.rounds, p.n_threads })
            if (x < 1 || x > MOST)
                throw edgekv_error { EDGEKV_INVALID, "that many rows cannot be summed up" };
        if (l.n_kept < 0 || l.n_kept > MOST || p.n_groups > l.n)
            throw edgekv_error { EDGEKV_INVALID, "that many rows cannot be summed up" };
        given(n_found) = edgekv_cpu().centroids(&l, &p, keys, values, label);
    });
}

int edgekv_prefill_shrink(edgekv_prefill * p, int32_t il, const int32_t * counts) {
    return guard([&] { reading(p).keeper.shrink(il, &given(counts)); });
}
