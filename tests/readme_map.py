"""The README's map of the repository, made from what each file says of itself in its first line.

    python -m tests.readme_map      writes it into README.md
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("cli.py", "edgekv/**/*.py", "native/*.*", "native/include/*.h", "native/src/**/*.*", "native/tests/*.*",
            "native/tests/cuda/*.*", "native/tests/metal/**/*", "patches/*.patch", "benchmarks/*.*", "tests/**/*.py", "docs/**/*.md")
NAMED = {  # files that cannot speak for themselves in one line
    "edgekv/__init__.py": "the package: `Llama`, errors, version",
    "native/CMakeLists.txt": "puts native/src into llama.cpp's libraries",
}
WIDTH = 110


def make() -> str:
    """The fenced block: a line for each file, its path and one phrase."""
    files = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file() and path.stat().st_size and wanted(path)})
    names = [path.relative_to(ROOT).as_posix() for path in files]
    width = max(map(len, names)) + 2
    lines = [f"{name:{width}}{NAMED.get(name) or phrase(path)}" for name, path in zip(names, files, strict=True)]
    return "```text\n" + "\n".join(line[: width + WIDTH] for line in lines) + "\n```"


def wanted(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return "__pycache__" not in parts and "lib" not in parts


def phrase(path: Path) -> str:
    """What the first line of a file says, up to its first full stop."""
    text = path.read_text(encoding="utf-8")
    found = {".py": r'"""(.*)', ".md": r"^# (.*)", ".patch": r"Subject: \[PATCH\] (.*)"}.get(path.suffix, r"^(?://|#(?!include|pragma|if|define)) ?([A-Za-z].*)")
    match = re.search(found, text.replace("#pragma once\n", ""), re.MULTILINE)
    return re.split(r"\.(?:\s|$)|\"\"\"", match.group(1))[0].strip() if match else ""


def readme(text: str) -> str:
    """`text` of the README with its map made anew."""
    head, rest = text.split("## Map\n", 1)
    tail = re.split(r"\n```\n", rest, maxsplit=1)[1] if "```text" in rest else rest.split("@@MAP@@\n", 1)[1]
    return f"{head}## Map\n\n{make()}\n{tail}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(readme(page.read_text(encoding="utf-8")), encoding="utf-8")
