// centroids: rows that stand for those that a head loses. edgekv/methods/centroid_merge.py says
// what they are; here is how they are found, for one head. What its threads share is cut into parts
// that do not depend on how many threads there are, and neither do the results.
//
// Logits of a block of rows for all queries are a product (edgekv-product.h) whose results have the
// queries side by side. They are made twice, once for the sums over each group and once for the
// attention that these sums give, because all of them together would be larger than all else.
#include "edgekv-cpu.h"
#include "edgekv-groups.h"
#include "edgekv-parts.h"

#include <cmath>
#include <numeric>

using namespace edgekv;

namespace {

using lanes = best_lanes;
using reg = lanes::reg;

constexpr int BLOCK = 64; // rows that meet the queries at once
constexpr float LN2 = 0.693147181f;
constexpr float NOTHING = -1e30f; // the maximum before a row was seen
constexpr float LEAST = 1e-6f;
constexpr float MOST = 100; // a power of two that is far from the largest float

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

// memory of a thread
struct workspace {
    floats logits, keys, values; // [BLOCK][n_q], [BLOCK][d_k], [BLOCK][d_v]
    std::vector<uint32_t> words;
};

class head {
public:
    head(const edgekv_lost & lost, const edgekv_centroid_params & params)
        : h(lost), p(params), d(lost.d_k),
          n_q((lost.n_queries + arranged::STEP - 1) / arranged::STEP * arranged::STEP),
          powers(scaled(lost.queries)), asked(powers.data(), n_q, d) {}

    int run(float * keys, float * values, int32_t * label) {
        const auto found = find_groups(h, p);
        if (label) std::copy(found.begin(), found.end(), label);
        list(found);
        add_up();
        const floats share = shares();
        const auto is_near = stand(share, keys, values);
        int n_found = 0;
        for (int g = 0; g < n_groups(); ++g) {
            if (!is_near[g]) continue;
            if (n_found < g) {
                std::copy_n(keys + (size_t) g * d, d, keys + (size_t) n_found * d);
                std::copy_n(values + (size_t) g * h.d_v, h.d_v, values + (size_t) n_found * h.d_v);
            }
            ++n_found;
        }
        fit(keys, values, n_found);
        return n_found;
    }

private:
    const edgekv_lost & h;
    const edgekv_centroid_params & p;
    const int d, n_q;    // queries, a multiple of arranged::STEP
    const floats powers; // queries, such that a logit is a power of two
    const arranged asked;
    std::vector<int32_t> order, begin; // rows, group by group, and where each of these begins
    floats own;                        // [groups][n_q] log2 of the sum of a group's exponentials
    floats of_kept;                    // [n_q] the same of what is kept
    floats total;                      // [n_q] and of all rows, of which some were looked at
    floats stays;                      // [n_q] what part of it is of what is kept
    floats want, has;                  // [n_q][d_v] values by attention: of all rows, of kept ones

    int n_groups() const { return (int) begin.size() - 1; }

    floats scaled(const float * queries) const {
        floats x((size_t) n_q * d);
        for (size_t i = 0; i < (size_t) h.n_queries * d; ++i) x[i] = LOG2E * queries[i];
        return x;
    }

    workspace room() const {
        return { floats((size_t) BLOCK * n_q), floats((size_t) BLOCK * d),
            floats((size_t) BLOCK * h.d_v), {} };
    }

    // f(part, workspace, first group, last group); the part behind them has what is kept
    template <class F>
    void in_groups(F && f) const {
        const auto first = [&](int part) {
            const int64_t row = (int64_t) h.n * part / PARTS;
            return (int) (std::lower_bound(begin.begin(), begin.end() - 1, row) - begin.begin());
        };
        in_parts(PARTS + 1, p.n_threads, [&](int part) {
            workspace w = room();
            f(part, w, part < PARTS ? first(part) : 0, part < PARTS ? first(part + 1) : 0);
        });
    }

    // f(how many, keys, values, logits) for blocks of rows; rows: their numbers, null: all
    template <class F>
    void meet(const float * keys, const float * values, const int32_t * rows, int n, workspace & w,
        F && f) const {
        for (int i = 0; i < n; i += BLOCK) {
            const int m = std::min(BLOCK, n - i);
            for (int j = 0; j < m; ++j) {
                const size_t row = rows ? rows[i + j] : i + j;
                std::copy_n(keys + row * d, d, &w.keys[(size_t) j * d]);
                if (values) std::copy_n(values + row * h.d_v, h.d_v, &w.values[(size_t) j * h.d_v]);
            }
            asked.multiply(w.keys.data(), m, w.logits.data(), w.words);
            f(m, w.keys.data(), w.values.data(), w.logits.data());
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

    // of every group and of what is kept
    void add_up() {
        own.resize((size_t) n_groups() * n_q);
        of_kept.assign(n_q, NOTHING);
        in_groups([&](int part, workspace & w, int first, int end) {
            for (int g = first; g < end; ++g)
                log_sums(
                    h.keys, &order[begin[g]], begin[g + 1] - begin[g], w, &own[(size_t) g * n_q]);
            if (part == PARTS && h.n_kept) log_sums(h.kept, nullptr, h.n_kept, w, of_kept.data());
        });
    }

    // out [n_q]: log2 of the sum of the exponentials of n rows' logits
    void log_sums(
        const float * keys, const int32_t * rows, int n, workspace & w, float * out) const {
        floats most(n_q, NOTHING), sum(n_q);
        meet(keys, nullptr, rows, n, w,
            [&](int m, const float *, const float *, const float * logits) {
                for (int q = 0; q < n_q; q += lanes::N) {
                    const reg before = lanes::load(&most[q]);
                    reg now = before;
                    for (int j = 0; j < m; ++j)
                        now = lanes::max(now, lanes::load(logits + (size_t) j * n_q + q));
                    reg s = lanes::mul(lanes::load(&sum[q]), exp2<lanes>(lanes::sub(before, now)));
                    for (int j = 0; j < m; ++j)
                        s = lanes::add(s,
                            exp2<lanes>(
                                lanes::sub(lanes::load(logits + (size_t) j * n_q + q), now)));
                    lanes::store(&most[q], now);
                    lanes::store(&sum[q], s);
                }
            });
        for (int q = 0; q < n_q; ++q) out[q] = most[q] + std::log2(sum[q]);
    }

    // [groups][n_q]: what part of a query's attention a group gets, over all queries together 1
    floats shares() {
        floats share(own.size()), most(n_q), sum(n_q);
        total.resize(n_q);
        stays.resize(n_q);
        const float more = std::log2(h.each), more_kept = h.n_kept ? std::log2(h.each_kept) : 0.0f;
        const auto power = [](const float * x, float more, const float * from) {
            return exp2<lanes>(
                lanes::sub(lanes::add(lanes::load(x), lanes::set(more)), lanes::load(from)));
        };
        for (int q = 0; q < n_q; q += lanes::N) {
            reg m = lanes::add(lanes::load(&of_kept[q]), lanes::set(more_kept));
            for (int g = 0; g < n_groups(); ++g)
                m = lanes::max(
                    m, lanes::add(lanes::load(&own[(size_t) g * n_q + q]), lanes::set(more)));
            lanes::store(&most[q], m);
            reg s = power(&of_kept[q], more_kept, &most[q]);
            for (int g = 0; g < n_groups(); ++g)
                s = lanes::add(s, power(&own[(size_t) g * n_q + q], more, &most[q]));
            lanes::store(&sum[q], s);
        }
        for (int q = 0; q < n_q; ++q) total[q] = most[q] + std::log2(sum[q]);
        for (int q = 0; q < n_q; q += lanes::N)
            lanes::store(&stays[q], power(&of_kept[q], more_kept, &total[q]));
        for (int g = 0; g < n_groups(); ++g) {
            float *to = &share[(size_t) g * n_q], all = 0;
            for (int q = 0; q < n_q; q += lanes::N)
                lanes::store(to + q, power(&own[(size_t) g * n_q + q], more, &total[q]));
            for (int q = 0; q < h.n_queries; ++q) all += to[q] += LEAST;
            for (int q = 0; q < n_q; ++q) to[q] = q < h.n_queries ? to[q] / all : 0.0f;
        }
        return share;
    }

    // a row for each group, key and value, and whether it is near enough to what it stands for;
    // and what attention over the rows is
    std::vector<char> stand(const floats & share, float * keys, float * values) {
        const floats across = turned(h.queries, h.n_queries, d); // [d][n_queries]
        const arranged moments(across.data(), d, h.n_queries);
        std::vector<char> is_near(n_groups());
        std::vector<floats> attended(PARTS + 1);
        in_groups([&](int part, workspace & w, int first, int end) {
            auto & out = attended[part];
            out.resize((size_t) n_q * h.d_v);
            for (int g = first; g < end; ++g) {
                float *key = keys + (size_t) g * d, *value = values + (size_t) g * h.d_v;
                const float * part_of = &share[(size_t) g * n_q];
                const float longest = averages(g, part_of, w, key, value, out);
                const float error = regress(g, part_of, across, moments, w.words, key);
                is_near[g] =
                    error <= p.worst && dot(key, key, d) <= p.longest * p.longest * longest;
            }
            if (part == PARTS)
                meet(h.kept, h.kept_values, nullptr, h.n_kept, w,
                    [&](int m, const float *, const float * values, float * logits) {
                        attend(logits, values, m, h.each_kept, out);
                    });
        });
        has = std::move(attended[PARTS]);
        want = has;
        for (int part = 0; part < PARTS; ++part)
            add(want.data(), attended[part].data(), 1, (int) want.size());
        return is_near;
    }

    // m rows' logits become the attention that they get among all, each of them standing for `each`
    // rows, and their values by that are added to out [n_q][d_v]
    void attend(float * logits, const float * values, int m, float each, floats & out) const {
        const reg more = lanes::set(std::log2(each));
        for (int j = 0; j < m; ++j)
            for (int q = 0; q < n_q; q += lanes::N) {
                float * x = logits + (size_t) j * n_q + q;
                lanes::store(x,
                    exp2<lanes>(
                        lanes::add(more, lanes::sub(lanes::load(x), lanes::load(&total[q])))));
            }
        add_weighted(logits, values, m, n_q, h.d_v, out.data());
    }

    // key and value of a group's rows under its attention, averaged; the square of the longest key
    float averages(
        int g, const float * share, workspace & w, float * key, float * value, floats & out) const {
        // of all attention the group has a part, of that part its rows have theirs
        floats in_group(n_q);
        const float more = std::log2(h.each);
        for (int q = 0; q < n_q; ++q)
            in_group[q] =
                share[q] * std::exp2(std::min(total[q] - more - own[(size_t) g * n_q + q], MOST));
        float longest = 0;
        std::fill_n(key, d, 0.0f);
        std::fill_n(value, h.d_v, 0.0f);
        meet(h.keys, h.values, &order[begin[g]], begin[g + 1] - begin[g], w,
            [&](int m, const float * keys, const float * values, float * logits) {
                attend(logits, values, m, h.each, out);
                for (int j = 0; j < m; ++j) {
                    reg sum = lanes::set(0.0f);
                    for (int q = 0; q < n_q; q += lanes::N)
                        sum = lanes::fma(lanes::load(&in_group[q]),
                            lanes::load(logits + (size_t) j * n_q + q), sum);
                    const float weight = sum_of<lanes>(sum);
                    const float * k = keys + (size_t) j * d;
                    longest = std::max(longest, dot(k, k, d));
                    add(key, k, weight, d);
                    add(value, values + (size_t) j * h.d_v, weight, h.d_v);
                }
            });
        return longest;
    }

    // the key near to what it is, whose logits are what a group wants; its error
    float regress(int g, const float * share, const floats & across, const arranged & moments,
        std::vector<uint32_t> & words, float * key) const {
        const int m = h.n_queries;
        const float more = std::log2(h.each);
        const float * sums = &own[(size_t) g * n_q];
        floats weighted(across), square((size_t) d * d);
        for (int i = 0; i < d; ++i)
            for (int q = 0; q < m; ++q) weighted[(size_t) i * m + q] *= share[q];
        moments.multiply(weighted.data(), d, square.data(), words);
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

    // values [n][d_v], moved to where attention over what is kept and them is what it was over all
    void fit(const float * keys, float * values, int n) {
        if (n == 0) return;
        const int m = h.n_queries, d_v = h.d_v;
        floats part((size_t) n * n_q), z(stays);
        std::vector<uint32_t> words;
        asked.multiply(keys, n, part.data(), words);
        for (int g = 0; g < n; ++g)
            for (int q = 0; q < n_q; q += lanes::N) {
                float * to = &part[(size_t) g * n_q + q];
                const reg x = exp2<lanes>(lanes::sub(lanes::load(to), lanes::load(&total[q])));
                lanes::store(to, x);
                lanes::store(&z[q], lanes::add(lanes::load(&z[q]), x));
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
