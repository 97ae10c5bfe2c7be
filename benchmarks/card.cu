// The card that CUDA programs get here: first line its architecture as nvcc wants it, second what it is. gpu.sh compiles and runs it.
#include <cstdio>
#include <cuda_runtime.h>

int main() {
    cudaDeviceProp p;
    const cudaError_t error = cudaGetDeviceProperties(&p, 0);
    if (error != cudaSuccess) { fprintf(stderr, "%s\n", cudaGetErrorString(error)); return 1; }
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    printf("%d%d\n%s, %zu MiB, %d multiprocessors, driver for CUDA %d.%d, runtime %d.%d\n", p.major, p.minor, p.name, p.totalGlobalMem >> 20,
        p.multiProcessorCount, driver/1000, driver%1000/10, runtime/1000, runtime%1000/10);
    return 0;
}
