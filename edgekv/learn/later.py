"""The process that ends a first use: `python -m edgekv.learn.later MODEL ARGUMENTS`."""

from __future__ import annotations

import json
import signal
import sys


def main() -> None:
    """ARGUMENTS: of `edgekv.learn.probe_profile.cache`, as JSON. Ctrl-C is for the chat."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from edgekv.learn import probe_profile

    path, arguments = sys.argv[1:]
    probe_profile.cache(path, **json.loads(arguments))


if __name__ == "__main__":
    main()
