"""`python -m edgekv ...` is `edgekv ...`."""

import signal

_before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load: no traceback

from edgekv.base import quiet  # noqa: E402
from edgekv.commands import main as commands  # noqa: E402


def main() -> None:
    """Run the command line."""
    quiet.begin()
    signal.signal(signal.SIGINT, _before)
    try:
        commands(prog_name="edgekv")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to stop in order


if __name__ == "__main__":
    main()
