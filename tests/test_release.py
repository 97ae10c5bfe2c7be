"""What a release is built with: one set of options here and in the workflow, which is read only
when a tag is pushed.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest

from edgekv.version import __version__
from tests.lib import ROOT

yaml = pytest.importorskip("yaml", reason="comes with mkdocs")
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def jobs() -> dict:
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_cibuildwheel_builds_what_our_script_builds():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    linux = settings["tool"]["cibuildwheel"]["linux"]
    ours = runpy.run_path(str(ROOT / "native" / "wheel.py"))
    assert linux["environment"]["CMAKE_ARGS"] == ours["OPTIONS"]
    excluded = re.findall(r"--exclude (\S+)", linux["repair-wheel-command"])
    assert tuple(excluded) == ours["DRIVERS"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_the_lab_needs_the_edgekv_of_its_version_and_its_extras_are_found():
    import tomllib

    ours, labs = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in ("", "lab")
    )
    assert labs["version"] == __version__
    assert labs["dependencies"] == [f"edgekv=={__version__}"]
    extras = labs["optional-dependencies"]
    for name, needs in extras.items():
        assert ours["optional-dependencies"][name] == [f"edgekv-lab[{name}]"]
        assert set(needs) <= set(ours["optional-dependencies"]["dev"])
    steps = [step["run"] for step in jobs()["sdist"]["steps"] if "run" in step]
    assert any("python -m build --outdir dist lab" in step for step in steps)


def test_only_a_tag_is_published_and_everything_else_is_waited_for():
    publish = jobs()["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert set(publish["needs"]) == set(jobs()) - {"publish", "version", "cuda"}
    (fetched,) = (
        step["with"]["pattern"] for step in publish["steps"] if "download" in step.get("uses", "")
    )
    assert fetched == "dist-*"  # no add-on
    assert publish["permissions"] == {
        "contents": "read",
        "id-token": "write",
        "attestations": "write",
    }
    assert all(
        "version" in job["needs"] for name, job in jobs().items() if name in publish["needs"]
    )


@pytest.mark.skipif(sys.platform == "win32", reason="the step is a script for bash")
@pytest.mark.parametrize("tag", [f"v{__version__}", "v99.0"])
def test_a_tag_that_is_not_the_version_stops_the_release(tag):
    (script,) = (step["run"] for step in jobs()["version"]["steps"] if "run" in step)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=ROOT,
        env={**os.environ, "GITHUB_REF_NAME": tag, "GITHUB_REF_TYPE": "tag"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == (tag == f"v{__version__}"), done.stdout
