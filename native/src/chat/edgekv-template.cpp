#include "edgekv-template.h"

#include "jinja/lexer.h"

#include <cstring>
#include <stdexcept>

// Of the templates that llama.cpp is tested with, one block has 58 tokens and 4 brackets within
// each other at most, and 10 statements stand within each other.
static constexpr size_t BYTES_MOST = 1u << 20;
static constexpr int TOKENS_MOST = 1000, BRACKETS_MOST = 60, STATEMENTS_MOST = 60;

static bool opens(const std::string & word) {
    for (const char * name : { "if", "for", "macro", "filter", "call", "set", "generation" }) {
        if (word == name) return true;
    }
    return false;
}

void edgekv_chat_check_template(const std::string & text) {
    using jinja::token;
    if (text.size() > BYTES_MOST) throw std::invalid_argument("it is longer than a MiB");
    jinja::lexer lexer;
    const auto found = lexer.tokenize(text);
    int n_tokens = 0, n_brackets = 0, n_statements = 0;
    bool is_first = false, is_set = false;
    for (const auto & one : found.tokens) {
        ++n_tokens;
        switch (one.t) {
            case token::open_statement: is_first = true; [[fallthrough]];
            case token::open_expression: n_tokens = n_brackets = 0; break;
            case token::open_paren:
            case token::open_square_bracket:
            case token::open_curly_bracket: ++n_brackets; break;
            case token::close_paren:
            case token::close_square_bracket:
            case token::close_curly_bracket: --n_brackets; break;
            case token::text: n_tokens = 0; break;
            case token::equals: // a set that is no block
                n_statements -= is_set;
                is_set = false;
                break;
            case token::identifier:
                if (is_first) {
                    is_set = one.value == "set";
                    n_statements += opens(one.value);
                    n_statements -= one.value.compare(0, 3, "end") == 0;
                    is_first = false;
                }
                break;
            default: break;
        }
        if (n_tokens > TOKENS_MOST || n_brackets > BRACKETS_MOST || n_statements > STATEMENTS_MOST)
            throw std::invalid_argument("its parts stand too deep within each other");
    }
}
