"""Who waits: first come, first served among the requests of one client, clients in turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Hashable
from typing import Generic, TypeVar

from edgekv.serve.errors import ApiError

T = TypeVar("T")


def many_wait(n: int) -> ApiError:
    """The answer to a request for which there is no room."""
    return ApiError(503, f"{n} requests are waiting already: try again later")


class FairQueue(Generic[T]):
    """A queue in which clients take turns.

    n_most: how many may wait, of all clients together.
    """

    def __init__(self, n_most: int) -> None:
        self._n_most, self._n = n_most, 0
        self._clients: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return self._n

    def put(self, client: Hashable, item: T) -> T | None:
        """Returns the item that has to leave for this one: where the queue is full, the last one of
        the client that has most, if that client then has no fewer than this one.

        Raises ApiError 503 if nobody has to.
        """
        left = None
        if self._n >= self._n_most:
            left = self._last_of_most(len(self._clients.get(client, ())) + 1)
            if left is None:
                raise many_wait(self._n)
            self.remove(left)
        self._clients.setdefault(client, deque()).append(item)
        self._n += 1
        return left

    def _last_of_most(self, n: int) -> T | None:
        """The last item of the client that has most, if those are more than n."""
        most = max(self._clients.values(), key=len, default=deque[T]())
        return most[-1] if len(most) > n else None

    def get(self, but: Container[Hashable] = ()) -> T | None:
        """The next one, of no client in `but`; None if nobody waits. Its client comes last then."""
        clients = [one for one in self._clients if one not in but]
        if not clients:
            return None
        client = clients[0]
        items = self._clients.pop(client)
        item = items.popleft()
        if items:
            self._clients[client] = items
        self._n -= 1
        return item

    def remove(self, item: T) -> bool:
        """Whether it was there."""
        for client, items in self._clients.items():
            if item in items:
                items.remove(item)
                self._n -= 1
                if not items:
                    del self._clients[client]
                return True
        return False
