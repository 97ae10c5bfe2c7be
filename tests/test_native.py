"""The native test programs, upstream's operator tests on the patched tree, and our own code under
sanitizers.

`cli.py test` builds the programs into build/native-tests; EDGEKV_NATIVE_TESTS names another folder.
Without them the tests are skipped, or fail where CI=true.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.build import absent, build, run
from tests.lib import ROOT

PROGRAMS = (
    "test-kernels",
    "test-lanes",
    "test-product",
    "test-store",
    "test-engine",
    "test-chat",
)
REGISTERS = {
    "test-lanes": [],
    "test-lanes-avx2": ["avx2", "fma"],
    "test-lanes-avxvnni": ["avx_vnni", "avx2", "fma"],
    "test-lanes-avx512": ["avx512f", "avx512bw", "avx512dq", "avx512vl"],
    "test-lanes-avx512vnni": ["avx512_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"],
    "test-lanes-avx512bf16": ["avx512_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl"],
    "test-product-avx2": ["avx2", "fma", "f16c"],
}
SANITIZED = ROOT / "build" / "sanitize"
NEON = ROOT / "build" / "neon"
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "LSAN_OPTIONS": "report_objects=1",
}


def program(name: str) -> Path:
    folder = Path(os.environ.get("EDGEKV_NATIVE_TESTS") or ROOT / "build" / "native-tests")
    for path in (folder / name, folder / f"{name}.exe"):
        if path.exists():
            return path
    absent(
        f"{name} is not in {folder}: `python3 cli.py test` builds it, or set EDGEKV_NATIVE_TESTS to"
        " its folder"
    )
    raise AssertionError


def check_passed(output: str) -> None:
    passed, failed = map(int, re.search(r"(\d+) passed, (\d+) failed\s*$", output).groups())
    assert passed > 0 and failed == 0


# ---- our own


def test_cpu_kernels_agree_with_plain_loops():
    check_passed(run(program("test-kernels")))


def test_products_with_weights_agree_with_plain_loops():
    check_passed(run(program("test-product")))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for CUDA needs Linux")
def test_cuda_kernels_agree_with_plain_loops():
    """Their source, compiled as C++ and run on the CPU: what they compute, not that a GPU would run
    them. Every ninth fixed case, all of which a GPU runs, and more drawn ones.
    """
    check_passed(run(program("test-cuda"), 1, 60, "few"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for CUDA needs Linux")
def test_the_kernels_speed_can_be_measured():
    """That the tables are whole; times on the stand-in mean nothing."""
    assert run(program("test-cuda"), "--perf", 64).count("\n| ") == 38
    cases = [
        json.loads(line) for line in run(program("test-kernels"), "--perf", 1, 1).splitlines()[1:]
    ]
    assert len(cases) == 12 and all(
        case["difference"] < 1e-3 and case["ours_ms"] > 0 for case in cases
    )


@pytest.mark.parametrize("name", REGISTERS)
def test_kernels_with_every_register(name):
    if not REGISTERS[name]:
        return check_passed(run(program(name)))
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("for x86 only")
    path, cpuinfo = program(name), Path("/proc/cpuinfo")
    if not cpuinfo.exists() or not set(REGISTERS[name]) <= set(cpuinfo.read_text().split()):
        pytest.skip("compiled, but this machine has not the instructions")
    check_passed(run(path))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_store_agrees_with_plain_vectors(seed):
    check_passed(run(program("test-store"), seed))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_the_c_api_from_end_to_end(tiny, name):
    check_passed(run(program("test-engine"), tiny(name)))


def test_damaged_chats_end_in_a_status(tiny):
    """llama.cpp's own templates too."""
    check_passed(run(program("test-chat"), tiny("llama-gqa"), 1, 500, *templates()))


def templates() -> list[Path]:
    return sorted((ROOT / "build" / "upstream" / "models" / "templates").glob("*.jinja"))


# ---- upstream's, on the patched tree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "cases"),
    [
        ("SET_ROWS", ".*"),
        ("GET_ROWS", ".*"),
        # the whole list takes minutes: every type, head size, mask, sink and soft cap at two of
        # three lengths, without ALiBi and permutations
        (
            "FLASH_ATTN_EXT",
            r"nr23=\[(1|4),1\],kv=(113|512),nb=(1|3|75),.*max_bias=0.*permute=\[0,1,2,3\]",
        ),
    ],
)
def test_upstream_operators(operator, cases):
    output = run(
        program("test-backend-ops"), "test", "-b", "CPU", "-o", operator, "-p", cases, timeout=900
    )
    passed, total = map(int, re.search(r"(\d+)/(\d+) tests passed", output).groups())
    assert passed == total > 100


# ---- the same under sanitizers


def compiled(folder: Path, targets: tuple[str, ...], *options: str) -> Path:
    """The folder of our test programs, built in a folder that stays."""
    if sys.platform != "linux":
        pytest.skip("tried on Linux only")
    if not shutil.which("cmake"):
        absent("cmake is missing: pip install cmake")
    build(folder, "-DEDGEKV_TESTS=ON", *options, targets=targets)
    return folder / "tests"


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """Our test programs and all that is ours in what they use, and files that patches change,
    compiled for AddressSanitizer and UndefinedBehaviorSanitizer.
    """
    return compiled(
        SANITIZED,
        PROGRAMS,
        "-DEDGEKV_SANITIZE=address,undefined",
        "-DCMAKE_BUILD_TYPE=Release",
    )


@pytest.mark.slow
def test_kernels_under_sanitizers(sanitized):
    """Beside each other: they take a minute, and a core each. Every ninth fixed case, all of which
    run without sanitizers too, and drawn ones.
    """
    cases = {"test-kernels": (30, "few"), "test-lanes": (20, "few"), "test-product": (0,)}
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(run, sanitized / name, 3, *which, timeout=1200, **SANITIZER_OPTIONS)
            for name, which in cases.items()
        ]
    for done in running:
        check_passed(done.result())


@pytest.mark.slow
def test_store_under_sanitizers(sanitized):
    check_passed(run(sanitized / "test-store", 3, 500, **SANITIZER_OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_engine_under_sanitizers(sanitized, tiny, name):
    check_passed(run(sanitized / "test-engine", tiny(name), **SANITIZER_OPTIONS))


@pytest.mark.slow
def test_damaged_chats_under_sanitizers(sanitized, tiny):
    arguments = (tiny("llama-gqa"), 2, 200, *templates())
    check_passed(run(sanitized / "test-chat", *arguments, **SANITIZER_OPTIONS))


@pytest.mark.slow
def test_recurrent_layers_under_sanitizers(sanitized, tmp_path):
    from tests import archs  # which runs programs of this module

    model = archs.write(tmp_path, "^qwen35$") / "qwen35-dense.gguf"
    check_passed(run(sanitized / "test-engine", model, **SANITIZER_OPTIONS))


# ---- NEON without an ARM machine

NEON_PROGRAMS = {  # with the arguments behind the seed; emulated floating point is slow
    "test-kernels": (0, "few"),
    "test-lanes": (0, "few"),
    "test-lanes-dotprod": (0, "few"),
    "test-lanes-i8mm": (0, "few"),
    "test-lanes-bf16": (0, "few"),
    "test-product": (),
}


@pytest.fixture(scope="module")
def neon() -> Path:
    """The kernels' tests for ARM with NEON and its dot product, some for products of matrices and
    of bf16 too, where Debian's g++-aarch64-linux-gnu is.
    """
    if not shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("aarch64-linux-gnu-g++ is missing")
    return compiled(
        NEON,
        tuple(NEON_PROGRAMS),
        "-DCMAKE_BUILD_TYPE=Release",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        "-DGGML_NATIVE=OFF",
        "-DGGML_OPENMP=OFF",
        "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), NEON_PROGRAMS.items())
def test_kernels_for_neon_under_emulation(neon, name, arguments):
    """What they compute; nothing of their speed."""
    if not shutil.which("qemu-aarch64-static"):
        pytest.skip("compiled; qemu-aarch64-static is missing")
    check_passed(
        run(
            "qemu-aarch64-static",
            "-L",
            "/usr/aarch64-linux-gnu",
            neon / name,
            3,
            *arguments,
            timeout=1200,
        )
    )
