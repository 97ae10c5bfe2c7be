// How the next token is drawn: llama.cpp's samplers in llama.cpp's order, and a grammar.
//
// The grammar is asked about the token that was drawn, and only where it refuses is it applied to
// all tokens, as llama.cpp's common_sampler does: a vocabulary of 150,000 tokens takes
// milliseconds. common_sampler itself is not used for the grammar, because a token that its grammar
// refuses would end the process, and a lazy grammar that its trigger's own token breaks would end
// the answer.
#include "edgekv-guard.h"

#include "common.h"
#include "reasoning-budget.h"
#include "sampling.h"

#include <cctype>
#include <climits>
#include <cmath>
#include <memory>
#include <vector>

namespace {

struct free_sampler {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};
using sampler_ptr = std::unique_ptr<llama_sampler, free_sampler>;

template <typename T>
void read(const common_json & settings, const char * name, T & value) {
    if (settings.contains(name)) value = settings.at(name).get<T>();
}

common_params_sampling params_of(const common_json & settings) {
    common_params_sampling p;
    read(settings, "seed", p.seed);
    read(settings, "min_keep", p.min_keep);
    read(settings, "temperature", p.temp);
    read(settings, "dynatemp_range", p.dynatemp_range);
    read(settings, "dynatemp_exponent", p.dynatemp_exponent);
    read(settings, "top_k", p.top_k);
    read(settings, "top_p", p.top_p);
    read(settings, "min_p", p.min_p);
    read(settings, "top_n_sigma", p.top_n_sigma);
    read(settings, "xtc_probability", p.xtc_probability);
    read(settings, "xtc_threshold", p.xtc_threshold);
    read(settings, "typical_p", p.typ_p);
    read(settings, "repeat_last_n", p.penalty_last_n);
    read(settings, "repeat_penalty", p.penalty_repeat);
    read(settings, "frequency_penalty", p.penalty_freq);
    read(settings, "presence_penalty", p.penalty_present);
    read(settings, "dry_multiplier", p.dry_multiplier);
    read(settings, "dry_base", p.dry_base);
    read(settings, "dry_allowed_length", p.dry_allowed_length);
    read(settings, "dry_penalty_last_n", p.dry_penalty_last_n);
    read(settings, "dry_sequence_breakers", p.dry_sequence_breakers);
    read(settings, "mirostat", p.mirostat);
    read(settings, "mirostat_tau", p.mirostat_tau);
    read(settings, "mirostat_eta", p.mirostat_eta);
    read(settings, "adaptive_target", p.adaptive_target);
    read(settings, "adaptive_decay", p.adaptive_decay);
    if (p.mirostat < 0 || p.mirostat > 2) throw std::invalid_argument("mirostat is 0, 1 or 2");
    if (settings.contains("samplers"))
        p.samplers = common_sampler_types_from_names(
            settings.at("samplers").get<std::vector<std::string>>());
    const auto biases = settings.value("logit_bias", common_json::object());
    for (const auto & [token, bias] : biases.items()) { // false: never
        const float value = bias.is_boolean() ? -INFINITY : bias.get<float>();
        p.logit_bias.push_back({ (llama_token) std::stol(token), value });
    }
    if (p.temp <= 0) { // the likeliest token: nothing else of the chain can change that
        p.temp = 0;
        p.top_k = 1;
        p.mirostat = 0;
        p.samplers = { COMMON_SAMPLER_TYPE_PENALTIES, COMMON_SAMPLER_TYPE_DRY,
            COMMON_SAMPLER_TYPE_TOP_K };
    }
    p.no_perf = true;
    return p;
}

// triggers of a lazy grammar; words that are one token are compared as tokens
struct triggers {
    std::vector<std::string> patterns;
    std::vector<llama_token> tokens;

    triggers(const llama_vocab * vocab, const common_json & settings) {
        for (const auto & one : settings.value("grammar_triggers", common_json::array())) {
            const int type = one.at("type").get<int>();
            const std::string value = one.at("value");
            if (type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
                const auto ids = common_tokenize(vocab, value, false, true);
                if (ids.size() == 1) {
                    tokens.push_back(ids[0]);
                } else {
                    patterns.push_back(regex_escape(value));
                }
            } else if (type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN) {
                patterns.push_back(value);
            } else if (type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL) {
                patterns.push_back("^(" + value + ")$");
            } else {
                throw std::invalid_argument("there is no such trigger");
            }
        }
    }
};

// the tokens that the prompt begins the answer with
llama_tokens begun_by(const llama_vocab * vocab, const std::string & prompt) {
    if (prompt.empty()) return {};
    auto tokens = common_tokenize(vocab, prompt, false, true);
    const auto first = tokens.empty() ? "" : common_token_to_piece(vocab, tokens[0], true);
    // some tokenizers put a blank before the first special token
    if (!first.empty() && std::isspace((unsigned char) first[0]) &&
        !std::isspace((unsigned char) prompt[0]))
        tokens.erase(tokens.begin());
    return tokens;
}

// all that is asked of a grammar while it lives has a second
struct patience {
    explicit patience(bool * stop) { edgekv_grammar_begin(stop); }
    ~patience() { edgekv_grammar_end(); }
    patience(const patience &) = delete;
    patience & operator=(const patience &) = delete;
};

} // namespace

struct edgekv_chat_sampler {
    const llama_vocab * vocab;
    bool * stop;              // may be null
    common_sampler_ptr chain; // without a grammar
    sampler_ptr grammar;      // null: everything is let through
    sampler_ptr budget;       // of thoughts; null: thoughts are not told apart
    bool is_lazy = false;
    std::vector<llama_token_data> all;
    llama_token_data_array some {};

    edgekv_chat_sampler(const llama_model * model, const common_json & settings, bool * stop)
        : vocab(llama_model_get_vocab(model)), stop(stop) {
        const patience asked(stop);
        auto params = params_of(settings);
        const int32_t n_vocab = llama_vocab_n_tokens(vocab);
        for (const auto & bias : params.logit_bias) {
            if (bias.token < 0 || bias.token >= n_vocab)
                throw std::invalid_argument("logit_bias names no token of this model");
        }
        chain.reset(common_sampler_init(model, params));
        all.resize(n_vocab);
        const auto begun = begun_by(vocab, settings.value("generation_prompt", ""));
        open_grammar(settings, begun);
        open_budget(settings, begun);
    }

    void open_grammar(const common_json & settings, const llama_tokens & begun) {
        const std::string text = settings.value("grammar", "");
        if (text.empty()) return;
        is_lazy = settings.value("grammar_lazy", false);
        if (is_lazy) {
            const triggers begin(vocab, settings);
            std::vector<const char *> patterns;
            for (const auto & pattern : begin.patterns) patterns.push_back(pattern.c_str());
            grammar.reset(llama_sampler_init_grammar_lazy_patterns(vocab, text.c_str(), "root",
                patterns.data(), patterns.size(), begin.tokens.data(), begin.tokens.size()));
        } else {
            grammar.reset(llama_sampler_init_grammar(vocab, text.c_str(), "root"));
        }
        if (!grammar) throw std::invalid_argument("this grammar cannot be read");
        if (is_lazy || !settings.value("prefills_grammar", false)) return;
        for (const llama_token token : begun) {
            if (!allows(token))
                throw std::invalid_argument("the grammar does not fit the template");
            llama_sampler_accept(grammar.get(), token);
        }
    }

    // Within a thought a lazy grammar waits: a model may think of a call.
    void open_budget(const common_json & settings, const llama_tokens & begun) {
        const std::string start = settings.value("thinking_start_tag", "");
        std::vector<llama_tokens> ends;
        for (const auto & tag : settings.value("thinking_end_tags", common_json::array())) {
            ends.push_back(common_tokenize(vocab, tag.get<std::string>(), false, true));
        }
        const int32_t most = settings.value("reasoning_budget", -1);
        if (start.empty() || ends.empty() || !((grammar && is_lazy) || most >= 0)) return;
        const auto forced = common_tokenize(vocab,
            settings.value("reasoning_budget_message", "") +
                settings.at("thinking_end_tags").at((size_t) 0).get<std::string>(),
            false, true);
        budget.reset(
            common_reasoning_budget_init(vocab, { common_tokenize(vocab, start, false, true) },
                ends, forced, most < 0 ? INT_MAX : most));
        for (const llama_token token : begun) llama_sampler_accept(budget.get(), token);
    }

    bool decides() const {
        if (!grammar || !is_lazy || !budget) return grammar != nullptr;
        const auto state = common_reasoning_budget_get_state(budget.get());
        return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
    }

    bool allows(llama_token token) const {
        llama_token_data one { token, 1.0f, 0.0f };
        llama_token_data_array array { &one, 1, -1, false };
        llama_sampler_apply(grammar.get(), &array);
        return std::isfinite(one.logit);
    }

    llama_token choose(const float * logits, bool by_grammar) {
        for (size_t i = 0; i < all.size(); ++i) all[i] = { (llama_token) i, logits[i], 0.0f };
        some = { all.data(), all.size(), -1, false };
        if (budget) llama_sampler_apply(budget.get(), &some);
        if (by_grammar) llama_sampler_apply(grammar.get(), &some);
        llama_sampler_apply(common_sampler_get(chain.get()), &some);
        return some.selected < 0 ? llama_vocab_eos(vocab) : some.data[some.selected].id;
    }

    llama_token draw(const float * logits) {
        const patience asked(stop);
        llama_token token = choose(logits, false);
        if (decides() && !allows(token)) {
            token = choose(logits, true);
            // a bias keeps away all that the grammar lets through
            if (!allows(token)) token = llama_vocab_eos(vocab);
            if (token < 0 || !allows(token))
                throw std::runtime_error(
                    "the grammar lets no token through: change it, or logit_bias");
        }
        accept(token);
        return token;
    }

    void accept(llama_token token) {
        const bool decided = decides();
        if (budget) {
            llama_sampler_accept(budget.get(), token);
            // the end of a thought may begin a call
            if (grammar && !decided && decides()) {
                const auto * end = common_reasoning_budget_get_end_match(budget.get());
                for (const llama_token one : end ? *end : llama_tokens()) accept_grammar(one);
            }
        }
        if (decided) accept_grammar(token);
        llama_sampler_accept(common_sampler_get(chain.get()), token);
    }

    // What the token of a trigger has behind it was not checked, and may break the grammar: then
    // the answer goes on without. One that takes too long is no runtime_error.
    void accept_grammar(llama_token token) {
        if (!grammar) return;
        try {
            llama_sampler_accept(grammar.get(), token);
        } catch (const std::runtime_error &) { grammar.reset(); }
    }
};

namespace {

// A copy: the chain's own order says which one was drawn.
std::vector<llama_token_data> likeliest(const llama_token_data_array & some, size_t room) {
    std::vector<llama_token_data> found(some.data, some.data + some.size);
    const auto end = found.begin() + std::min(room, found.size());
    std::partial_sort(found.begin(), end, found.end(),
        [](const llama_token_data & a, const llama_token_data & b) { return a.p > b.p; });
    found.erase(end, found.end());
    return found;
}

} // namespace

int edgekv_chat_sampler_open(
    const llama_model * model, const char * settings, bool * stop, edgekv_chat_sampler ** out) {
    return edgekv_chat_guard([&] {
        edgekv_chat_given(out);
        *out = new edgekv_chat_sampler(
            edgekv_chat_given(model), common_json::parse(edgekv_chat_given(settings)), stop);
    });
}

void edgekv_chat_sampler_close(edgekv_chat_sampler * sampler) { delete sampler; }

int edgekv_chat_sampler_accept(edgekv_chat_sampler * sampler, llama_token token) {
    return edgekv_chat_guard([&] {
        llama_sampler_accept(common_sampler_get(edgekv_chat_given(sampler)->chain.get()), token);
    });
}

int edgekv_chat_sampler_draw(
    edgekv_chat_sampler * sampler, const float * logits, llama_token * out) {
    return edgekv_chat_guard([&] {
        *edgekv_chat_given(out) = edgekv_chat_given(sampler)->draw(edgekv_chat_given(logits));
    });
}

int edgekv_chat_sampler_candidates(const edgekv_chat_sampler * sampler, llama_token * tokens,
    float * probabilities, size_t room, size_t * n) {
    return edgekv_chat_guard([&] {
        const auto & some = edgekv_chat_given(sampler)->some;
        *edgekv_chat_given(n) = some.size;
        size_t i = 0;
        for (const auto & one : likeliest(some, room)) {
            edgekv_chat_given(tokens)[i] = one.id;
            edgekv_chat_given(probabilities)[i++] = one.p;
        }
    });
}
