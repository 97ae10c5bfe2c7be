#include "edgekv-guard.h"

#include <cstdlib>
#include <cstring>

static thread_local std::string g_error;

int edgekv_chat_abi(void) { return EDGEKV_CHAT_ABI; }

const char * edgekv_chat_error(void) { return g_error.c_str(); }

int edgekv_chat_fail(edgekv_status status, const char * what) noexcept {
    try {
        g_error = what;
    } catch (const std::bad_alloc &) { g_error.clear(); } // the status says enough
    return status;
}

char * edgekv_chat_text(const std::string & text) {
    auto * out = (char *) malloc(text.size() + 1);
    if (out) memcpy(out, text.c_str(), text.size() + 1);
    return out;
}

void edgekv_chat_free(char * text) { free(text); }
