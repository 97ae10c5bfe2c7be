#pragma once
// Threads of a GPU's block on the CPU: blocks run one after the other, the threads of a block are
// fibers that change at barriers. Made to find mistakes: threads run in a chosen order, shared
// memory is poisoned, and a barrier or exchange that not all threads reach ends the program. What
// it does not have: warps that overtake each other between barriers, memory order, limits of a real
// device, and speed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace standin {

struct size3 {
    unsigned x, y, z;
    constexpr size3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct thread {
    size3 index;
};
extern thread * now;   // the running thread
extern bool backwards; // threads run from the last to the first
extern int n_launches;
inline size3 group, n_groups, group_size; // of the block in work; of the launch

constexpr int MAX_SHARED = 99 * 1024; // bytes, as consumer cards allow

// at_begin, at_end: in every thread, before and behind the kernel
void run(size3 grid, size3 block, const std::function<void()> & kernel,
    void (*at_begin)() = nullptr, void (*at_end)() = nullptr);
void block_barrier();
// all 32 lanes give n bytes and get those of all: [32][n], until the next exchange but one
const char * exchange(const void * bytes, size_t n);
char * dynamic_shared();
[[noreturn]] void fail(const char * what); // says in which thread

template <typename T>
T lane_value(T x, int lane) {
    T y;
    memcpy(&y, exchange(&x, sizeof(x)) + lane * sizeof(x), sizeof(y));
    return y;
}

} // namespace standin
