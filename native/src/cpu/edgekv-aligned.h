#pragma once
// Floats that begin on a cache line: a vector register as wide as a line is then loaded from one,
// not from two.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgekv {

constexpr size_t LINE = 64; // bytes of a cache line

// where the first line begins that lies wholly behind p; room for one more has to be there
template <class T>
T * aligned(T * p) {
    return (T *) (((uintptr_t) p + LINE - 1) / LINE * LINE);
}

class aligned_floats {
public:
    // room for n floats; what was there is lost
    float * get(size_t n) {
        x.resize(n + LINE / sizeof(float));
        return aligned(x.data());
    }

private:
    std::vector<float> x;
};

} // namespace edgekv
