#pragma once
// How far a chat template may go: it comes with a model, and may be written to take a process down.
// llama.cpp's interpreter (common/jinja) calls these where it goes deeper or makes more.

#include <chrono>
#include <cstddef>
#include <stdexcept>

struct edgekv_jinja_limits {
    static constexpr int depth_most = 400; // of statements within each other; real templates: 60
    static constexpr size_t grown_least = 256u << 20;
    static constexpr int seconds = 5;

    int depth = 0;
    size_t steps = 0;
    size_t grown = 0, grown_most = grown_least; // bytes that texts and lists have grown by
    std::chrono::steady_clock::time_point until {};

    // n_bytes: of what the template is given
    void begin(size_t n_bytes) {
        *this = {};
        grown_most = grown_least + 200 * n_bytes;
        until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    }

    void step() {
        if (++steps % 1024 == 0 && until.time_since_epoch().count() > 0 &&
            std::chrono::steady_clock::now() > until)
            throw std::runtime_error("it takes too long");
    }

    void grow(size_t n_bytes) {
        grown += n_bytes;
        if (grown > grown_most) throw std::runtime_error("it makes too much");
        step();
    }
};

inline thread_local edgekv_jinja_limits edgekv_jinja;

// a statement within another one
struct edgekv_jinja_frame {
    edgekv_jinja_frame() {
        if (edgekv_jinja.depth >= edgekv_jinja_limits::depth_most)
            throw std::runtime_error("it goes too deep");
        edgekv_jinja.step();
        ++edgekv_jinja.depth;
    }
    ~edgekv_jinja_frame() { --edgekv_jinja.depth; }
    edgekv_jinja_frame(const edgekv_jinja_frame &) = delete;
    edgekv_jinja_frame & operator=(const edgekv_jinja_frame &) = delete;
};
