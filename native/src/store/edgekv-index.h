#pragma once
// The index of an archive: of each KV head all keys in two bits a value, by which a token finds the
// rows that it needs, and groups that stand for the others.

#include "edgekv-layer.h"

#include <cstdint>
#include <vector>

struct edgekv_recalled;

// Of one head. A key less the mean is a number of steps: -3, -1, 1 or 3
class edgekv_index {
public:
    // keys [n, d] of tokens [begin, begin + n), in order; what lay behind `begin` is forgotten. The
    // first ones say what is usual: while they are few, all come again with those that follow
    void put(int64_t begin, int64_t n, int d, const float * keys);
    bool is_judged() const { return n_judged >= ENOUGH; }
    void cut(int64_t n_tokens); // tokens behind these are forgotten
    // the store has the rows of these tokens, of n_tokens that may be recalled
    void set_resident(const std::vector<llama_pos> & pos, int64_t n_tokens);
    // groups of those that it has not; a: shape and rows. Takes a thread some time
    void group(const edgekv_recalled & a);
    // fills in what a token looks for, but rows and shape; share: of the tokens to recall
    void fill(edgekv_recalled & a, float share) const;
    size_t n_bytes() const;

private:
    static constexpr int64_t ENOUGH = 64;             // keys that say what is usual
    static constexpr int MOST_GROUPS = 64, EACH = 64; // a group for so many tokens

    int d = 0;
    int64_t n = 0, n_judged = 0; // tokens; those whose mean and deviation the steps are
    std::vector<float> mean, step;
    std::vector<uint8_t> codes, label;
    std::vector<ggml_fp16_t> group_k, group_v;
    std::vector<int32_t> members;
};
