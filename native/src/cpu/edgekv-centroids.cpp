// centroids: rows that stand for those that a head loses. edgekv/methods/centroid_merge.py says
// what they are; here is how they are found, for one head, by one thread.
//
// Logits of a block of rows for all queries are a product (edgekv-product.h) whose results have the
// queries side by side. They are made twice, once for the sums over each group and once for the
// averages under the attention that these sums give, because all of them together would be larger
// than all else.
#include "edgekv-cpu.h"
#include "edgekv-lanes.h"
#include "edgekv-product.h"

#include <cmath>
#include <numeric>
#include <vector>

using namespace edgekv;

namespace {

using lanes = best_lanes;
using reg = lanes::reg;
using floats = std::vector<float>;

constexpr int BLOCK = 64; // rows that meet the queries at once
constexpr float LN2 = 0.693147181f;
constexpr float NOTHING = -1e30f; // the maximum before a row was seen
constexpr float TINY = 1e-12f, LEAST = 1e-6f;

struct f32_rows {
    static constexpr int AT_ONCE = 8;
    const float * x;
    void unpack(int r0, int n, int n_in, float * out) const {
        memcpy(out, x + (size_t) r0 * n_in, (size_t) n * n_in * sizeof(*x));
    }
};

// Products of rows with [n][d] others, which are arranged once.
class meeting {
    using kernel = product<f32_words<lanes>, f32_rows>;

public:
    meeting(const float * others, int n, int d)
        : others(others), n(n), d(d),
          panels(kernel::n_panels(n) * kernel::panel_size(d) + LINE / sizeof(uint32_t)) {}

    void changed() { ready = false; } // the others

    // out [n_rows][n]: the products of x [n_rows][d]
    void operator()(const float * x, int n_rows, float * out) {
        words.resize(kernel::n_all_words(d, n_rows) + LINE / sizeof(uint32_t));
        const kernel p = { { others }, d, n, n_rows, x, out, aligned(words.data()) };
        p.make_words(0, 1);
        std::atomic<int32_t> next { 0 };
        p.run(workspace, next, 1, aligned(panels.data()), ready);
        ready = true;
    }

private:
    const float * others;
    const int n, d;
    std::vector<uint32_t> panels, words;
    kernel::workspace workspace;
    bool ready = false;
};

float dot(const float * x, const float * y, int n) { return edgekv::dot<lanes>(x, y, n); }

void add(float * to, const float * x, float weight, int n) {
    for (int i = 0; i < n; ++i) to[i] += weight * x[i];
}

// adds to out [n][width] the sums over m rows x [m][width] with weights [m][n]; n: whole registers
void add_weighted(const float * weights, const float * x, int m, int n, int width, float * out) {
    constexpr int Q = std::min(8, lanes::N); // sums side by side, so that none waits for another
    const int whole = width / lanes::N * lanes::N;
    for (int q = 0; q < n; q += Q, out += (size_t) Q * width) {
        for (int c = 0; c < whole; c += lanes::N) {
            reg sums[Q];
            for (int i = 0; i < Q; ++i) sums[i] = lanes::load(out + (size_t) i * width + c);
            for (int j = 0; j < m; ++j) {
                const reg v = lanes::load(x + (size_t) j * width + c);
                for (int i = 0; i < Q; ++i)
                    sums[i] = lanes::fma(lanes::set(weights[(size_t) j * n + q + i]), v, sums[i]);
            }
            for (int i = 0; i < Q; ++i) lanes::store(out + (size_t) i * width + c, sums[i]);
        }
        for (int i = 0; i < Q && whole < width; ++i)
            for (int j = 0; j < m; ++j)
                add(out + (size_t) i * width + whole, x + (size_t) j * width + whole,
                    weights[(size_t) j * n + q + i], width - whole);
    }
}

// [n][d] to [d][n]
floats turned(const float * x, int n, int d) {
    floats to((size_t) n * d);
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < d; ++j) to[(size_t) j * n + i] = x[(size_t) i * d + j];
    return to;
}

double trace(const double * a, int d) {
    double sum = 0;
    for (int i = 0; i < d; ++i) sum += a[(size_t) i * d + i];
    return sum;
}

// x of a x = b [d][n], for a symmetric and positive [d][d], which becomes its Cholesky factor; b
// becomes x. false: it is not positive
bool solve(double * a, double * b, int d, int n) {
    for (int k = 0; k < d; ++k) { // row k of the upper factor; what lies below is never read
        double * row = a + (size_t) k * d;
        if (!(row[k] > 0)) return false;
        const double scale = 1 / std::sqrt(row[k]);
        for (int j = k; j < d; ++j) row[j] *= scale;
        for (int c = 0; c < n; ++c) b[(size_t) k * n + c] *= scale;
        for (int i = k + 1; i < d; ++i) {
            const double f = row[i];
            double * below = a + (size_t) i * d;
            for (int j = i; j < d; ++j) below[j] -= f * row[j];
            for (int c = 0; c < n; ++c) b[(size_t) i * n + c] -= f * b[(size_t) k * n + c];
        }
    }
    for (int k = d; k-- > 0;) {
        const double * row = a + (size_t) k * d;
        double * to = b + (size_t) k * n;
        for (int j = k + 1; j < d; ++j)
            for (int c = 0; c < n; ++c) to[c] -= row[j] * b[(size_t) j * n + c];
        for (int c = 0; c < n; ++c) to[c] /= row[k];
    }
    return true;
}

class head {
public:
    head(const edgekv_lost & lost, const edgekv_centroid_params & params)
        : h(lost), p(params), d(lost.d_k),
          n_q((lost.n_queries + lanes::N - 1) / lanes::N * lanes::N), powers(scaled(lost.queries)),
          asked(powers.data(), n_q, d), logits((size_t) BLOCK * n_q) {}

    int run(float * keys, float * values, int32_t * label) {
        find_groups(label);
        const int n_groups = (int) begin.size() - 1;
        own.assign((size_t) n_groups * n_q, 0.0f);
        for (int g = 0; g < n_groups; ++g)
            log_sums(
                h.keys, order.data() + begin[g], begin[g + 1] - begin[g], &own[(size_t) g * n_q]);
        const floats share = shares();
        const floats across = turned(h.queries, h.n_queries, d); // [d][n_queries]
        meeting moments(across.data(), d, h.n_queries);
        int n_found = 0;
        for (int g = 0; g < n_groups; ++g) {
            float *key = keys + (size_t) n_found * d, *value = values + (size_t) n_found * h.d_v;
            const float longest = averages(g, &share[(size_t) g * n_q], key, value);
            const float error = regress(g, &share[(size_t) g * n_q], across, moments, key);
            n_found += error <= p.worst && dot(key, key, d) <= p.longest * p.longest * longest;
        }
        fit(keys, values, n_found);
        return n_found;
    }

private:
    const edgekv_lost & h;
    const edgekv_centroid_params & p;
    const int d, n_q;    // queries, filled up to whole registers
    const floats powers; // queries, such that a logit is a power of two
    meeting asked;
    floats logits;                     // [BLOCK][n_q]
    std::vector<int32_t> order, begin; // rows, group by group, and where each of these begins
    floats own;                        // [groups][n_q] log2 of the sum of a group's exponentials
    floats total;                      // [n_q] the same of all rows
    floats stays;                      // [n_q] what part of it is of what is kept

    floats scaled(const float * queries) const {
        floats x((size_t) n_q * d);
        for (size_t i = 0; i < (size_t) h.n_queries * d; ++i) x[i] = LOG2E * queries[i];
        return x;
    }

    // f(rows side by side, their numbers, how many)
    template <class F>
    void in_blocks(
        const float * x, int width, const int32_t * rows, int n, floats & block, F && f) {
        block.resize((size_t) BLOCK * width);
        for (int i = 0; i < n; i += BLOCK) {
            const int m = std::min(BLOCK, n - i);
            for (int j = 0; j < m; ++j)
                std::copy_n(x + (size_t) rows[i + j] * width, width, &block[(size_t) j * width]);
            f(block.data(), rows + i, m);
        }
    }

    // how far apart the logits of two keys are for these queries: a form [d][d]
    floats distance() const {
        floats mean(d), spread(h.queries, h.queries + (size_t) h.n_queries * d),
            form((size_t) d * d);
        for (int i = 0; i < h.n_queries; ++i)
            add(mean.data(), h.queries + (size_t) i * d, 1.0f / h.n_queries, d);
        for (int i = 0; i < h.n_queries; ++i) add(&spread[(size_t) i * d], mean.data(), -1, d);
        const floats across = turned(spread.data(), h.n_queries, d);
        meeting(across.data(), d, h.n_queries)(across.data(), d, form.data());
        double sum = 0;
        for (int i = 0; i < d; ++i) sum += form[(size_t) i * d + i];
        for (float & x : form) x /= h.n_queries;
        for (int i = 0; i < d; ++i)
            form[(size_t) i * d + i] += (float) (p.jitter * sum / h.n_queries / d + TINY);
        return form;
    }

    // of x [n][width], all dimensions together; form [width][width], null: the identity
    double variance(const float * x, int width, meeting * form) {
        floats turned, mean(width), sum(width);
        double squares = 0;
        turned.resize((size_t) BLOCK * width);
        for (int i = 0; i < h.n; i += BLOCK) {
            const int m = std::min(BLOCK, h.n - i);
            const float *from = x + (size_t) i * width, *to = from;
            if (form) {
                (*form)(from, m, turned.data());
                to = turned.data();
            }
            for (int j = 0; j < m; ++j) {
                squares += dot(from + (size_t) j * width, to + (size_t) j * width, width);
                add(sum.data(), from + (size_t) j * width, 1, width);
            }
        }
        for (int i = 0; i < width; ++i) mean[i] = sum[i] / (float) h.n;
        if (form) (*form)(mean.data(), 1, turned.data());
        else turned = mean;
        return std::max(0.0, squares / h.n - dot(mean.data(), turned.data(), width));
    }

    // k-means; a centre is the average of its rows, in both parts
    void find_groups(int32_t * label) {
        const int n = h.n, d_v = h.d_v, n_groups = p.n_groups;
        const floats form = distance();
        meeting formed(form.data(), d, d);
        const float share =
            (float) (variance(h.keys, d, &formed) / (variance(h.values, d_v, nullptr) + TINY));
        floats keys((size_t) n_groups * d), values((size_t) n_groups * d_v), pull(keys.size()),
            least(n_groups), by_key((size_t) BLOCK * n_groups), by_value(by_key.size());
        for (int g = 0; g < n_groups; ++g) {
            const int64_t row = n_groups == 1 ? 0 : (int64_t) g * (n - 1) / (n_groups - 1);
            std::copy_n(h.keys + row * d, d, &keys[(size_t) g * d]);
            std::copy_n(h.values + row * d_v, d_v, &values[(size_t) g * d_v]);
        }
        meeting near_keys(pull.data(), n_groups, d), near_values(values.data(), n_groups, d_v);
        std::vector<int32_t> found(n);
        for (int round = 0; round < p.rounds; ++round) {
            if (round) average(found, keys, values);
            formed(keys.data(), n_groups, pull.data());
            for (int g = 0; g < n_groups; ++g) {
                const float *value = &values[(size_t) g * d_v], *key = &keys[(size_t) g * d];
                least[g] =
                    dot(key, &pull[(size_t) g * d], d) / 2 + share * dot(value, value, d_v) / 2;
            }
            near_keys.changed();
            near_values.changed();
            for (int i = 0; i < n; i += BLOCK) {
                const int m = std::min(BLOCK, n - i);
                near_keys(h.keys + (size_t) i * d, m, by_key.data());
                near_values(h.values + (size_t) i * d_v, m, by_value.data());
                for (int j = 0; j < m; ++j) {
                    const float *k = &by_key[(size_t) j * n_groups],
                                *v = &by_value[(size_t) j * n_groups];
                    float most = -INFINITY;
                    int nearest = 0;
                    for (int g = 0; g < n_groups; ++g) {
                        const float x = k[g] + share * v[g] - least[g];
                        if (x > most) most = x, nearest = g;
                    }
                    found[i + j] = nearest;
                }
            }
        }
        list(found);
        if (label) std::copy(found.begin(), found.end(), label);
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

    void list(const std::vector<int32_t> & label) {
        order.resize(h.n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(
            order.begin(), order.end(), [&](int32_t a, int32_t b) { return label[a] < label[b]; });
        for (int i = 0; i < h.n; ++i)
            if (i == 0 || label[order[i]] != label[order[i - 1]]) begin.push_back(i);
        begin.push_back(h.n);
    }

    // out [n_q]: log2 of the sum of the exponentials of n rows' logits
    void log_sums(const float * keys, const int32_t * rows, int n, float * out) {
        floats most(n_q, NOTHING), sum(n_q), block;
        in_blocks(keys, d, rows, n, block, [&](const float * x, const int32_t *, int m) {
            asked(x, m, logits.data());
            for (int q = 0; q < n_q; q += lanes::N) {
                const reg before = lanes::load(&most[q]);
                reg now = before;
                for (int j = 0; j < m; ++j)
                    now = lanes::max(now, lanes::load(&logits[(size_t) j * n_q + q]));
                reg s = lanes::mul(lanes::load(&sum[q]), exp2<lanes>(lanes::sub(before, now)));
                for (int j = 0; j < m; ++j)
                    s = lanes::add(s,
                        exp2<lanes>(lanes::sub(lanes::load(&logits[(size_t) j * n_q + q]), now)));
                lanes::store(&most[q], now);
                lanes::store(&sum[q], s);
            }
        });
        for (int q = 0; q < n_q; ++q) out[q] = most[q] + std::log2(sum[q]);
    }

    // [groups][n_q]: what part of a query's attention a group gets, over all queries together 1.
    // own becomes what it is of all rows, of which some were looked at.
    floats shares() {
        const int n_groups = (int) begin.size() - 1;
        floats kept(n_q, NOTHING), share(own.size());
        total.assign(n_q, 0.0f);
        stays.assign(n_q, 0.0f);
        if (h.n_kept) {
            std::vector<int32_t> all(h.n_kept);
            std::iota(all.begin(), all.end(), 0);
            log_sums(h.kept, all.data(), h.n_kept, kept.data());
        }
        const float more = std::log2(h.each), more_kept = h.n_kept ? std::log2(h.each_kept) : 0.0f;
        for (int q = 0; q < h.n_queries; ++q) {
            float most = kept[q] + more_kept;
            for (int g = 0; g < n_groups; ++g)
                most = std::max(most, own[(size_t) g * n_q + q] + more);
            float sum = std::exp2(kept[q] + more_kept - most);
            for (int g = 0; g < n_groups; ++g)
                sum += std::exp2(own[(size_t) g * n_q + q] + more - most);
            total[q] = most + std::log2(sum);
            stays[q] = std::exp2(kept[q] + more_kept - total[q]);
        }
        for (int g = 0; g < n_groups; ++g) {
            float *to = &share[(size_t) g * n_q], sum = 0;
            for (int q = 0; q < h.n_queries; ++q)
                sum += to[q] = std::exp2(own[(size_t) g * n_q + q] + more - total[q]) + LEAST;
            for (int q = 0; q < h.n_queries; ++q) to[q] /= sum;
        }
        return share;
    }

    // key and value of a group's rows under its attention, averaged; the square of the longest key
    float averages(int g, const float * share, float * key, float * value) {
        const float * sums = &own[(size_t) g * n_q];
        float longest = 0;
        floats block;
        std::fill_n(key, d, 0.0f);
        std::fill_n(value, h.d_v, 0.0f);
        in_blocks(h.keys, d, &order[begin[g]], begin[g + 1] - begin[g], block,
            [&](const float * x, const int32_t * rows, int m) {
                asked(x, m, logits.data());
                for (int j = 0; j < m; ++j) {
                    reg sum = lanes::set(0.0f);
                    for (int q = 0; q < n_q; q += lanes::N)
                        sum = lanes::fma(lanes::load(share + q),
                            exp2<lanes>(lanes::sub(
                                lanes::load(&logits[(size_t) j * n_q + q]), lanes::load(sums + q))),
                            sum);
                    const float weight = sum_of<lanes>(sum);
                    const float * k = x + (size_t) j * d;
                    longest = std::max(longest, dot(k, k, d));
                    add(key, k, weight, d);
                    add(value, h.values + (size_t) rows[j] * h.d_v, weight, h.d_v);
                }
            });
        return longest;
    }

    // the key near to what it is, whose logits are what a group wants; its error
    float regress(
        int g, const float * share, const floats & across, meeting & moments, float * key) {
        const int m = h.n_queries;
        const float more = std::log2(h.each);
        const float * sums = &own[(size_t) g * n_q];
        floats weighted(across), square((size_t) d * d);
        for (int i = 0; i < d; ++i)
            for (int q = 0; q < m; ++q) weighted[(size_t) i * m + q] *= share[q];
        moments(weighted.data(), d, square.data());
        std::vector<double> left(square.begin(), square.end()), right(d);
        const double ridge = p.ridge * trace(left.data(), d) / d;
        for (int i = 0; i < d; ++i) left[(size_t) i * d + i] += ridge;
        floats misses(m);
        const auto miss = [&](int q) {
            return LN2 * (sums[q] + more) - dot(h.queries + (size_t) q * d, key, d);
        };
        for (int q = 0; q < m; ++q) misses[q] = miss(q);
        for (int i = 0; i < d; ++i) right[i] = dot(&weighted[(size_t) i * m], misses.data(), m);
        if (!solve(left.data(), right.data(), d, 1)) return INFINITY;
        for (int i = 0; i < d; ++i) key[i] += (float) right[i];
        double error = 0;
        for (int q = 0; q < m; ++q) error += (double) share[q] * miss(q) * miss(q);
        return (float) std::sqrt(error);
    }

    // adds to out [n_q][d_v] the values of n rows, each of which stands for `each`, by the
    // attention that they got among all
    void attend(const float * keys, const float * values, int n, float each, floats & out) {
        const reg more = lanes::set(std::log2(each));
        for (int i = 0; i < n; i += BLOCK) {
            const int m = std::min(BLOCK, n - i);
            asked(keys + (size_t) i * d, m, logits.data());
            for (int j = 0; j < m; ++j)
                for (int q = 0; q < n_q; q += lanes::N) {
                    float * x = &logits[(size_t) j * n_q + q];
                    lanes::store(x,
                        exp2<lanes>(
                            lanes::add(more, lanes::sub(lanes::load(x), lanes::load(&total[q])))));
                }
            add_weighted(logits.data(), values + (size_t) i * h.d_v, m, n_q, h.d_v, out.data());
        }
    }

    // values [n][d_v], moved to where attention over what is kept and them is what it was over all
    void fit(const float * keys, float * values, int n) {
        if (n == 0) return;
        const int m = h.n_queries, d_v = h.d_v;
        floats want((size_t) n_q * d_v), has(want.size()), part((size_t) n * n_q), z(stays);
        attend(h.kept, h.kept_values, h.n_kept, h.each_kept, has);
        want = has;
        attend(h.keys, h.values, h.n, h.each, want);
        for (int g = 0; g < n; ++g) {
            float * to = &part[(size_t) g * n_q];
            asked(keys + (size_t) g * d, 1, to);
            for (int q = 0; q < m; ++q) z[q] += to[q] = std::exp2(to[q] - total[q]);
        }
        for (int g = 0; g < n; ++g)
            for (int q = 0; q < m; ++q) part[(size_t) g * n_q + q] /= z[q];
        for (int q = 0; q < m; ++q) { // want becomes what is missing
            float * to = &want[(size_t) q * d_v];
            add(to, &has[(size_t) q * d_v], -1 / z[q], d_v);
            for (int g = 0; g < n; ++g)
                add(to, values + (size_t) g * d_v, -part[(size_t) g * n_q + q], d_v);
        }
        move(part, want, values, n);
    }

    void move(const floats & part, const floats & missing, float * values, int n) const {
        const int m = h.n_queries, d_v = h.d_v;
        std::vector<double> left((size_t) n * n), right((size_t) n * d_v);
        for (int g = 0; g < n; ++g) {
            const float * p_g = &part[(size_t) g * n_q];
            for (int i = g; i < n; ++i)
                left[(size_t) g * n + i] = left[(size_t) i * n + g] =
                    dot(p_g, &part[(size_t) i * n_q], m);
            for (int q = 0; q < m; ++q)
                for (int c = 0; c < d_v; ++c)
                    right[(size_t) g * d_v + c] += (double) p_g[q] * missing[(size_t) q * d_v + c];
        }
        const double ridge = p.fit * trace(left.data(), n) / m;
        for (int g = 0; g < n; ++g) left[(size_t) g * n + g] += ridge;
        if (!solve(left.data(), right.data(), n, d_v)) return;
        float longest = 0;
        for (int i = 0; i < h.n; ++i) {
            const float * v = h.values + (size_t) i * d_v;
            longest = std::max(longest, dot(v, v, d_v));
        }
        floats moved(d_v);
        for (int g = 0; g < n; ++g) {
            float * v = values + (size_t) g * d_v;
            for (int c = 0; c < d_v; ++c) moved[c] = v[c] + (float) right[(size_t) g * d_v + c];
            if (dot(moved.data(), moved.data(), d_v) <= p.longest * p.longest * longest)
                std::copy(moved.begin(), moved.end(), v);
        }
    }
};

} // namespace

int edgekv_cpu_centroids(const edgekv_lost * lost, const edgekv_centroid_params * params,
    float * keys, float * values, int32_t * label) {
    return head(*lost, *params).run(keys, values, label);
}
