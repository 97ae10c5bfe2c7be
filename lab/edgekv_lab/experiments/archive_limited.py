"""A long text with an archive in less memory than its full cache takes: are answers right?

Make a control group first, such as /sys/fs/cgroup/small with 300M in memory.max (version 1:
memory.limit_in_bytes). A text with needles is read by a process in that group, page cache counted
in (so it is for root, or for a group of one's own). Then each needle is asked for, and the
conversation goes back to the text's end. Printed are needles that were found, the limit and the
full f16 cache, the process's own memory at its peak, and what of the group is page cache at the
end.
"""

from __future__ import annotations

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT, SHARE
from edgekv_lab.experiments.checkout import side
from edgekv_lab.experiments.experiment import (
    AUTO,
    MODEL,
    THREADS,
    Options,
    experiment,
    sheet,
    tokens,
)


@experiment(
    MODEL,
    option("--group", help="Folder of a control group with a limit; without it: no limit."),
    option("--folder", default="temporary", help="Of the archive, on a disk."),
    tokens(32000, "the text"),
    option("-n n", type=COUNT, default=20, help="Needles."),
    option("--ratio", type=SHARE, default=0.1, help="Share of the bytes to keep."),
    option("--recall", type=SHARE, default=0.0, help="As --kv-recall."),
    AUTO,
    THREADS,
)
def command(o: Options) -> None:
    with sheet(("what", ""), ("", "{}")) as table:
        for name, value in side("archive_limited:measured", vars(o), is_stock=False).items():
            table.add(name, value)
