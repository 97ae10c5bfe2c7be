"""Progress over pieces of work whose cost is known beforehand."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgekv.base.stats import Progress


class Work:
    """Reports progress over pieces of work whose cost is known.

    costs: of each piece, in any unit of time; finished: the numbers of those that are done.
    """

    def __init__(
        self, costs: Sequence[int], finished: Collection[int], progress: Progress | None
    ) -> None:
        self._costs, self._progress = costs, progress
        self._done = sum(costs[i] for i in finished)
        self._report(0)

    def piece(self, i: int) -> Progress:
        """Progress within piece i, in units of the piece's own."""
        return lambda done, total: self._report(self._costs[i] * done // max(total, 1))

    def end(self, i: int) -> None:
        """Piece i is done."""
        self._done += self._costs[i]
        self._report(0)

    def _report(self, more: int) -> None:
        if self._progress:
            self._progress(self._done + more, sum(self._costs))
