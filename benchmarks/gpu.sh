#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: build for that card only, run every case of the CUDA kernels (some under compute-sanitizer), the
# engine on the GPU, and the benchmarks; what came out goes to docs/benchmarks/gpu.md.
#
#     benchmarks/gpu.sh [kernels] [engine]     both stages by default
#
# kernels: our kernels alone, without ggml-cuda: two minutes. engine: llama.cpp with CUDA (ten minutes on 16 cores), the engine's tests
# with all layers on the GPU, attend beside upstream's flash attention. Needs nvcc, cmake, ninja, a C++ compiler; for engine also
# cuBLAS and the Python packages of the extra `dev`. Without a network, EDGEKV_SDIST names the archive of llama-cpp-python, or bring
# build/upstream from a machine that has built (40 MiB). What was built stays in build/gpu-*, so a call that was cut short goes on.
# MODEL=file.gguf adds `edgekv bench` with that model.
set -uo pipefail
cd "$(dirname "$0")/.."
stages=${*:-kernels engine}
out=${EDGEKV_GPU_OUT:-docs/benchmarks/gpu.md}
jobs=$(nproc)
python=${PYTHON:-python3}
part=$(mktemp)
failed=0

command -v nvcc > /dev/null || { echo "nvcc is missing: install the CUDA toolkit and put its bin folder into PATH"; exit 2; }
sm=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d .)
[ -n "$sm" ] || { echo "there is no NVIDIA GPU here: nvidia-smi names none"; exit 2; }

section() { printf '\n## %s\n\n' "$1" >> "$part"; }
# runs a command, its output as text or as it is (tables); notes a failure and goes on
note() {
    local form=$1; shift
    [ "$form" = text ] && printf '```\n' >> "$part"
    "$@" >> "$part" 2>&1
    local rc=$?
    [ "$form" = text ] && printf '```\n' >> "$part"
    if [ $rc -ne 0 ]; then failed=1; printf '\nFailed (%s): `%s`\n\n' "$rc" "$*" >> "$part"; fi
    return $rc
}
last() { local n=$1; shift; "$@" > build/gpu-output.txt 2>&1; local rc=$?; tail -n "$n" build/gpu-output.txt; return $rc; }
configure() { # folder, options
    local folder=$1; shift
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEDGEKV_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES="$sm-real" "$@" > build/gpu-configure.txt 2>&1 ||
        { tail -n 20 build/gpu-configure.txt; exit 1; }
}

kernels() {
    configure build/gpu-kernels -DEDGEKV_CUDA_TESTS=ON
    cmake --build build/gpu-kernels --parallel "$jobs" --target test-cuda-device > build/gpu-build.txt 2>&1 || { tail -n 40 build/gpu-build.txt; exit 1; }
    local tests=build/gpu-kernels/tests
    section "Kernels against plain loops"
    note text last 70 "$tests/test-cuda-device"
    note text last 1 "$tests/test-cuda-device" 2 200
    section "The same under compute-sanitizer (fewer cases)"
    if command -v compute-sanitizer > /dev/null; then
        for tool in memcheck racecheck synccheck; do
            note text last 4 compute-sanitizer --tool "$tool" --error-exitcode 9 "$tests/test-cuda-device" 1 4 few
        done
    else
        echo "compute-sanitizer is missing." >> "$part"
    fi
    section "Speed of the kernels"
    note table "$tests/test-cuda-device" --perf 32768
}

engine() {
    configure build/gpu-engine -DGGML_CUDA=ON
    cmake --build build/gpu-engine --parallel "$jobs" --target edgekv bench-flash test-backend-ops > build/gpu-build.txt 2>&1 || { tail -n 40 build/gpu-build.txt; exit 1; }
    cp build/gpu-engine/build-info.json build/gpu-engine/bin/
    section "attend beside upstream's flash attention"
    note table build/gpu-engine/tests/bench-flash 32768
    section "The engine with all layers on the GPU (-ngl 99)"
    EDGEKV_LIB=$PWD/build/gpu-engine/bin EDGEKV_GPU=1 note text last 15 "$python" -m pytest -q -m gpu tests/test_device.py tests/test_offload.py
    [ -n "${MODEL:-}" ] || return 0
    section "edgekv bench"
    EDGEKV_LIB=$PWD/build/gpu-engine/bin note text "$python" -m edgekv bench -m "$MODEL" -ngl 99 -p 4096 -n 32 -r 3
}

mkdir -p build "$(dirname "$out")"
{
    echo "# CUDA kernels on a GPU"
    echo
    echo "Written by \`benchmarks/gpu.sh $stages\`, $(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)."
    echo
    echo "- card: $(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | head -n 1) (sm_$sm)"
    echo "- compiler: $(nvcc --version | grep release)"
} > "$part"
for stage in $stages; do
    case $stage in
        kernels|engine) $stage ;;
        *) echo "there is no stage $stage: kernels, engine"; exit 2 ;;
    esac
done
mv "$part" "$out"
cat "$out"
exit $failed
