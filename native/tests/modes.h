#pragma once
// What a program of kernels can be asked for: --test (the default), --perf, and --support, the head
// sizes that a backend's kernels take, a line for each cache type. README's table is made of that.

#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <vector>

// --perf: perf-kernels.cpp, perf-product.cpp or perf-cuda.cpp
int perf(int argc, char ** argv);

// whether the first argument is `mode`, which is taken away then
inline bool asked(int & argc, char **& argv, const char * mode) {
    if (argc < 2 || strcmp(argv[1], mode) != 0) return false;
    argv[1] = argv[0];
    --argc;
    ++argv;
    return true;
}

constexpr int LARGEST_HEAD = 512; // that is asked about

// true: it was asked for, and is printed: type, smallest and largest size, step. takes(type, size):
// whether there are kernels
template <typename Types, typename Takes>
bool print_support(int & argc, char **& argv, const Types & types, Takes && takes) {
    if (!asked(argc, argv, "--support")) return false;
    for (ggml_type type : types) {
        std::vector<int> sizes;
        for (int d = 1; d <= LARGEST_HEAD; ++d)
            if (takes(type, d)) sizes.push_back(d);
        const int step = sizes.size() > 1 ? sizes[1] - sizes[0] : 1;
        bool regular = !sizes.empty();
        for (size_t i = 1; i < sizes.size(); ++i)
            regular = regular && sizes[i] - sizes[i - 1] == step;
        if (regular)
            printf("%s\t%d\t%d\t%d\n", ggml_type_name(type), sizes.front(), sizes.back(), step);
        else printf("%s\tirregular\n", ggml_type_name(type));
    }
    return true;
}
