#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: build for that card only, run every case of the CUDA kernels (some under compute-sanitizer), the
# engine on the GPU, and the benchmarks; what came out goes to build/gpu-report.md, and docs/results/gpu.md is made from it by hand.
#
#     benchmarks/gpu.sh [stage ...]     kernels sanitizer speed engine tests bench: these by default; and real shapes trace
#
# kernels    our kernels alone, without ggml-cuda, against plain loops: two minutes with the build
# sanitizer  fewer cases of them under compute-sanitizer
# speed      times of each kernel beside the card's own speed of copying
# engine     llama.cpp with CUDA (ten minutes on 16 cores), then attend beside upstream's flash attention
# tests      the engine's tests with all layers on the GPU
# bench      a model of Llama-3-8B's shape with random q4_0 weights: what compressing adds to reading a prompt, device memory beside what
#            `edgekv fit` plans, writing behind 32K and 128K tokens
# real       a model with weights that were learned, MODEL=file.gguf: numbers hidden in a text and KL along answers on the GPU and on the
#            CPU, four clients of `edgekv serve` beside each other with a kill -9 (saves, loads, goes away amid answers), speed, recall
# shapes     sliding windows, recurrent layers, experts: prompts and writing, random weights
# trace      where a prompt's and a token's time goes, by kernel and by call: needs nsys
#
# Needs nvcc, cmake, ninja, a C++ compiler; from engine on also cuBLAS and the Python packages of the extra `dev`. Without a network,
# EDGEKV_SDIST names the archive of llama-cpp-python (73 MiB); of the packages
# jinja2, gguf and diskcache are Python alone and can be brought in a folder that PYTHONPATH names. The card is the one that CUDA programs
# get: the first of CUDA_VISIBLE_DEVICES where that is set.
#
# Each step has its part of the report in build/gpu-report/, written when the step ends, and the report is put together from the parts
# there are, of earlier calls too; what a step printed stays whole in build/gpu-report/full/. So a call that was cut short loses one step.
# EDGEKV_GPU_OUT      where the report goes, instead of build/gpu-report.md
# EDGEKV_GPU_KEEP     an archive (.tgz) that holds build/gpu-report after each step: the parts, and all that was printed
# EDGEKV_GPU_LIMIT    seconds after which a step is ended, instead of 1200; EDGEKV_GPU_END: after which no step begins
# EDGEKV_GPU_BUILT=1  builds nothing: build/gpu-kernels/tests and build/gpu-engine were brought along (sm_90 alone takes two cores
#                     twenty minutes to compile, and needs no GPU: -DGGML_CUDA=ON -DEDGEKV_CUDA_TESTS=ON -DEDGEKV_TESTS=ON
#                     -DCMAKE_CUDA_ARCHITECTURES=90-real -DGGML_NATIVE=OFF)
# EDGEKV_COMMIT       the commit, instead of what git says
# EDGEKV_GPU_DRY=1    tries the commands of real, shapes and trace without a GPU, with the edgekv that is installed and short texts
# EDGEKV_GPU_RESUME=1 leaves out steps that went well before, at the same commit
# EDGEKV_GPU_DEPTHS   contexts of bench, instead of 32768,131072; EDGEKV_GPU_SHAPE its model, instead of llama-8b; EDGEKV_GPU_NGL its layers
#                     on the GPU, instead of 99
set -uo pipefail
cd "$(dirname "$0")/.."
stages=${*:-kernels sanitizer speed engine tests bench}
out=${EDGEKV_GPU_OUT:-build/gpu-report.md}
jobs=${JOBS:-$(nproc)}
python=${PYTHON:-python3}
shape=${EDGEKV_GPU_SHAPE:-llama-8b}
depths=${EDGEKV_GPU_DEPTHS:-32768,131072}
ngl=${EDGEKV_GPU_NGL:-99}
parts=build/gpu-report
call=$(date -u +%Y%m%dT%H%M%S)
commit=${EDGEKV_COMMIT:-$(git describe --always --dirty 2> /dev/null || echo unknown)}
failed=0
export PYTHONUNBUFFERED=1 EDGEKV_COMMIT=$commit PYTHONPATH=$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}

for stage in $stages; do
    case $stage in
        kernels|sanitizer|speed|engine|tests|bench|shapes|trace) ;;
        real) [ -e "${MODEL:-}" ] || { echo "real needs MODEL=file.gguf"; exit 2; } ;;
        *) echo "there is no stage $stage: kernels, sanitizer, speed, engine, tests, bench, real, shapes, trace"; exit 2 ;;
    esac
    case ${EDGEKV_GPU_DRY:+$stage} in kernels|sanitizer|speed|engine|tests|bench) echo "$stage cannot be tried without a GPU"; exit 2 ;; esac
done
mkdir -p "$parts/full" "$(dirname "$out")"
n=10 repeats=3 tokens=4096 depth=32768 layers="$ngl 0"
if [ -n "${EDGEKV_GPU_DRY:-}" ]; then
    n=2 repeats=1 tokens=512 depth=1024 ngl=0 layers=0
    printf '0\nno GPU\n' > "$parts/card.txt"
else
command -v nvcc > /dev/null || { echo "nvcc is missing: install the CUDA toolkit and put its bin folder into PATH"; exit 2; }
visible=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES=${visible%%,*} # llama.cpp would share its layers out over all cards
nvcc -o "$parts/card" benchmarks/card.cu && "$parts/card" > "$parts/card.txt" || { echo "CUDA finds no GPU here; what it says stands above"; exit 2; }
fi
sm=$(head -n 1 "$parts/card.txt")

# ---- the report

assemble() {
    {
        echo "# CUDA kernels on a GPU"
        echo
        echo "Written by \`benchmarks/gpu.sh\`; a section is what one step printed, at the commit and on the card that it names."
        cat "$parts"/[0-9]*.md 2> /dev/null || true # there may be none yet
    } > "$out.new" && mv "$out.new" "$out"
    [ -z "${EDGEKV_GPU_KEEP:-}" ] || tar -C "$(dirname "$parts")" -czf "$EDGEKV_GPU_KEEP" --exclude='*.gguf' --exclude=card "$(basename "$parts")"
}

# what of a step's output is shown
whole()    { cat "$1"; } # what came on standard error, progress, only where it failed
text()     { printf '```\n'; cat "$1"; printf '```\n'; }
# of a sanitizer what it found, of a program its failures and its last line
findings() { printf '```\n'; grep -E '^=========|^FAILED|passed,' "$1" > "$1.found"; head_and_tail "$1.found"; rm "$1.found"; printf '```\n'; }
tested()   { printf '```\n'; grep -E '^(FAILED|ERROR|SKIPPED|E  )|passed|failed|error' "$1"; printf '```\n'; }
tail_of()  { printf '```\n'; tail -n 40 "$1"; printf '```\n'; }
head_and_tail() {
    if [ "$(wc -l < "$1")" -le 80 ]; then cat "$1"; return; fi
    head -n 60 "$1"; echo "..."; tail -n 20 "$1"
}

# step name, title, what is shown, command: runs it and writes its part of the report. The name's number is its place there.
step() {
    local name=$1 title=$2 show=$3 rc log=$parts/full/$call-$1.txt begin=$SECONDS; shift 3
    if [ -n "${EDGEKV_GPU_RESUME:-}" ] && [ "$commit" != unknown ] && [ "$(cat "$parts/$name.done" 2> /dev/null)" = "$commit" ]; then echo "$title: done before"; return 0; fi
    if [ "$SECONDS" -ge "${EDGEKV_GPU_END:-1000000}" ]; then echo "$title: no time is left"; failed=1; return 1; fi
    echo "$title"
    rm -f "$parts/$name.done"
    if [ ! -e "$parts/$name.md" ]; then printf '\n## %s\n\nBegun at commit %s, and not ended.\n' "$title" "$commit" > "$parts/$name.md"; assemble; fi
    declare -F "$1" > /dev/null || set -- timeout -k 5 "${EDGEKV_GPU_LIMIT:-1200}" stdbuf -oL "$@" # what hangs leaves what it has printed
    if [ "$show" = whole ]; then "$@" > "$log" 2> "$log.progress"; else "$@" > "$log" 2>&1; fi
    rc=$?
    {
        printf '\n## %s\n\n' "$title"
        printf 'Commit %s, %s, %s (sm_%s), %d s.\n\n' "$commit" "$(date -u +%Y-%m-%d)" "$(sed -n 2p "$parts/card.txt")" "$sm" $((SECONDS - begin))
        if [ $rc -ne 0 ]; then printf '**Failed** (%s): `%s`\n\n' "$rc" "$*"; fi
        $show "$log"
        if [ $rc -ne 0 ] && [ -s "$log.progress" ]; then echo; tail_of "$log.progress"; fi
    } > "$parts/$name.new"
    mv "$parts/$name.new" "$parts/$name.md"
    if [ $rc -eq 0 ]; then echo "$commit" > "$parts/$name.done"; else failed=1; fi
    assemble
    return $rc
}
# a build has a part only where it failed
build() { step "$1" "$2" tail_of make_targets "${@:3}" && rm -f "$parts/$1.md" "$parts/$1.done" && assemble; }
make_targets() { # folder, target, ..., --, options of cmake
    [ -z "${EDGEKV_GPU_BUILT:-}" ] || return 0
    local folder=$1 targets=(); shift
    while [ "$1" != -- ]; do targets+=("$1"); shift; done
    shift
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEDGEKV_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES="$sm-real" "$@" &&
        cmake --build "$folder" --parallel "$jobs" --target "${targets[@]}"
}

# ---- stages

build_kernels() { build 10-build "Building the kernels" build/gpu-kernels test-cuda-device -- -DEDGEKV_CUDA_TESTS=ON; }
kernels() {
    build_kernels || return
    step 11-cases "Kernels against plain loops" text build/gpu-kernels/tests/test-cuda-device
    step 12-random "The same, 200 random cases" text build/gpu-kernels/tests/test-cuda-device 2 200
}
sanitizer() {
    build_kernels || return
    local n=0
    for tool in memcheck racecheck synccheck; do
        step "2$((n++))-$tool" "A few cases under compute-sanitizer's $tool" findings \
            compute-sanitizer --tool "$tool" --error-exitcode 9 build/gpu-kernels/tests/test-cuda-device 1 4 few
    done
}
speed() {
    build_kernels || return
    step 30-speed "Speed of the kernels" whole build/gpu-kernels/tests/test-cuda-device --perf 32768
}
build_engine() {
    build 40-build "Building the engine" build/gpu-engine edgekv bench-flash -- -DGGML_CUDA=ON || return
    cp build/gpu-engine/build-info.json build/gpu-engine/bin/
    export EDGEKV_LIB=$PWD/build/gpu-engine/bin
}
engine() {
    build_engine || return
    step 41-flash "attend beside upstream's flash attention" whole build/gpu-engine/tests/bench-flash 32768
}
packages() { "$python" -c 'import click, jinja2, typing_extensions, gguf, diskcache, pytest, rich, psutil' > /dev/null; } # says what is missing
tests() {
    packages && build_engine || return
    export EDGEKV_GPU=1
    local n=0 pytest=("$python" -m pytest -q --tb=short -m gpu -W default -p no:cacheprovider) # other versions of packages than the project's
    "$python" -c 'import xdist' 2> /dev/null && pytest+=(-n 8)
    for model in llama-gqa llama-mha llama-d128 gemma3 qwen2 refact; do # each a few minutes
        step "5$((n++))-$model" "The engine on the GPU beside the CPU: $model" tested "${pytest[@]}" -rfE tests/test_device.py -k "test_a_gpu and $model"
    done
    step 56-offload "Layers on the GPU, all of them or some" tested "${pytest[@]}" -rfEs tests/test_offload.py
}
write_model() {
    [ -e "$1" ] && return
    "$python" -c 'import sys; from pathlib import Path; from edgekv_lab.bench import synthetic; synthetic.write(Path(sys.argv[1]), *synthetic.parse(sys.argv[2]))' \
        "$1.new" "$shape" && mv "$1.new" "$1"
}
bench() {
    packages && build_engine || return
    local model=$parts/${shape/:/-}.gguf n=2 first=${depths%%,*}
    step 60-model "Writing a model of the shape $shape" tail_of write_model "$model" || return
    rm -f "$parts/60-model.md"
    step 61-share "Score, select and evict beside the rest of a prompt's reading" whole \
        "$python" -m edgekv_lab share -m "$model" -ngl "$ngl" --tokens "$first" --hidden f32,device --threads "$jobs"
    step 62-memory "Device memory beside the plan" whole \
        "$python" -m edgekv_lab fit -m "$model" -ngl "$ngl" --points "1:f16:512,0.2:f16:$first,0.2:q8_0:$first,1:f16:$first"
    for depth in ${depths//,/ }; do
        step "6$((++n))-decode-$depth" "Writing behind $depth tokens, a fifth kept and all" whole \
            "$python" -m edgekv bench -m "$model" --kv-method snapkv -ngl "$ngl" -p 0 -n 64 -d "$depth" --fill repeat --full f16 --compare -r 3
    done
}
dry_or_engine() { packages && { [ -n "${EDGEKV_GPU_DRY:-}" ] || build_engine; }; }
edgekv_bench() { step "$1" "$2" whole "$python" -m edgekv bench -ngl "$ngl" -r "$repeats" "${@:3}"; }
real() {
    dry_or_engine || return
    local on file texts=()
    for file in facts letters narrative notes; do texts+=(-f edgekv/data/calibration/$file.txt); done
    for on in $layers; do
        step "70-needle-$on" "Numbers hidden in 4,000 tokens, $on layers on the GPU" whole \
            "$python" -m edgekv eval needle -m "$MODEL" -ngl "$on" --methods auto --ratios 0.2 --lengths 4000 -n "$n"
        step "72-answers-$on" "KL along answers, $on layers on the GPU" whole \
            "$python" -m edgekv eval answers -m "$MODEL" -ngl "$on" "${texts[@]}" --methods auto --ratios 0.2 --lengths 1000 -n "$n"
    done
    step 74-soak "Four clients, $ngl layers on the GPU" whole \
        "$python" -m edgekv_lab soak -m "$MODEL" --clients 4 --minutes "${EDGEKV_GPU_MINUTES:-2}" --prompts 8 --words "-ngl $ngl"
    edgekv_bench 75-bench "A prompt of $tokens tokens, and writing, $ngl layers on the GPU" -m "$MODEL" -p "$tokens" -n 32 --compare
    edgekv_bench 76-recall "Writing behind $depth tokens, a tenth kept, with what the CPU recalls and without" -m "$MODEL" \
        -p 0 -n 32 -d "$depth" --kv-method snapkv --kv-ratio 0.1 --kv-recall 0,0.05 --full '' -ctk f16 -ctv f16
}
shapes() {
    dry_or_engine || return
    local one
    for one in gemma4-1b qwen3.5-0.8b lfm2-moe-1b; do
        edgekv_bench "80-$one" "Random weights in the shape $one, $ngl layers on the GPU" --synthetic "$one:q4_0" \
            -p "$tokens" -n 16 --kv-method snapkv --full f16 --compare
    done
}
trace() {
    dry_or_engine || return
    local trace=(nsys profile --trace cuda --cuda-graph-trace node --stats true --force-overwrite true --output "$parts/trace") model
    [ -z "${EDGEKV_GPU_DRY:-}" ] || { trace=(); shape=tiny; }
    model=$parts/${shape/:/-}.gguf # the one of bench
    write_model "$model" || return
    step 90-prompt "Where the time of a prompt of $depth tokens goes" text "${trace[@]}" \
        "$python" -m edgekv_lab share -m "$model" -ngl "$ngl" --tokens "$depth" --hidden device --threads "$jobs"
    step 91-word "Where the time of 64 tokens behind $depth goes" text "${trace[@]}" \
        "$python" -m edgekv bench -m "$model" -ngl "$ngl" --kv-method snapkv -p 0 -n 64 -d "$depth" --fill repeat --full '' -r 1
}

for stage in $stages; do $stage || failed=1; done
cat "$out"
exit $failed
