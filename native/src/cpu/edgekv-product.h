#pragma once
// Products of a weight with many tokens: dst[t][r] = sum over i of w[r][i] x[t][i].
// llama.cpp unpacks each block of a quantised weight for a few tokens, in 8 bits. Here P rows of
// the weight are unpacked once, into words that lie as the kernel reads them, and meet all tokens
// while they are in the nearest cache. Which thread has which rows changes no result.

#include "edgekv-aligned.h"
#include "edgekv-multiply-levels.h"
#include "edgekv-multiply.h"
#include "edgekv-tiles.h"
#include "edgekv-unpack.h"
#include "edgekv-words.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace edgekv {

// W: edgekv-words.h; R: the weight's rows
template <class W, class R = weight_rows>
struct product {
    static constexpr int P = W::N * W::VECTORS; // rows of the weight at once
    // Words of a row that are added up before results go to memory. A panel's stay in the nearest
    // cache, of levels in the second: results are in registers until then, and rows of them whose
    // distance is a power of two may meet in a set of the nearest cache. Tiles have theirs in
    // registers until the end.
    static constexpr int OF_BLOCK = W::SCALES + W::BLOCK, OF_SPAN = OF_BLOCK * W::SPAN;
    static constexpr int BYTES = W::LEVELS ? 128 << 10 : 20 << 10;
    static constexpr int STEP = W::TILES ? INT32_MAX
        : W::SCALES                      ? BYTES / (P * 4) / OF_SPAN * OF_SPAN
                                         : 512;
    // Bytes of panels that meet a group of tokens one after the other, in the second cache; the
    // group's sums stay there until they are complete. Other words have one panel for all tokens.
    static constexpr size_t NEAR = W::TILES ? 1u << 20 : W::SCALES ? 1u << 19 : 0;
    static constexpr int GROUP = W::TILES ? W::ROWS
        : W::SCALES                       ? (32 + W::ROWS - 1) / W::ROWS * W::ROWS
                                          : INT32_MAX;
    // words between tokens: else they meet in a cache
    static constexpr int GAP = W::LEVELS ? 0 : 16;

    R w;
    int n_in, n_rows, n_tokens;
    const float * x; // [n_tokens][n_in]
    float * dst;     // [n_tokens][n_rows]
    uint32_t * words;
    // null, or of each token its row of dst, with `share` of which it has a row of x
    const int32_t * at = nullptr;
    int share = 1;

    struct workspace {
        aligned_floats rows, words, panel;
    };

    static int n_words(int n_in) { return W::n_words(n_in); }
    static size_t stride(int n_in) { return n_words(n_in) + GAP; }
    // tokens are filled up to whole blocks of W::ROWS
    static size_t n_all_words(int n_in, int n_tokens) {
        return (size_t) (n_tokens + W::ROWS - 1) / W::ROWS * W::ROWS * stride(n_in);
    }

    // part ith of nth of the tokens as words; those that fill up are the last again
    void make_words(int ith, int nth) const {
        const int n_all = (n_tokens + W::ROWS - 1) / W::ROWS * W::ROWS;
        const size_t step = stride(n_in);
        for (int t = ith; t < n_all; t += nth) {
            const int token = std::min(t, n_tokens - 1), r = t % W::ROWS;
            const float * from = x + (size_t) (at ? at[token] / share : token) * n_in;
            uint32_t * to = words + (t - r) * step;
            if constexpr (W::LEVELS) W::row(from, n_in, to + r * OF_BLOCK, W::ROWS * OF_BLOCK);
            else W::row(from, n_in, to + r * step);
        }
    }

    // rows [r0, r0 + P) as [n_words][P], those beyond the last as 0
    void make_panel(workspace & s, int r0, uint32_t * panel) const {
        const int n = n_words(n_in), n_here = std::min(P, n_rows - r0);
        auto * words = (uint32_t *) s.words.get((size_t) P * n);
        for (int r = 0; r < n_here; r += R::AT_ONCE) {
            const int n_got = std::min<int>(R::AT_ONCE, n_here - r);
            uint32_t * to = words + (size_t) r * n;
            if constexpr (W::LEVELS) w.levels(r0 + r, n_got, n_in, (weight_block *) to);
            else {
                float * rows = s.rows.get((size_t) R::AT_ONCE * n_in);
                w.unpack(r0 + r, n_got, n_in, rows);
                for (int i = 0; i < n_got; ++i)
                    W::row(rows + (size_t) i * n_in, n_in, to + (size_t) i * n);
            }
        }
        memset(words + (size_t) n_here * n, 0, (size_t) (P - n_here) * n * sizeof(*words));
        turn(words, n, panel);
    }

    // [P][n] to [n][P], square by square
    static void turn(const uint32_t * from, int n, uint32_t * to) {
        constexpr int B = 16;
        for (int k = 0; k < n; k += B) {
            const int m = std::min(B, n - k);
            for (int r = 0; r < P; r += B) {
                if (P % B == 0 && m == B) {
                    turn_16(from + (size_t) r * n + k, n, to + (size_t) k * P + r, P);
                    continue;
                }
                for (int i = 0; i < m; ++i)
                    for (int j = 0; j < std::min(B, P - r); ++j)
                        to[(size_t) (k + i) * P + r + j] = from[(size_t) (r + j) * n + k + i];
            }
        }
    }

    // words [k, k + n) of a block of tokens with a panel; begins the sums, or adds to them
    void block(const uint32_t * panel, int r0, int t0, int k, int n) const {
        const size_t step = stride(n_in);
        const uint32_t * b = panel + (size_t) k * P;
        const uint32_t * a = words + t0 * step + k * (W::LEVELS ? W::ROWS : 1);
        float * to = dst + (size_t) t0 * n_rows + r0;
        const int n_t = std::min<int>(W::ROWS, n_tokens - t0), n_r = std::min(P, n_rows - r0);
        const bool whole = n_t == W::ROWS && n_r == P && !at;
        float sums[W::ROWS][P];
        float * s = whole ? to : sums[0];
        const size_t s_row = whole ? n_rows : P;
#if EDGEKV_TILES
        if constexpr (W::TILES) {
            multiply_tiles(a, step, 16, b, P, n, s, s_row);
        } else
#endif
            if constexpr (W::LEVELS) {
            multiply_levels<W, W::ROWS, W::VECTORS>(a, b, n, s, s_row, whole && k);
        } else {
            const auto f = whole && k ? multiply<W, W::ROWS, W::VECTORS, true>
                                      : multiply<W, W::ROWS, W::VECTORS, false>;
            f(a, step, 1, b, n, s, s_row);
        }
        if (whole) return;
        for (int t = 0; t < n_t; ++t) {
            to = dst + (size_t) (at ? at[t0 + t] : t0 + t) * n_rows + r0;
            if (k == 0) memcpy(to, sums[t], n_r * sizeof(float));
            else
                for (int r = 0; r < n_r; ++r) to[r] += sums[t][r];
        }
    }

    static size_t n_panels(int n_rows) { return (n_rows + P - 1) / P; }
    static size_t panel_size(int n_in) { return (size_t) P * n_words(n_in); }

    // panels that lie side by side: as many as are near, but every thread shall have some, and no
    // thread much more than another
    int panels_at_once(int nth) const {
        const int n = (int) n_panels(n_rows),
                  near = (int) (NEAR / (panel_size(n_in) * sizeof(uint32_t)));
        int many = std::min(near, (n + 4 * nth - 1) / (4 * nth));
        const auto turns = [&] { return ((n + many - 1) / many + nth - 1) / nth; };
        while (many > 1 && turns() * nth * many > n + n / 32) --many;
        return std::max(many, 1);
    }

    int n_groups(int nth) const {
        const int many = panels_at_once(nth);
        return ((int) n_panels(n_rows) + many - 1) / many;
    }

    // Brings memory to the second cache, a piece each time: it is farther away than the processor
    // looks ahead.
    struct nearing {
        const char *at, *end;
        size_t n_each; // bytes, up to whole lines
        void go_on() {
#if defined(__GNUC__)
            for (size_t i = 0; i < n_each && at < end; i += LINE, at += LINE)
                __builtin_prefetch(at, 0, 2);
#endif
        }
    };
    // panels that a thread is likely to take next, in pieces for each block of the group before
    nearing next_panels(const uint32_t * kept, int group, int many) const {
        const size_t size = panel_size(n_in), n_all = n_panels(n_rows);
        const size_t first = std::min((size_t) group * many, n_all),
                     last = std::min(first + many, n_all);
        const size_t n_blocks = (size_t) (n_tokens + W::ROWS - 1) / W::ROWS * many;
        const auto * begin = (const char *) (kept + first * size);
        const auto * end = (const char *) (kept + last * size);
        return { begin, end, (size_t) (end - begin) / n_blocks + 1 };
    }

    // Groups of panels are taken by whoever is free. kept: null, or [n_panels] where they stay, and
    // are already if `ready`
    void run(workspace & s, std::atomic<int32_t> & next, int nth, uint32_t * kept = nullptr,
        bool ready = false) const {
        int taken = next++;
        run_after(0, s, next, taken, nth, kept, ready);
    }

    // ... behind those of other products, `before` in number; taken: this thread's group
    void run_after(int before, workspace & s, std::atomic<int32_t> & next, int & taken, int nth,
        uint32_t * kept, bool ready) const {
        [[maybe_unused]] const typename W::scope scope;
        const int n = n_words(n_in), n_all = (int) n_panels(n_rows), many = panels_at_once(nth);
        const size_t size = panel_size(n_in);
        for (; taken < before + n_groups(nth); taken = next++) {
            const int first = (taken - before) * many, n_here = std::min(many, n_all - first);
            auto * panels = kept ? kept + first * size : (uint32_t *) s.panel.get(size * many);
            for (int i = 0; i < n_here && !ready; ++i)
                make_panel(s, (first + i) * P, panels + i * size);
            nearing soon {};
            if (ready) soon = next_panels(kept, taken - before + nth, many);
            for (int t0 = 0; t0 < n_tokens; t0 += GROUP)
                for (int k = 0; k < n; k += STEP)
                    for (int i = 0; i < n_here; ++i)
                        for (int t = t0; t < std::min(t0 + GROUP, n_tokens); t += W::ROWS) {
                            soon.go_on();
                            block(panels + i * size, (first + i) * P, t, k, std::min(STEP, n - k));
                        }
        }
    }
};

} // namespace edgekv
