#pragma once
// Work that threads share, cut into parts that do not depend on how many threads there are. Not by
// ggml's threads: those of a context may be at work on the next layer meanwhile

#include <algorithm>
#include <atomic>
#include <future>
#include <system_error>
#include <vector>

namespace edgekv {

constexpr int PARTS = 8; // as many as are worth a thread

// f(part) for all parts, in this thread and others; what any of them throws is thrown here
template <class F>
void in_parts(int n_parts, int n_threads, F && f) {
    std::atomic<int> next { 0 };
    const auto work = [&] {
        for (int part = next++; part < n_parts; part = next++) f(part);
    };
    std::vector<std::future<void>> others;
    try {
        while ((int) others.size() + 1 < std::min(n_threads, n_parts))
            others.push_back(std::async(std::launch::async, work));
    } catch (const std::system_error &) {} // fewer threads, then
    work();
    for (auto & o : others) o.get();
}

} // namespace edgekv
