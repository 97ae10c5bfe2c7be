"""Some of tests/test_offload.py with a library that has Vulkan, on the first device: a GPU, or
Mesa's software device.

Needs the shader compiler glslc, Vulkan's and SPIR-V's headers, and a driver; Debian's packages are
named in docs/architecture.md, and .ci/run installs them.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.build import absent, build, run
from tests.lib import ROOT

VULKAN = ROOT / "build" / "vulkan"
CASES = """
    test_a_conversation_on_the_device_is_the_one_on_the_cpu[llama-gqa-f16-99]
    test_a_conversation_on_the_device_is_the_one_on_the_cpu[llama-gqa-q8_0-1]
    test_a_conversation_on_the_device_is_the_one_on_the_cpu[refact-q4_0-99]
    test_hidden_states_may_wait_on_the_device[llama-gqa-99]
    test_heads_of_different_length[llama-mha-f16]
    test_scores_are_the_cpus[d2o]
""".split()
"""Of heads of one size: most of their time goes to what Mesa compiles for a size and a type."""


@pytest.fixture(scope="module")
def library() -> Path:
    """Folder of the libraries with Vulkan; they stay in build/vulkan, so that only the first build
    takes minutes.
    """
    if not shutil.which("glslc"):
        pytest.skip("Vulkan's shader compiler glslc is not installed")
    if not shutil.which("cmake"):
        absent("cmake is missing: pip install cmake")
    build(VULKAN, "-DGGML_VULKAN=ON", "-DCMAKE_BUILD_TYPE=Release", targets=("edgekv",))
    shutil.copy(VULKAN / "build-info.json", VULKAN / "bin")
    return VULKAN / "bin"


@pytest.mark.slow
def test_the_path_for_any_backend_runs_on_vulkan(library):
    output = run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *(f"tests/test_offload.py::{case}" for case in CASES),
        timeout=900,
        EDGEKV_LIB=str(library),
        GGML_VK_VISIBLE_DEVICES="0",
    )
    said = re.search(
        r"^(?:(\d+) passed)?(?:, )?(?:(\d+) skipped)? in [\d.]+s", output, re.MULTILINE
    )
    assert said, output
    passed, skipped = (int(n or 0) for n in said.groups())
    if not passed:
        pytest.skip("Vulkan has no driver here")
    assert passed == len(CASES) and not skipped, output
