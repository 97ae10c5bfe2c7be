// The Metal sources compiled as C++, and a call of each by name.
#include "kernels.h"

#include "../fibers.h"

#include <map>
#include <string>
#include <utility>

#include <metal_stdlib>

#include "edgekv-kernels.metal" // the text that a device compiles (native/metal-source.cmake)

#undef kernel
#undef device
#undef constant
#undef threadgroup
#undef thread

namespace metal_standin {

namespace {

using body = std::function<void(const void *, const std::vector<const void *> &)>;

struct compiled {
    signature is;
    body call;
};

// every kernel takes its place in the grid, its threadgroup memory and its arguments in this order,
// then its buffers
template <typename Args, typename... T, size_t... i>
void call(void (*f)(uint3, uint, float *, Args &, T *...), const void * args,
    const std::vector<const void *> & buffers, std::index_sequence<i...>) {
    const uint3 group = { standin::group.x, standin::group.y, standin::group.z };
    Args a;
    memcpy(&a, args, sizeof(a));
    f(group, standin::now->index.x, (float *) standin::dynamic_shared(), a,
        (T *) const_cast<void *>(buffers[i])...);
}

template <typename Args, typename... T>
compiled make(void (*f)(uint3, uint, float *, Args &, T *...)) {
    return { { sizeof(Args), sizeof...(T) },
        [f](const void * args, const std::vector<const void *> & buffers) {
            call(f, args, buffers, std::index_sequence_for<T...>());
        } };
}

#define KERNEL(name) { #name, make(name) }

const std::map<std::string, compiled> & all() {
    static const std::map<std::string, compiled> kernels = {
        KERNEL(edgekv_attend_part_64),
        KERNEL(edgekv_attend_part_128),
        KERNEL(edgekv_attend_part_256),
        KERNEL(edgekv_attend_combine),
        KERNEL(edgekv_score_norm),
        KERNEL(edgekv_score_fold),
        KERNEL(edgekv_score_columns),
        KERNEL(edgekv_gather_16),
        KERNEL(edgekv_gather_4),
        KERNEL(edgekv_gather_2),
        KERNEL(edgekv_merge_nearest),
        KERNEL(edgekv_merge_fold),
    };
    return kernels;
}

} // namespace

const signature * find(const char * name) {
    const auto it = all().find(name);
    return it == all().end() ? nullptr : &it->second.is;
}

bool run(const edgekv_metal::call & c, const void * args, size_t n_args,
    const std::vector<const void *> & buffers) {
    const auto it = all().find(c.kernel);
    if (it == all().end() || it->second.is.n_args != n_args ||
        it->second.is.n_buffers != buffers.size() || c.n_shared % 16 || c.n_shared > MAX_SHARED)
        return false;
    if (c.groups_x == 0 || c.groups_y == 0) return true;
    standin::run(standin::size3(c.groups_x, c.groups_y), standin::size3(EDGEKV_METAL_THREADS),
        [&] { it->second.call(args, buffers); });
    const char * shared = standin::dynamic_shared(); // of the last threadgroup
    return std::all_of(
        shared + c.n_shared, shared + MAX_SHARED, [](char x) { return x == '\xff'; });
}

} // namespace metal_standin
