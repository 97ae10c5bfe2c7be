// The basis of a layer's keys, from the vectors among its weights
#include "edgekv-basis.h"
#include "edgekv-kernels.h"
#include "edgekv-layer.h"

#include "ggml-backend.h"
#include "llama-cparams.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <complex>

using values = std::vector<float>;

// values [first, first + n) of a vector of `whole` values; empty: there is none such. What is not
// loaded has no values: its bytes are asked for
static values part_of(const ggml_tensor * t, int64_t whole, int64_t first, int64_t n) {
    if (!t || t->type != GGML_TYPE_F32 || ggml_nelements(t) != whole || !t->data) return {};
    values x(n);
    ggml_backend_tensor_get(t, x.data(), first * sizeof(float), n * sizeof(float));
    return x;
}

// of n_head heads of d values: the weight of their norm, whether heads share it or not
static values norm_of(const ggml_tensor * t, int n_head, int d) {
    values x = part_of(t, (int64_t) n_head * d, 0, (int64_t) n_head * d);
    if (!x.empty()) return x;
    const values one = part_of(t, d, 0, d);
    for (int h = 0; h < n_head && !one.empty(); ++h) x.insert(x.end(), one.begin(), one.end());
    return x;
}

// the bias of queries or of keys, one of them or beside the others' in one vector
static values bias_of(const edgekv_layer & l, const llama_layer & w, bool of_keys) {
    const int64_t n_q = (int64_t) l.n_head * l.d_k, n_k = (int64_t) l.n_head_kv * l.d_k;
    const int64_t n = of_keys ? n_k : n_q;
    const values own = part_of(of_keys ? w.wk_b : w.wq_b, n, 0, n);
    if (!own.empty()) return own;
    return part_of(w.wqkv_b, n_q + n_k + (int64_t) l.n_head_kv * l.d_v, of_keys ? n_q : 0, n);
}

// the pairs of values [i, other) that positions turn: as two values of d, and by how far
struct turned_pairs {
    int n = 0, step = 1, other = 0; // pair i: values step * i and step * i + other
    std::vector<double> angle;      // per position

    turned_pairs(const llama_model & model, const llama_cparams & c, int il) {
        const auto type = model.hparams.rope_type;
        if (type == LLAMA_ROPE_TYPE_NONE) return;
        const int n_rot = (int) model.hparams.n_rot(il);
        n = n_rot / 2;
        step = type == LLAMA_ROPE_TYPE_NORM ? 2 : 1;
        other = step == 2 ? 1 : n;
        values factors(n, 1.0f);
        const values own = part_of(model.get_rope_factors(c, il), n, 0, n);
        if (!own.empty()) factors = own;
        // YaRN leaves pairs that turn fast as they are, here they turn like the others: their mean
        // is near 0 in both
        const double base = model.get_rope_freq_base(c, il), by = model.get_rope_freq_scale(c, il);
        for (int i = 0; i < n; ++i)
            angle.push_back(by * std::pow(base, -2.0 * i / n_rot) / factors[i]);
    }
};

// the mean of exp(i angle p) over positions p
static std::complex<double> mean_turn(double angle) {
    const double all = angle * edgekv_basis::POSITIONS;
    return all < 1e-9 ? 1.0 : std::complex<double>(std::sin(all), 1 - std::cos(all)) / all;
}

// x [d] becomes its mean over positions
static void average(const turned_pairs & pairs, float * x) {
    for (int i = 0; i < pairs.n; ++i) {
        float &a = x[pairs.step * i], &b = x[pairs.step * i + pairs.other];
        const auto mean = std::complex<double>(a, b) * mean_turn(pairs.angle[i]);
        a = (float) mean.real();
        b = (float) mean.imag();
    }
}

// Mean squares of values [n_head, d] of queries or keys. left: of their bias, what stays of its
// square; a value of a token is about as large as 1 beside it
static values squares(const values & norm, const values & left, size_t n) {
    values x(n, 1.0f);
    for (size_t i = 0; i < n; ++i)
        if (!norm.empty()) x[i] = norm[i] * norm[i];
        else if (!left.empty()) x[i] += left[i];
    return x;
}

// sqrt(q / k) for one head's mean squares [d], around 1
static values scale_for(const turned_pairs & pairs, values q, values k) {
    for (values * x : { &q, &k }) {
        for (int i = 0; i < pairs.n; ++i) {
            float &a = (*x)[pairs.step * i], &b = (*x)[pairs.step * i + pairs.other];
            a = b = (a + b) / 2;
        }
        const float least = *std::max_element(x->begin(), x->end()) * 1e-6f + 1e-30f;
        for (float & value : *x) value = std::max(value, least);
    }
    double mean = 0; // of the logarithms
    for (size_t i = 0; i < q.size(); ++i) mean += std::log(q[i] / k[i]) / 4 / (double) q.size();
    values s(q.size());
    for (size_t i = 0; i < s.size(); ++i)
        s[i] = std::clamp((float) std::exp(std::log(q[i] / k[i]) / 4 - mean),
            1 / edgekv_basis::MOST, edgekv_basis::MOST);
    return s;
}

static bool finite(const values & x) {
    return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
}

static edgekv_matrix placed(const edgekv_layer & l, const values & x, const char * name) {
    auto m = edgekv_matrix::make(l.buft, GGML_TYPE_F32, l.d_k, (int64_t) x.size() / l.d_k, name);
    ggml_backend_tensor_set(m.t, x.data(), 0, x.size() * sizeof(float));
    return m;
}

std::shared_ptr<const edgekv_basis> edgekv_basis::make(
    const llama_model & model, const llama_cparams & c, const edgekv_layer & l, int turn) {
    if (l.n_head_kv == 0 || l.v_in_k || !ggml_is_quantized(l.type_k)) return nullptr;
    const auto & w = model.layers[l.il];
    const size_t d = l.d_k, n_k = l.n_head_kv * d, n_q = l.n_head * d;
    const auto norm_q = norm_of(w.attn_q_norm, l.n_head, l.d_k),
               norm_k = norm_of(w.attn_k_norm, l.n_head_kv, l.d_k);
    // a bias in front of a norm says nothing
    auto bias_q = w.attn_q_norm ? values() : bias_of(l, w, false),
         bias_k = w.attn_k_norm ? values() : bias_of(l, w, true);
    if ((norm_k.empty() && bias_k.empty()) || !finite(norm_q) || !finite(norm_k) ||
        !finite(bias_q) || !finite(bias_k))
        return nullptr;

    const turned_pairs pairs(model, c, l.il);
    auto basis = std::make_shared<edgekv_basis>();
    basis->turn = turn;
    if (!bias_k.empty() && !model.hparams.attn_soft_cap && !w.attn_sinks) {
        basis->centre = bias_k;
        for (size_t i = 0; i < n_k; i += d) average(pairs, &basis->centre[i]);
    }
    for (float & x : bias_q) x *= x;
    for (size_t i = 0; i < bias_k.size(); ++i) // mean squares of what the centre leaves
        bias_k[i] = bias_k[i] * bias_k[i] -
            (basis->centre.empty() ? 0 : basis->centre[i] * basis->centre[i]);
    const auto q = squares(norm_q, bias_q, n_q), k = squares(norm_k, bias_k, n_k);
    values for_queries;
    for (int head = 0; head < l.n_head_kv; ++head) {
        const int n_group = l.n_head / l.n_head_kv;
        values mean(d, 0.0f);
        for (int g = 0; g < n_group; ++g)
            for (size_t i = 0; i < d; ++i)
                mean[i] += q[(size_t) (head * n_group + g) * d + i] / (float) n_group;
        const auto s = scale_for(pairs, mean, values(&k[head * d], &k[head * d] + d));
        basis->scale.insert(basis->scale.end(), s.begin(), s.end());
        for (int g = 0; g < n_group; ++g)
            for (float x : s) for_queries.push_back(1 / x);
    }
    for (size_t i = 0; i < basis->centre.size(); ++i) basis->centre[i] *= basis->scale[i];
    edgekv_cpu().turn(basis->centre.data(), (int64_t) basis->centre.size(), turn);
    if (!finite(basis->scale) || !finite(basis->centre)) return nullptr;
    basis->key_scale = placed(l, basis->scale, "key scale");
    basis->query_scale = placed(l, for_queries, "query scale");
    if (!basis->centre.empty()) basis->key_centre = placed(l, basis->centre, "key centre");
    return basis;
}

edgekv_key_basis edgekv_basis::of(int head, int d) const {
    const size_t at = (size_t) head * d;
    return { centre.empty() ? nullptr : &centre[at], &scale[at], turn };
}

edgekv_key_basis edgekv_basis_of(const edgekv_layer & l, int head) {
    return l.basis ? l.basis->of(head, l.d_k) : edgekv_key_basis {};
}

void edgekv_store_keys(const edgekv_layer & l, int head, int64_t n, float * keys) {
    const auto b = edgekv_basis_of(l, head);
    if (!b.scale) return;
    for (int64_t r = 0; r < n; ++r, keys += l.d_k) {
        edgekv_cpu().turn(keys, l.d_k, b.turn);
        for (int i = 0; i < l.d_k; ++i) keys[i] *= b.scale[i];
        edgekv_cpu().turn(keys, l.d_k, b.turn);
        for (int i = 0; b.centre && i < l.d_k; ++i) keys[i] -= b.centre[i];
    }
}

void edgekv_whole_keys(const edgekv_layer & l, int head, int64_t n, float * keys) {
    const auto b = edgekv_basis_of(l, head);
    edgekv_cpu().whole_keys(&b, n, l.d_k, keys);
}
