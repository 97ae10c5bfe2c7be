#include "edgekv-groups.h"
#include "edgekv-parts.h"

#include <cmath>

using namespace edgekv;

namespace {

using lanes = best_lanes;
using reg = lanes::reg;

constexpr int BLOCK = 64; // rows that meet the centres at once
constexpr float TINY = 1e-12f;

struct k_means {
    const edgekv_lost & h;
    const edgekv_centroid_params & p;
    const int d = h.d_k;

    // how far apart the logits of two keys are for these queries: a form [d][d]
    floats distance() const {
        floats mean(d), spread(h.queries, h.queries + (size_t) h.n_queries * d),
            form((size_t) d * d);
        for (int i = 0; i < h.n_queries; ++i)
            add(mean.data(), h.queries + (size_t) i * d, 1.0f / h.n_queries, d);
        for (int i = 0; i < h.n_queries; ++i) add(&spread[(size_t) i * d], mean.data(), -1, d);
        const floats across = turned(spread.data(), h.n_queries, d);
        std::vector<uint32_t> words;
        arranged(across.data(), d, h.n_queries).multiply(across.data(), d, form.data(), words);
        double sum = 0;
        for (int i = 0; i < d; ++i) sum += form[(size_t) i * d + i];
        for (float & x : form) x /= h.n_queries;
        for (int i = 0; i < d; ++i)
            form[(size_t) i * d + i] += (float) (p.jitter * sum / h.n_queries / d + TINY);
        return form;
    }

    // of x [n][width], all dimensions together; form [width][width], null: the identity
    double variance(const float * x, int width, const arranged * form) const {
        floats turned((size_t) BLOCK * width), mean(width), sum(width);
        std::vector<uint32_t> words;
        double squares = 0;
        for (int i = 0; i < h.n; i += BLOCK) {
            const int m = std::min(BLOCK, h.n - i);
            const float *from = x + (size_t) i * width, *to = from;
            if (form) {
                form->multiply(from, m, turned.data(), words);
                to = turned.data();
            }
            for (int j = 0; j < m; ++j) {
                squares += dot(from + (size_t) j * width, to + (size_t) j * width, width);
                add(sum.data(), from + (size_t) j * width, 1, width);
            }
        }
        for (int i = 0; i < width; ++i) mean[i] = sum[i] / (float) h.n;
        if (form) form->multiply(mean.data(), 1, turned.data(), words);
        else turned = mean;
        return std::max(0.0, squares / h.n - dot(mean.data(), turned.data(), width));
    }

    // a centre is the average of its rows, in both parts
    std::vector<int32_t> run() const {
        const int n = h.n, d_v = h.d_v, n_centres = p.n_groups;
        const floats form = distance();
        const arranged formed(form.data(), d, d);
        double spread[2];
        in_parts(2, p.n_threads, [&](int i) {
            spread[i] = i ? variance(h.values, d_v, nullptr) : variance(h.keys, d, &formed);
        });
        const float share = (float) (spread[0] / (spread[1] + TINY));
        const int n_all = (n_centres + lanes::N - 1) / lanes::N * lanes::N;
        floats keys((size_t) n_all * d), values((size_t) n_all * d_v), pull(keys.size()),
            least(n_all, INFINITY);
        for (int g = 0; g < n_centres; ++g) {
            const int64_t row = n_centres == 1 ? 0 : (int64_t) g * (n - 1) / (n_centres - 1);
            std::copy_n(h.keys + row * d, d, &keys[(size_t) g * d]);
            std::copy_n(h.values + row * d_v, d_v, &values[(size_t) g * d_v]);
        }
        arranged near_keys(pull.data(), n_all, d), near_values(values.data(), n_all, d_v);
        std::vector<uint32_t> words;
        std::vector<int32_t> found(n);
        for (int round = 0; round < p.rounds; ++round) {
            if (round) average(found, keys, values);
            formed.multiply(keys.data(), n_all, pull.data(), words);
            for (int g = 0; g < n_centres; ++g) {
                const float *value = &values[(size_t) g * d_v], *key = &keys[(size_t) g * d];
                least[g] =
                    dot(key, &pull[(size_t) g * d], d) / 2 + share * dot(value, value, d_v) / 2;
            }
            near_keys.again();
            near_values.again();
            in_blocks([&](int first, int end) {
                floats by_key((size_t) BLOCK * n_all), by_value(by_key.size());
                std::vector<uint32_t> words;
                for (int i = first; i < end; i += BLOCK) {
                    const int m = std::min(BLOCK, end - i);
                    near_keys.multiply(h.keys + (size_t) i * d, m, by_key.data(), words);
                    near_values.multiply(h.values + (size_t) i * d_v, m, by_value.data(), words);
                    for (int j = 0; j < m; ++j)
                        found[i + j] = nearest(&by_key[(size_t) j * n_all],
                            &by_value[(size_t) j * n_all], share, least);
                }
            });
        }
        return found;
    }

    // which centre is nearest, of products of a row with their keys and values; k becomes scratch
    int nearest(float * k, const float * v, float share, const floats & least) const {
        const int n = (int) least.size();
        reg most = lanes::set(-INFINITY);
        for (int g = 0; g < n; g += lanes::N) {
            const reg x =
                lanes::sub(lanes::fma(lanes::set(share), lanes::load(v + g), lanes::load(k + g)),
                    lanes::load(&least[g]));
            lanes::store(k + g, x);
            most = lanes::max(most, x);
        }
        float each[lanes::N];
        lanes::store(each, most);
        const float m = *std::max_element(each, each + lanes::N);
        const auto at = (int) (std::find(k, k + n, m) - k);
        return at < p.n_groups ? at : 0; // where none is a number
    }

    // centres without rows stay where they are
    void average(const std::vector<int32_t> & label, floats & keys, floats & values) const {
        const int n_groups = p.n_groups;
        floats new_keys(keys.size()), new_values(values.size()), size(n_groups);
        for (int i = 0; i < h.n; ++i) {
            const int g = label[i];
            size[g] += 1;
            add(&new_keys[(size_t) g * d], h.keys + (size_t) i * d, 1, d);
            add(&new_values[(size_t) g * h.d_v], h.values + (size_t) i * h.d_v, 1, h.d_v);
        }
        for (int g = 0; g < n_groups; ++g) {
            if (size[g] == 0) continue;
            for (int i = 0; i < d; ++i)
                keys[(size_t) g * d + i] = new_keys[(size_t) g * d + i] / size[g];
            for (int i = 0; i < h.d_v; ++i)
                values[(size_t) g * h.d_v + i] = new_values[(size_t) g * h.d_v + i] / size[g];
        }
    }

    // f(first row, how many) for the blocks of each part of the lost rows
    template <class F>
    void in_blocks(F && f) const {
        const int n_blocks = (h.n + BLOCK - 1) / BLOCK;
        in_parts(PARTS, p.n_threads, [&](int part) {
            f(n_blocks * part / PARTS * BLOCK,
                std::min(h.n, n_blocks * (part + 1) / PARTS * BLOCK));
        });
    }
};

} // namespace

std::vector<int32_t> edgekv::find_groups(
    const edgekv_lost & lost, const edgekv_centroid_params & params) {
    return k_means { lost, params }.run();
}
