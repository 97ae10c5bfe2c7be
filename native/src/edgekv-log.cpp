// What llama.cpp logs goes to standard error or nowhere; the first error is remembered for whoever
// has to explain a failure.
#include "edgekv.h"
#include "edgekv-log.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>

namespace {

std::atomic<bool> g_verbose { false };
std::mutex g_mutex;         // of the error
std::string g_logged_error; // the first one, which says most: who called whom comes behind it
int g_n_errors = 0;
thread_local bool t_mute = false;

void log_line(ggml_log_level level, const char * text, void *) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    const bool goes_on = level == GGML_LOG_LEVEL_CONT;
    if (!goes_on) last = level;
    if (last == GGML_LOG_LEVEL_ERROR) {
        try {
            const std::lock_guard<std::mutex> lock(g_mutex);
            if (!goes_on) ++g_n_errors;
            if (g_n_errors == 1 && g_logged_error.size() < 4096) g_logged_error += text;
        } catch (const std::exception &) {
        } // no memory for a text: the failure itself is reported all the same
    }
    if (g_verbose && !t_mute) {
        fputs(text, stderr);
        fflush(stderr);
    }
}

} // namespace

void edgekv_log_init(void) { llama_log_set(log_line, nullptr); }

void edgekv_log_verbose(bool on) { g_verbose = on; }

void edgekv_say(const char * line) {
    if (t_mute) return;
    fprintf(stderr, "edgekv: %s\n", line);
    fflush(stderr);
}

void edgekv_log_mute(bool on) { t_mute = on; }

const char * edgekv_log_error(void) {
    static thread_local std::string out;
    try {
        const std::lock_guard<std::mutex> lock(g_mutex);
        out.swap(g_logged_error);
        g_logged_error.clear();
        g_n_errors = 0;
    } catch (const std::exception &) { return ""; }
    return out.c_str();
}
