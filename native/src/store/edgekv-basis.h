#pragma once
// The basis in which a layer's keys are quantised. No softmax changes by it: queries are divided by
// what keys are multiplied by, and a vector that is taken from all keys of a head adds the same to
// each of a query's logits. Which basis it is changes only how well rows are stored.
//
// Scale. A rotated row spreads the rounding error of a block over all of its values alike, so a
// value that queries hardly look at costs as much as one that decides. With keys times sqrt(q / k)
// and queries divided by it, where q and k say how large values of queries and keys are, the error
// of a logit is least. SmoothQuant (arXiv 2211.10438) moves sizes between weights and activations
// so; here q and k follow from the weights, because the scale has to be the same for rows that
// come later: from the weights of the norms of queries and keys, or from their biases, beside
// which tokens add values of about 1. Pairs that positions turn have one scale.
//
// Centre. A bias of the keys can be many times larger than what the tokens add to it. Quantised
// caches take the mean of the bias, as the positions turn it, over the first POSITIONS tokens;
// pairs of values that turn fast have a mean near 0. SageAttention (arXiv 2410.02367) takes the
// mean of a prompt's keys from them for products in 8 bits.
//
// A stored key is H (scale * key) - centre, with the Walsh-Hadamard matrix H of llama.cpp's
// quantised caches. A whole key is H key, as llama.cpp stores it.

#include "edgekv-matrix.h"
#include "cpu/edgekv-cpu.h"

#include <memory>
#include <vector>

struct edgekv_layer;
struct llama_cparams;
struct llama_model;

struct edgekv_basis {
    // of the positions over which the bias is averaged: shorter texts lose little by it, longer
    // ones as well
    static constexpr int POSITIONS = 8192;
    // of a scale and its inverse: weights may say anything, and keys have to stay halves
    static constexpr float MOST = 32;

    int turn = 0;                     // size of the Walsh-Hadamard matrix, 0: none
    std::vector<float> scale, centre; // [n_head_kv, d_k], or empty
    // the same where the layer's rows are, F32 [d_k, n_head_kv], and 1/scale [d_k, n_head]
    edgekv_matrix key_scale, query_scale, key_centre;

    // null: keys are not quantised, or the weights say nothing of their sizes. There is no centre
    // where the softmax knows more than the keys: a cap of the logits, or a sink. throws
    // std::bad_alloc
    static std::shared_ptr<const edgekv_basis> make(
        const llama_model & model, const llama_cparams & c, const edgekv_layer & l, int turn);

    // what makes whole keys of those of a head
    edgekv_key_basis of(int head, int d) const;
};

// what makes whole keys of those of a layer's head; nothing, if they are
edgekv_key_basis edgekv_basis_of(const edgekv_layer & l, int head);

// n keys of a head, one after another, from whole ones to what is stored, and back
void edgekv_store_keys(const edgekv_layer & l, int head, int64_t n, float * keys);
void edgekv_whole_keys(const edgekv_layer & l, int head, int64_t n, float * keys);
