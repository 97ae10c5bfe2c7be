#pragma once
// How often each verb was queued since the program began. An engine whose kernels are left alone
// computes the same, only slower: tests on a GPU must see that they ran.

#include <atomic>

namespace edgekv_cuda {

enum verb { ATTEND, SCORE, PREDICT, GATHER, NEAREST, FOLD, N_VERBS };

constexpr const char * VERB_NAMES[N_VERBS] = { "attend", "score", "predict", "gather", "nearest",
    "fold" };

inline std::atomic<long> g_n_calls[N_VERBS];

inline void count(verb v) { g_n_calls[v].fetch_add(1, std::memory_order_relaxed); }

} // namespace edgekv_cuda
