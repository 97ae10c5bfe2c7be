#pragma once
// Exceptions become codes, and JSON becomes text that the caller frees.

#include "edgekv-chat.h"
#include "json.h"

#include <new>
#include <stdexcept>
#include <string>

int edgekv_chat_fail(edgekv_status status, const char * what) noexcept;

// null where there is no memory
char * edgekv_chat_text(const std::string & text);

template <typename F>
int edgekv_chat_guard(F && f) noexcept {
    try {
        f();
        return EDGEKV_OK;
    } catch (const std::bad_alloc &) {
        return edgekv_chat_fail(EDGEKV_NO_MEMORY, "not enough memory");
    } catch (const std::exception & error) {
        return edgekv_chat_fail(EDGEKV_INVALID, error.what());
    } catch (...) { return edgekv_chat_fail(EDGEKV_FAILED, "an unknown failure"); }
}

// guard, and `out` gets the text that f returns
template <typename F>
int edgekv_chat_give(char ** out, F && f) noexcept {
    return edgekv_chat_guard([&] {
        if (!out) throw std::invalid_argument("an argument is null");
        *out = edgekv_chat_text(f());
        if (!*out) throw std::bad_alloc();
    });
}

template <typename T>
T * edgekv_chat_given(T * x) {
    if (!x) throw std::invalid_argument("an argument is null");
    return x;
}
