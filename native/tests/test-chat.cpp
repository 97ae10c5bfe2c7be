// The C API of chats, with texts that are damaged at random: every call ends, with a status.
//     test-chat MODEL [seed] [number of texts] [template files]
#include "check.h"
#include "edgekv-chat.h"

#include "llama.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

const char * const REQUEST = R"({"messages": [{"role": "system", "content": "Be kind."},
{"role": "user", "content": "abc"}, {"role": "assistant", "content": null, "tool_calls": [
{"type": "function", "id": "a1b2c3d4e", "function": {"name": "add", "arguments": "{\"n\": 1}"}}]},
{"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": "2"},
{"role": "user", "content": "def"}], "tools": [{"type": "function", "function": {"name": "add",
"description": "x", "parameters": {"type": "object", "properties": {"n": {"type": "integer"},
"unit": {"enum": ["C", "F"]}}, "required": ["n"]}}}], "tool_choice": "auto"})";
const char * const SCHEMA = R"({"type": "object", "properties": {"a": {"type": "string",
"minLength": 1, "maxLength": 9}, "b": {"type": "array", "items": {"$ref": "#/$defs/x"},
"minItems": 2}, "c": {"anyOf": [{"const": 1}, {"type": "number"}]}, "d": {"type": "string",
"pattern": "^[a-c]{2,3}(x|y)?$"}, "e": {"type": "integer", "minimum": -12, "maximum": 345}},
"required": ["a"], "$defs": {"x": {"enum": ["p", null, 2]}}, "additionalProperties": false})";
const char * const GRAMMAR = "root ::= \"{\" ws (item (\",\" ws item){0,3})? \"}\" # end\n"
                             "item ::= [a-z]+ \":\" ws ([^\"\\x00-\\x1f] | \"\\u00e9\")* \n"
                             "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";
const char * const TEMPLATE =
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}";
const char * const SETTINGS =
    R"({"seed": 1, "temperature": 0.8, "top_k": 40, "samplers": ["top_k", "min_p", "temperature"],
"logit_bias": {"5": 1.5, "6": false}, "grammar": "root ::= [a-z]*", "grammar_lazy": true,
"grammar_triggers": [{"type": 1, "value": "<tool_call>"}], "dry_multiplier": 0.5})";
const char * const WRITTEN[] = {
    "hello <tool_call>\n{\"name\": \"add\", \"arguments\": {\"n\": 1}}\n</tool_call>",
    "<think>why</think>[TOOL_CALLS]add[ARGS]{\"n\": 1}",
    "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=functions.add"
    "<|message|>{\"n\": 1}<|call|>",
    "<tool_call>\n<function=add>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
};

// some letters are changed, left out, doubled or taken from elsewhere
std::string damaged(random_source & rnd, std::string text) {
    static const std::vector<std::string> pieces = { "\"", "{", "}", "[", "]", "\\", "::=", "null",
        "1e999", "\xff", "\xc3", std::string(1, '\0'), "{% ", " %}", "{{", "</", ">", "(", ")*",
        "{0,}", "99999999999", "-1" };
    for (int i = rnd.range(1, 4); i > 0 && !text.empty(); --i) {
        const size_t at = rnd.below((int) text.size());
        switch (rnd.below(4)) {
            case 0: text.insert(at, pieces[rnd.below((int) pieces.size())]); break;
            case 1: text.erase(at, rnd.range(1, 12)); break;
            case 2: text.insert(at, text.substr(rnd.below((int) text.size()), 20)); break;
            default: text.resize(at); break;
        }
    }
    return text;
}

// gives back what a call made; out of a call that fails comes nothing, but a reason
std::string ended(int status, char * out) {
    const char * error = edgekv_chat_error();
    check(status == 0 ? out != nullptr : status < 0 && error && *error,
        "status %d without a reason", status);
    const std::string text = out ? out : "";
    edgekv_chat_free(out);
    return text;
}

// the field "parser" of an application, which stands last in no order that we know
std::string parser_of(const std::string & applied) {
    const size_t at = applied.find("\"parser\":{");
    if (at == std::string::npos) return "{}";
    int depth = 0;
    bool in_text = false;
    for (size_t i = at + strlen("\"parser\":"); i < applied.size(); ++i) {
        const char c = applied[i];
        if (in_text && c == '\\') {
            ++i;
        } else if (c == '"') {
            in_text = !in_text;
        } else if (!in_text && (c == '{' || c == '}') && (depth += c == '{' ? 1 : -1) == 0) {
            return applied.substr(at + strlen("\"parser\":"), i + 1 - at - strlen("\"parser\":"));
        }
    }
    return "{}";
}

void check_parser(random_source & rnd, const std::string & syntax, int n) {
    edgekv_chat_parser * parser = nullptr;
    if (!check(edgekv_chat_parser_open(syntax.c_str(), &parser) == 0, "%s", edgekv_chat_error()))
        return;
    for (int i = 0; i < n; ++i) {
        const std::string text = damaged(rnd, rnd.one_of(WRITTEN));
        char * out = nullptr;
        const int status =
            edgekv_chat_parse(parser, text.data(), text.size(), rnd.below(2) == 0, &out);
        ended(status, out);
    }
    edgekv_chat_parser_close(parser);
    edgekv_chat_parser * none = nullptr;
    ended(
        edgekv_chat_parser_open(damaged(rnd, syntax.substr(0, 4000)).c_str(), &none), strdup("x"));
    edgekv_chat_parser_close(none);
}

void check_template(random_source & rnd, const std::string & text, int n) {
    edgekv_chat_template * tmpl = nullptr;
    if (!check(edgekv_chat_template_open(nullptr, text.c_str(), "<s>", "</s>", &tmpl) == 0,
            "template: %s", edgekv_chat_error()))
        return;
    char * out = nullptr;
    int status = edgekv_chat_template_about(tmpl, &out);
    check(!ended(status, out).empty(), "nothing about a template");
    out = nullptr;
    status = edgekv_chat_template_apply(tmpl, REQUEST, &out);
    const std::string applied = ended(status, out);
    if (status == 0) check_parser(rnd, parser_of(applied), n); // some know no tools' results
    for (int i = 0; i < n; ++i) {
        out = nullptr;
        status = edgekv_chat_template_apply(tmpl, damaged(rnd, REQUEST).c_str(), &out);
        ended(status, out);
    }
    edgekv_chat_template_close(tmpl);
}

void check_damaged_templates(random_source & rnd, const std::string & text, int n) {
    for (int i = 0; i < n; ++i) {
        edgekv_chat_template * tmpl = nullptr;
        const std::string one = damaged(rnd, text);
        if (edgekv_chat_template_open(nullptr, one.c_str(), "", "", &tmpl) != 0) continue;
        char * out = nullptr;
        const int status = edgekv_chat_template_apply(tmpl, REQUEST, &out);
        ended(status, out);
        edgekv_chat_template_close(tmpl);
    }
}

void check_grammars(random_source & rnd, const llama_model * model, int n) {
    char * out = nullptr;
    int status = edgekv_chat_schema(SCHEMA, &out);
    const std::string grammar = ended(status, out);
    check(edgekv_chat_check_grammar(model, grammar.c_str()) == 0, "%s", edgekv_chat_error());
    for (int i = 0; i < n; ++i) {
        out = nullptr;
        status = edgekv_chat_schema(damaged(rnd, SCHEMA).c_str(), &out);
        const std::string made = ended(status, out);
        if (status == 0) edgekv_chat_check_grammar(model, made.c_str());
        const std::string text = damaged(rnd, rnd.below(2) ? std::string(GRAMMAR) : grammar);
        status = edgekv_chat_check_grammar(model, text.c_str());
        check(status == 0 || *edgekv_chat_error(), "a grammar is refused without a reason");
    }
}

void check_samplers(random_source & rnd, const llama_model * model, int n) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<float> logits(n_vocab);
    for (int i = 0; i < n; ++i) {
        edgekv_chat_sampler * sampler = nullptr;
        const std::string settings = i == 0 ? SETTINGS : damaged(rnd, SETTINGS);
        const int status = edgekv_chat_sampler_open(model, settings.c_str(), nullptr, &sampler);
        check(status == 0 || (i > 0 && *edgekv_chat_error()), "settings: %s", edgekv_chat_error());
        if (status != 0) continue;
        for (int k = 0; k < 8; ++k) {
            for (float & x : logits) x = rnd.normal();
            llama_token token = -1;
            if (edgekv_chat_sampler_draw(sampler, logits.data(), &token) != 0) break;
            check(token >= 0 && token < n_vocab, "token %d", token);
            llama_token likely[4] = { -1, -1, -1, -1 };
            float p[4] = { 0, 0, 0, 0 };
            size_t n = 0;
            check(edgekv_chat_sampler_candidates(sampler, likely, p, 4, &n) == 0 && n > 0,
                "candidates: %s", edgekv_chat_error());
            for (size_t j = 0; j < std::min<size_t>(n, 4); ++j) {
                check(likely[j] >= 0 && likely[j] < n_vocab && (j == 0 || p[j] <= p[j - 1]),
                    "candidate %d", likely[j]);
            }
        }
        edgekv_chat_sampler_close(sampler);
    }
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2) return printf("test-chat MODEL [seed] [number of texts] [template files]\n"), 2;
    random_source rnd(argc > 2 ? (uint32_t) atoi(argv[2]) : 0);
    const int n = argc > 3 ? atoi(argv[3]) : 100;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    auto params = llama_model_default_params();
    params.vocab_only = true;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!check(model != nullptr, "%s cannot be loaded", argv[1])) return finish();
    check_template(rnd, TEMPLATE, n);
    check_damaged_templates(rnd, TEMPLATE, n);
    check_grammars(rnd, model, n);
    check_samplers(rnd, model, n);
    for (int i = 4; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        const std::string text { std::istreambuf_iterator<char>(file), {} };
        check_template(rnd, text, n / 10 + 1);
        check_damaged_templates(rnd, text, n / 10 + 1);
    }
    llama_model_free(model);
    return finish();
}
