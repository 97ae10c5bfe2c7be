#pragma once
// How long a grammar may think about a token: of one with many ways to the same text, each letter
// multiplies them. llama.cpp's grammars (src/llama-grammar.cpp) call these.

#include "edgekv.h"

#include <chrono>
#include <cstddef>
#include <stdexcept>

struct edgekv_grammar_clock {
    static constexpr int seconds = 1; // of 150,000 tokens and 30 tools' schemas: 0.05

    int depth = 0; // 0: nobody has said when it began
    size_t steps = 0;
    bool * stop = nullptr; // set by whoever waits no longer
    std::chrono::steady_clock::time_point until {};

    // std::length_error: others would pass for a token that does not fit
    void step() {
        if (depth == 0 || ++steps % 64) return;
        if (stop && edgekv_is_set(stop)) throw std::length_error("the grammar was stopped");
        if (std::chrono::steady_clock::now() > until)
            throw std::length_error(
                "the grammar takes too long: it has too many ways to write the same text");
    }
};

inline thread_local edgekv_grammar_clock edgekv_grammar;

// one question to a grammar, or several that have a second together
struct edgekv_grammar_question {
    edgekv_grammar_question() { edgekv_grammar_begin(nullptr); }
    ~edgekv_grammar_question() { edgekv_grammar_end(); }
    edgekv_grammar_question(const edgekv_grammar_question &) = delete;
    edgekv_grammar_question & operator=(const edgekv_grammar_question &) = delete;
};
