"""benchmarks/gpu.sh where no GPU is: programs that stand in for nvcc, cmake and what they build. That no result is lost, whatever fails or is cut short."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.lib import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("bash"), reason="the script needs Linux and bash")
NVCC = """while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\necho 86\\necho a card\\n' > "$2"; chmod +x "$2"
"""
CMAKE = '[ "$1" != --build ] || [ -z "$BROKEN" ] || { echo "error: broken"; exit 1; }'
CASES = """for i in $(seq 100); do echo "FAILED: case $i"; done
for i in $(seq 90); do echo "line $i of the table"; done
echo "200 passed, 100 failed"
exit 1
"""
SANITIZER = """for i in $(seq 500); do echo "========= finding $i"; done
exit 9
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A checkout with nothing but the script, and programs in front of the machine's own."""
    for name in ("gpu.sh", "card.cu"):
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks" / name)
    kernels, engine = tmp_path / "build" / "gpu-kernels" / "tests", tmp_path / "build" / "gpu-engine"
    stand_ins = {"bin/nvcc": NVCC, "bin/cmake": CMAKE, "bin/compute-sanitizer": SANITIZER, "bin/git": "echo abc123",
                 kernels / "test-cuda-device": CASES, engine / "tests" / "bench-flash": "echo '| attend |'; sleep ${SLOW:-0}"}
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (engine / "bin").mkdir()
    (engine / "build-info.json").write_text("{}")
    return tmp_path


def start(tree: Path, *stages: str, **env: str) -> subprocess.Popen[str]:
    path = f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(["bash", "benchmarks/gpu.sh", *stages], cwd=tree, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "PATH": path, **env}, start_new_session=True)


def call(tree: Path, *stages: str, **env: str) -> str:
    """The report after a call of the script."""
    process = start(tree, *stages, **env)
    said = process.communicate(timeout=60)[0]
    report = tree / env.get("EDGEKV_GPU_OUT", "docs/results/gpu.md")
    assert report.exists(), said
    return report.read_text()


def test_every_failure_and_the_whole_table_are_shown(tree):
    report = call(tree, "kernels")
    assert report.count("FAILED: case 1\n") == 2 and report.count("line 1 of the table\n") == 2  # two steps
    assert "**Failed** (1)" in report and "Commit abc123" in report and "a card (sm_86)" in report
    full = list((tree / "build" / "gpu-report" / "full").iterdir())
    assert len(full) == 3 and all(path.stat().st_size > 2000 for path in full if "build" not in path.name)
    report = call(tree, "sanitizer")
    assert all(f"finding {i}\n" in report for i in (1, 60, 481, 500)) and "finding 61\n" not in report


def test_a_later_call_keeps_what_an_earlier_one_found(tree):
    call(tree, "kernels", EDGEKV_GPU_OUT="here.md")
    report = call(tree, "engine", EDGEKV_GPU_OUT="here.md")
    assert "| attend |" in report and "line 90 of the table" in report
    report = call(tree, "engine", EDGEKV_GPU_OUT="here.md", BROKEN="1")
    assert "error: broken" in report and "| attend |" in report and "line 90 of the table" in report
    report = call(tree, "engine", EDGEKV_GPU_OUT="here.md")
    assert "error: broken" not in report


def test_a_step_that_is_killed_is_the_only_one_lost(tree):
    process = start(tree, "kernels", "engine", SLOW="60")
    end = time.monotonic() + 30
    while not (report := tree / "docs" / "results" / "gpu.md").exists() or "not ended" not in report.read_text() or "attend" not in report.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, 9)
    process.communicate()
    assert "line 90 of the table" in report.read_text() and "Begun at commit abc123, and not ended" in report.read_text()
    text = call(tree, "engine", EDGEKV_GPU_RESUME="1")
    assert "| attend |" in text and "not ended" not in text and "line 90 of the table" in text


def test_a_step_that_hangs_is_ended_and_all_is_kept(tree):
    report = call(tree, "engine", SLOW="60", EDGEKV_GPU_LIMIT="1", EDGEKV_GPU_KEEP="all.tgz")
    assert "| attend |" in report and "**Failed** (124)" in report
    names = tarfile.open(tree / "all.tgz").getnames()
    assert "gpu-report/41-flash.md" in names and any("/full/" in name and "41-flash" in name for name in names)


def test_no_step_begins_when_time_is_up(tree):
    assert "no time is left" in start(tree, "kernels", EDGEKV_GPU_END="0").communicate(timeout=60)[0]


def test_what_went_well_is_not_run_again_if_that_is_wished(tree):
    call(tree, "engine")
    assert "attend beside upstream's flash attention: done before" in start(tree, "engine", EDGEKV_GPU_RESUME="1").communicate(timeout=60)[0]
    assert "done before" not in start(tree, "engine").communicate(timeout=60)[0]


def test_a_stage_that_does_not_exist_is_refused(tree):
    process = start(tree, "kernel")
    assert "there is no stage kernel" in process.communicate(timeout=60)[0] and process.returncode == 2
