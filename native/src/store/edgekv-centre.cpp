// The centre of a layer's keys, from the bias in its weights
#include "edgekv-centre.h"
#include "edgekv-layer.h"

#include "ggml-backend.h"
#include "llama-cparams.h"
#include "llama-model.h"

#include <cmath>
#include <complex>

// the bias of all keys of a layer, [n_head_kv, d_k]; empty: there is none, or it is not the last
// thing before the positions
static std::vector<float> bias_of(const llama_model & model, const edgekv_layer & l) {
    const auto & w = model.layers[l.il];
    const int64_t n = (int64_t) l.n_head_kv * l.d_k, n_queries = (int64_t) l.n_head * l.d_k;
    const ggml_tensor * t = w.wk_b ? w.wk_b : w.wqkv_b;
    const int64_t first = w.wk_b ? 0 : n_queries,
                  whole = w.wk_b ? n : n_queries + n + (int64_t) l.n_head_kv * l.d_v;
    // not loaded: its bytes are asked for, not its values
    if (!t || w.attn_k_norm || t->type != GGML_TYPE_F32 || ggml_nelements(t) != whole || !t->data)
        return {};
    std::vector<float> bias(n);
    ggml_backend_tensor_get(t, bias.data(), first * sizeof(float), n * sizeof(float));
    return bias;
}

// the mean of exp(i angle p) over positions p
static std::complex<double> mean_turn(double angle) {
    const double all = angle * edgekv_centre::POSITIONS;
    return all < 1e-9 ? 1.0 : std::complex<double>(std::sin(all), 1 - std::cos(all)) / all;
}

// x [d] becomes its mean over positions. YaRN leaves pairs that turn fast as they are, here they
// turn like the others: their mean is near 0 in both
static void average(const llama_model & model, const llama_cparams & c, int il, float * x) {
    const auto type = model.hparams.rope_type;
    if (type == LLAMA_ROPE_TYPE_NONE) return;
    const int n = (int) model.hparams.n_rot(il), half = n / 2;
    const int step = type == LLAMA_ROPE_TYPE_NORM ? 2 : 1, other = step == 2 ? 1 : half;
    const double base = model.get_rope_freq_base(c, il), scale = model.get_rope_freq_scale(c, il);
    std::vector<float> factors(half, 1.0f);
    const ggml_tensor * t = model.get_rope_factors(c, il);
    if (t && t->data && t->type == GGML_TYPE_F32 && ggml_nelements(t) == half)
        ggml_backend_tensor_get(t, factors.data(), 0, ggml_nbytes(t));
    for (int i = 0; i < half; ++i) {
        float &a = x[step * i], &b = x[step * i + other];
        const auto mean = std::complex<double>(a, b) *
            mean_turn(scale * std::pow(base, -2.0 * i / n) / factors[i]);
        a = (float) mean.real();
        b = (float) mean.imag();
    }
}

// x [size] times the orthonormal Walsh-Hadamard matrix
static void turn_block(float * x, int size) {
    for (int half = 1; half < size; half *= 2)
        for (int i = 0; i < size; ++i)
            if (!(i & half)) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    for (int i = 0; i < size; ++i) x[i] /= std::sqrt((float) size);
}

std::shared_ptr<const edgekv_centre> edgekv_centre::make(
    const llama_model & model, const llama_cparams & c, const edgekv_layer & l, int turn) {
    if (l.n_head_kv == 0 || l.v_in_k || !ggml_is_quantized(l.type_k)) return nullptr;
    if (model.hparams.attn_soft_cap || model.layers[l.il].attn_sinks) return nullptr;
    auto centre = std::make_shared<edgekv_centre>();
    auto & x = centre->values = bias_of(model, l);
    if (x.empty()) return nullptr;
    for (size_t i = 0; i < x.size(); i += l.d_k) average(model, c, l.il, &x[i]);
    for (size_t i = 0; turn && i < x.size(); i += turn) turn_block(&x[i], turn);
    for (float value : x)
        if (!std::isfinite(value)) return nullptr;
    centre->there = edgekv_matrix::make(l.buft, GGML_TYPE_F32, l.d_k, l.n_head_kv, "centre");
    ggml_backend_tensor_set(centre->there.t, x.data(), 0, x.size() * sizeof(float));
    return centre;
}

const float * edgekv_centre_of(const edgekv_layer & l, int head) {
    return l.centre ? l.centre->values.data() + (size_t) head * l.d_k : nullptr;
}

static void add(const edgekv_layer & l, int head, int64_t n, float * keys, float times) {
    const float * c = edgekv_centre_of(l, head);
    for (int64_t r = 0; c && r < n; ++r, keys += l.d_k)
        for (int i = 0; i < l.d_k; ++i) keys[i] += times * c[i];
}

void edgekv_take_centre(const edgekv_layer & l, int head, int64_t n, float * keys) {
    add(l, head, n, keys, -1.0f);
}

void edgekv_give_centre(const edgekv_layer & l, int head, int64_t n, float * keys) {
    add(l, head, n, keys, 1.0f);
}
