// Messages to a prompt, and a model's text to a message.
#include "edgekv-guard.h"
#include "edgekv-jinja.h"
#include "edgekv-template.h"

#include "chat.h"
#include "log.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

struct edgekv_chat_template {
    common_chat_templates_ptr templates;
};

struct edgekv_chat_parser {
    common_chat_parser_params params;
};

// Nothing of `common` is printed; its logger, which has a thread, is never made.
static const bool g_is_quiet = [] {
    common_log_set_verbosity_thold(-1);
    return true;
}();

int edgekv_chat_template_open(const llama_model * model, const char * text, const char * bos,
    const char * eos, edgekv_chat_template ** out) {
    return edgekv_chat_guard([&] {
        edgekv_chat_given(out);
        const std::string given = text ? text : "";
        if (!model && given.empty()) throw std::invalid_argument("there is no template");
        edgekv_chat_check_template(given);
        for (const char * name : { (const char *) nullptr, "tool_use" }) {
            const char * own = given.empty() ? llama_model_chat_template(model, name) : nullptr;
            if (own) edgekv_chat_check_template(own);
        }
        edgekv_jinja.begin(0);
        auto made = std::make_unique<edgekv_chat_template>();
        made->templates = common_chat_templates_init(model, given, bos ? bos : "", eos ? eos : "");
        *out = made.release();
    });
}

void edgekv_chat_template_close(edgekv_chat_template * tmpl) { delete tmpl; }

int edgekv_chat_template_about(const edgekv_chat_template * tmpl, char ** out) {
    return edgekv_chat_give(out, [&] {
        const auto * templates = edgekv_chat_given(tmpl)->templates.get();
        const common_json about {
            { "source", common_chat_templates_source(templates) },
            { "caps", common_chat_templates_get_caps(templates) },
        };
        return about.dump_safe();
    });
}

static common_chat_templates_inputs inputs_of(const common_json & request) {
    common_chat_templates_inputs in;
    in.messages = common_chat_msgs_parse_oaicompat(request.at("messages"));
    in.tools = common_chat_tools_parse_oaicompat(request.value("tools", common_json()));
    in.tool_choice = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    in.parallel_tool_calls = request.value("parallel_tool_calls", false);
    if (request.contains("json_schema")) in.json_schema = request.at("json_schema").dump();
    in.grammar = request.value("grammar", "");
    in.add_generation_prompt = request.value("add_generation_prompt", true);
    if (request.contains("continue_final_message"))
        in.continue_final_message =
            common_chat_continuation_parse(request.at("continue_final_message"));
    in.reasoning_format =
        common_reasoning_format_from_name(request.value("reasoning_format", "auto"));
    in.enable_thinking = request.value("enable_thinking", true);
    in.force_pure_content = request.value("plain", false);
    const auto variables = request.value("chat_template_kwargs", common_json::object());
    for (const auto & [name, value] : variables.items()) {
        in.chat_template_kwargs[name] = value.dump();
    }
    return in;
}

static common_json triggers_of(const common_chat_params & made) {
    auto triggers = common_json::array();
    for (const auto & trigger : made.grammar_triggers) {
        triggers.push_back({ { "type", (int) trigger.type }, { "value", trigger.value } });
    }
    return triggers;
}

int edgekv_chat_template_apply(
    const edgekv_chat_template * tmpl, const char * request, char ** out) {
    return edgekv_chat_give(out, [&] {
        const auto * templates = edgekv_chat_given(tmpl)->templates.get();
        edgekv_jinja.begin(strlen(edgekv_chat_given(request)));
        const auto in = inputs_of(common_json::parse(request));
        const auto made = common_chat_templates_apply(templates, in);
        const common_json parser {
            { "format", (int) made.format },
            { "parser", made.parser },
            { "generation_prompt", made.generation_prompt },
            { "reasoning_format", common_reasoning_format_name(in.reasoning_format) },
            { "is_continuation", in.continue_final_message != COMMON_CHAT_CONTINUATION_NONE },
        };
        const common_json said {
            { "prompt", made.prompt },
            { "generation_prompt", made.generation_prompt },
            { "grammar", made.grammar },
            { "grammar_lazy", made.grammar_lazy },
            { "grammar_triggers", triggers_of(made) },
            { "preserved_tokens", made.preserved_tokens },
            { "additional_stops", made.additional_stops },
            { "thinking_start_tag", made.thinking_start_tag },
            { "thinking_end_tags", made.thinking_end_tags },
            { "parser", parser },
        };
        return said.dump_safe();
    });
}

int edgekv_chat_parser_open(const char * parser, edgekv_chat_parser ** out) {
    return edgekv_chat_guard([&] {
        edgekv_chat_given(out);
        const auto said = common_json::parse(edgekv_chat_given(parser));
        const int format = said.at("format").get<int>();
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT)
            throw std::invalid_argument("there is no such format");
        auto made = std::make_unique<edgekv_chat_parser>();
        auto & params = made->params;
        params.format = (common_chat_format) format;
        params.generation_prompt = said.value("generation_prompt", "");
        params.reasoning_format =
            common_reasoning_format_from_name(said.value("reasoning_format", "auto"));
        params.is_continuation = said.value("is_continuation", false);
        const std::string arena = said.value("parser", "");
        if (!arena.empty()) params.parser.load(arena);
        *out = made.release();
    });
}

void edgekv_chat_parser_close(edgekv_chat_parser * parser) { delete parser; }

// llama.cpp shows what it can of a beginning that will never be right, and other things a letter
// later.
static bool may_become_right(const common_chat_parser_params & params, const std::string & text) {
    if (params.parser.empty()) return true;
    common_peg_parse_context context(
        params.generation_prompt + text, COMMON_PEG_PARSE_FLAG_LENIENT);
    return !params.parser.parse(context).fail();
}

int edgekv_chat_parse(const edgekv_chat_parser * parser, const char * text, size_t n_bytes,
    bool is_partial, char ** out) {
    return edgekv_chat_give(out, [&] {
        const auto & params = edgekv_chat_given(parser)->params;
        const std::string written(edgekv_chat_given(text), n_bytes);
        if (is_partial && !may_become_right(params, written))
            throw std::invalid_argument("no text that begins so has the template's format");
        const auto message = common_chat_parse(written, is_partial, params);
        auto calls = common_json::array();
        for (const auto & call : message.tool_calls) {
            calls.push_back({
                { "name", call.name },
                { "arguments", call.arguments },
                { "id", call.id },
            });
        }
        const common_json said {
            { "content", message.content },
            { "reasoning_content", message.reasoning_content },
            { "tool_calls", calls },
        };
        return said.dump_safe();
    });
}
