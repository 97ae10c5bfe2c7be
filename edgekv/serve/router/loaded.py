"""Which models are loaded: they come when they are asked for, and leave for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from edgekv.base.machine import memory_free
from edgekv.base.sizes import size_text
from edgekv.errors import EdgeKVError
from edgekv.model.header import file_bytes
from edgekv.models.found.found import Found
from edgekv.serve.errors import ApiError
from edgekv.serve.router.child import Child
from edgekv.serve.router.options import RouterOptions

LOOK_S = 0.5
"""Seconds between two looks at who may leave."""
Start = Callable[[Found], Child]


class Loaded:
    """A model that is loaded, or is being loaded. keep_s: how long it stays without a request.
    size: bytes that it takes, of its files at least; is_leaving: it was told to end.
    """

    def __init__(self, model: Found, child: Child, keep_s: float, size: int) -> None:
        self.model, self.child, self.keep_s, self.size = model, child, keep_s, size
        self.n_active, self.is_leaving = 0, False
        self.used = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether no request can be handed to it any more."""
        return self.is_leaving or self.child.exit_code is not None

    @property
    def is_ready(self) -> bool:
        return self.child.ready.done() and not self.child.ready.exception()

    @property
    def left_s(self) -> float:
        """Seconds that it stays without another request."""
        return self.used + self.keep_s - time.monotonic()

    def measure(self) -> None:
        self.size = max(file_bytes(self.model.path), self.child.n_bytes)


class Models:
    """The models that are loaded: starts them, and lets the oldest go for others.

    start: makes a model's process; n_own: bytes that any process takes. All methods are the
    event loop's.
    """

    def __init__(self, options: RouterOptions, start: Start, n_own: int) -> None:
        self._options, self._start, self._n_own = options, start, n_own
        self._sizes: dict[str, int] = {}
        """Bytes of models that were loaded once."""
        self._loaded: dict[str, Loaded] = {}
        self._turn = asyncio.Lock()
        """Whoever holds it decides which model leaves: others wait in their order."""
        self._is_idle = asyncio.Condition()
        self._is_full = False
        """Whether somebody waits until a model is idle."""

    def all(self) -> list[Loaded]:
        """The models that are loaded, the one used last first."""
        return sorted(self._loaded.values(), key=lambda one: -one.used)

    def get(self, model: Found) -> Loaded | None:
        return self._loaded.get(model.path)

    @asynccontextmanager
    async def using(self, model: Found, keep_s: float | None = None) -> AsyncIterator[Loaded]:
        """A `with` block in which a model is loaded and stays. keep_s: how long it stays behind it.

        Raises ApiError if it cannot be loaded.
        """
        one = await self._entered(model)
        try:
            try:
                await asyncio.shield(asyncio.wrap_future(one.child.ready))
            except RuntimeError as error:
                raise ApiError(500, f"{model.name} cannot be loaded: {error}") from None
            yield one
        finally:
            if keep_s is not None:
                one.keep_s = keep_s
            one.n_active, one.used = one.n_active - 1, time.monotonic()
            one.measure()
            self._sizes[model.path] = one.size
            async with self._is_idle:
                self._is_idle.notify_all()

    async def _entered(self, model: Found) -> Loaded:
        """The model, which does not leave while it is active."""
        one = self._loaded.get(model.path)
        if one is None or one.is_over or self._is_full:
            async with self._turn:
                one = await self._present(model, self._options.models_autoload)
                one.n_active += 1
        else:
            one.n_active += 1
        return one

    async def load(self, model: Found) -> None:
        """Have a model loaded; it is not waited for."""
        async with self._turn:
            await self._present(model, True)

    async def _present(self, model: Found, may_load: bool) -> Loaded:
        """The model, loaded or on its way. Raises ApiError."""
        before = self._loaded.get(model.path)
        if before is not None and not before.is_over:
            return before
        if before is not None:
            await self.unload(before)
        if not may_load:
            raise ApiError(400, f"{model.name} is not loaded: POST /models/load first")
        await self._make_room(model)
        size = self._expected(model)
        one = Loaded(model, self._start(model), self._options.keep_alive, size)
        self._loaded[model.path] = one
        return one

    async def unload(self, one: Loaded) -> None:
        """Its process ends, and has written its conversations down."""
        one.is_leaving = one.is_leaving or one.child.exit_code is None
        await asyncio.to_thread(one.child.end)
        if self._loaded.get(one.model.path) is one:
            del self._loaded[one.model.path]

    async def _make_room(self, model: Found) -> None:
        """Models that are not used leave until there is room, the one used longest ago first.

        Raises ApiError for a model that is too large by itself.
        """
        n_files, limit = file_bytes(model.path), self._options.models_memory
        if limit is not None and n_files > limit:
            raise ApiError(
                400,
                f"{model.name} has {size_text(n_files)}, and models may take {size_text(limit)}:"
                " see --models-memory",
            )
        while self._loaded and not self._has_room(self._expected(model)):
            there = self.all()
            leaving = [one for one in there if one.is_over]
            idle = [one for one in there if not one.n_active]
            if leaving or idle:
                await self.unload((leaving or idle)[-1])
            else:
                await self._until_idle()

    def _expected(self, model: Found) -> int:
        """What it took the last time, or its files and a process take."""
        return self._sizes.get(model.path, file_bytes(model.path) + self._n_own)

    async def _until_idle(self) -> None:
        self._is_full = True
        try:
            async with self._is_idle:
                await self._is_idle.wait()
        finally:
            self._is_full = False

    def _has_room(self, n_bytes: int) -> bool:
        most, limit = self._options.models_max, self._options.models_memory
        if most and len(self._loaded) >= most:
            return False
        if limit is not None:
            return sum(one.size for one in self._loaded.values()) + n_bytes <= limit
        try:
            return memory_free() >= n_bytes
        except EdgeKVError:  # the system does not say
            return True

    async def tend(self) -> None:
        """Have models leave that nobody uses any more, or that have grown too much; forever."""
        while True:
            await asyncio.sleep(LOOK_S)
            for one in reversed(self.all()):
                if not one.n_active and not one.is_leaving and self._must_leave(one):
                    await self.unload(one)

    def _must_leave(self, one: Loaded) -> bool:
        if one.child.exit_code is not None:
            return True
        if not one.is_ready:
            return False
        limit, sizes = self._options.models_memory, [x.size for x in self._loaded.values()]
        is_much = limit is not None and len(sizes) > 1 and sum(sizes) > limit
        return is_much or one.left_s <= 0

    async def end(self) -> None:
        """All processes end."""
        await asyncio.gather(*(self.unload(one) for one in self.all()), return_exceptions=True)
