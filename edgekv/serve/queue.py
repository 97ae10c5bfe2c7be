"""Who waits: first come, first served among the requests of one client, clients in turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Full(Exception):
    """There is no room for another one."""


class FairQueue(Generic[T]):
    """n_most: how many may wait, of all clients together."""

    def __init__(self, n_most: int) -> None:
        self._n_most, self._n = n_most, 0
        self._clients: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return self._n

    def put(self, client: Hashable, item: T) -> None:
        """Raises Full."""
        if self._n >= self._n_most:
            raise Full
        self._clients.setdefault(client, deque()).append(item)
        self._n += 1

    def get(self) -> T | None:
        """The next one, None if nobody waits. Its client comes last from now on."""
        if not self._clients:
            return None
        client, items = self._clients.popitem(last=False)
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
