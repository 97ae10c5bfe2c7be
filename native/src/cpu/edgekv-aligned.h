#pragma once
// Floats that begin on a cache line: a vector register as wide as a line is then loaded from one,
// not from two.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgekv {

class aligned_floats {
public:
    // room for n floats; what was there is lost
    float * get(size_t n) {
        x.resize(n + LINE / sizeof(float));
        return (float *) (((uintptr_t) x.data() + LINE - 1) / LINE * LINE);
    }

private:
    static constexpr size_t LINE = 64;
    std::vector<float> x;
};

} // namespace edgekv
