#pragma once
// The kernels of the CPU backend, which libllama does not link to: where there is a library of it
// for each kind of processor, the one that fits is loaded when the program runs.

#include "cpu/edgekv-cpu.h"

// throws std::runtime_error if no CPU backend is loaded
const edgekv_cpu_kernels & edgekv_cpu();
