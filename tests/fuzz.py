"""Many malformed requests and files, in pieces; a piece that fails is named, and others go on.

python -m tests.fuzz requests 20000
python -m tests.fuzz files 5000                of each kind: three caches, and packs
python -m tests.fuzz files 5000 --first 5000 -k packs
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

FILES = {"requests": "tests/test_serve_fuzz.py", "files": "tests/test_session_fuzz.py"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=FILES)
    parser.add_argument("n", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--piece", type=int, default=500)
    parser.add_argument("-k", dest="words", default="malformed or damaged")
    given = parser.parse_args()
    failed, begin = 0, time.monotonic()
    for first in range(given.first, given.first + given.n, given.piece):
        n = min(given.piece, given.first + given.n - first)
        numbers = {"EDGEKV_FUZZ": str(n), "EDGEKV_FUZZ_FROM": str(first)}
        command = [sys.executable, "-m", "pytest", "-q", "-k", given.words, FILES[given.kind]]
        done = subprocess.run(
            command, env={**os.environ, **numbers}, capture_output=True, text=True, check=False
        )
        failed += done.returncode != 0
        why = [line for line in done.stdout.splitlines() if line.startswith("E ")]
        said = "\n".join([*why, done.stderr])[:6000] if done.returncode else ""
        how = (
            f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        )
        seconds = time.monotonic() - begin
        print(f"{given.kind} {first} to {first + n - 1}: {how}, {seconds:.0f} s {said}", flush=True)
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
