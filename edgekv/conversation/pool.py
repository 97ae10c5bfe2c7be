"""`Conversations`: one model, and the conversations that take turns on it."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base.beginnings import n_shared
from edgekv.base.machine import memory_free
from edgekv.conversation import parked, session, state
from edgekv.conversation.aside import aside, can_wait
from edgekv.conversation.best import Best, best
from edgekv.conversation.holder import Holder
from edgekv.conversation.losses import Losses
from edgekv.conversation.parked import Parked
from edgekv.conversation.settings_digest import base_of, settings_of
from edgekv.conversation.shelf import Shelf, is_of, note_of
from edgekv.conversation.state import State
from edgekv.conversation.talk import End, Entry, Talk
from edgekv.errors import BadInput, EdgeKVError
from edgekv.memory.limit import APPEND_MAX

Result = TypeVar("Result")

CACHE_RAM, CACHE_DISK = 8 << 30, 16 << 30
"""Bytes, where nothing is said."""
FEW = 16
"""Tokens that are read again rather than kept: a reply may be cut into other tokens."""
SEVERAL = "it is of several settings"
N_BOUNDARIES, N_BOUNDARIES_MOST = 8, 32
"""States that are kept of one conversation's beginnings: in any case, and where together they take
at most a quarter of what waiting conversations may take. An agent has one behind each turn.
"""


class Conversations:
    """Conversations that take turns on one model, so that none is read again when it goes on.

    Before a prompt is read, `use` makes the conversation current that shares most with it. The
    others wait in memory or, least recently used first, in files of a folder.

    cache_ram: bytes that waiting conversations may take; None: 8 GiB, or half of what the machine
    has free if that is less. cache_disk: a folder for what does not fit, and for `flush`; None:
    what does not fit is forgotten. cache_disk_size: bytes of its files together, and of the
    archives of conversations that wait in memory; None: 16 GiB.

    Files of another model, method, ratio or version are left alone; damaged ones are removed.
    Raises BadInput if the model has conversations already, or the folder cannot be made.
    """

    def __init__(
        self,
        llm: Holder,
        cache_ram: int | None = None,
        cache_disk: str | None = None,
        cache_disk_size: int | None = None,
    ) -> None:
        if cache_ram is None:
            cache_ram = min(CACHE_RAM, memory_free() // 2)
        if cache_disk_size is None:
            cache_disk_size = CACHE_DISK
        for name, size in (("cache_ram", cache_ram), ("cache_disk_size", cache_disk_size)):
            if size < 0:
                raise BadInput(f"{name} {size} is no size; give bytes, 0 or more")
        with llm.guard.use():
            if llm.pool is not None:
                raise BadInput("this model has conversations already: close them first")
            self._llm, self._cache_ram, self._most_archived = llm, cache_ram, cache_disk_size
            self._settings: tuple[object, str] = (None, "")
            self.losses = Losses(is_usual=cache_ram == 0 and cache_disk is None)
            self._shelf = None if cache_disk is None else Shelf(cache_disk, cache_disk_size)
            self._waiting: list[Entry] = []
            if self._shelf:
                self._waiting += self._shelf.entries(llm, self.losses)
            self._current = self._fresh()
            self._is_closed = self._is_answer = False
            self._last = max((x.last_used for x in self._waiting), default=0.0)
            llm.pool = self
            llm.turn.checkpoints.clear()
            self._at_exit = _closing(weakref.ref(self))
            atexit.register(self._at_exit)

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that what waits takes; at most cache_ram, but for what is held."""
        return sum(entry.n_bytes for entry in self._waiting)

    @property
    def n_bytes_archive(self) -> int:
        """Of disk that the archives of waiting conversations take, what several have in common
        counted several times; at most cache_disk_size.
        """
        return sum(entry.n_bytes_archive for entry in self._waiting)

    @property
    def current_id(self) -> str:
        """The id of the conversation that the model goes on with."""
        return self._current.id

    # ---- taking turns

    def use(
        self,
        tokens: Sequence[int],
        name: str | None = None,
        cuts: Iterable[int] = (),
        is_answer: bool = False,
        is_fresh: bool = False,
    ) -> int:
        """Make the conversation current that shares most with a prompt.

        Returns the number n of its tokens that need not be read: `eval(tokens[n:])` reads the rest,
        and `generate(tokens)` does so by itself. A conversation that would go on differently is
        kept, and the prompt gets a branch of it. An answer of this thread that is under way ends.

        name: a name for the conversation; another one of this name loses it. cuts: numbers of
        tokens behind which another prompt may go on differently, such as the system prompt's; the
        prompt is read in parts that end there. is_answer: the tokens end in the middle of an
        answer; is_fresh: the prompt is read anew, so that n is 0.
        Raises EdgeKVError while another thread uses the model or writes an answer.
        """
        with self._between_answers():
            if is_fresh:
                self._park_current()
                self._begin_turn(0, len(tokens), name, cuts)
                return 0
            return self.go_on(tokens, name, cuts, is_answer)

    @contextmanager
    def _between_answers(self) -> Iterator[None]:
        """A `with` block in which another conversation may become current: an answer of this thread
        that is under way ends. Raises EdgeKVError while another thread uses the model.
        """
        with self._llm.guard.use():
            self._check_open()
            self._llm.stop_answer()
            self._look()
            yield

    def resume(self, id: str, tokens: Sequence[int], cuts: Iterable[int] = ()) -> int | None:
        """Make a conversation current again in which an answer is under way; see `hold`. tokens:
        its prompt, and what was written. Returns how many of them need not be read, None if the
        conversation is gone or is another one now: then `use` them.
        """
        with self._between_answers():
            prompt = np.asarray(tokens, np.int32)
            entry = next((x for x in self._known if x.id == id and x.is_held), None)
            if entry is None:
                return None
            n = len(entry.tokens)
            if entry.settings == self._key() and 0 < n == n_shared(prompt, entry.tokens):
                try:
                    if entry is not self._current:
                        self._open(entry, False)
                    if n < len(prompt) or self._has_logits(prompt):
                        self._begin_turn(n, len(prompt), None, cuts, True)
                        return n
                except EdgeKVError as error:
                    self.losses.read_again(entry, str(error))
            entry.is_held = entry.is_under_way = False
            return None

    def go_on(
        self, tokens: Sequence[int], name: str | None, cuts: Iterable[int], is_answer: bool = False
    ) -> int:
        """What `use` does, for the prompt of an answer that begins now."""
        prompt = np.asarray(tokens, np.int32)
        self._look()
        if not len(prompt):
            return 0
        n = self._open_best(prompt, name)
        self._begin_turn(n, len(prompt), name, cuts, is_answer)
        return n

    def _begin_turn(
        self, n: int, n_prompt: int, name: str | None, cuts: Iterable[int], is_answer: bool = False
    ) -> None:
        """A prompt is going to be read behind its first n tokens."""
        self._name_current(name)
        self._current.last_used = self._now()
        self._current.is_under_way, self._is_answer = True, is_answer
        self._current.turns = {end: x for end, x in self._current.turns.items() if end <= n}
        if n < n_prompt and not is_answer:
            self.read_behind(n, n_prompt)
        self._llm.turn.checkpoints.begin_turn(n, n_prompt)
        self._cut(n, {x for x in cuts if n < x < n_prompt})

    def read_behind(self, n: int, n_prompt: int) -> None:
        """A prompt of n_prompt tokens is going to be read behind the n tokens of the current
        conversation. What it sees of them is what it will see when it is asked again.
        """
        if self._llm.engine is not None:
            self._llm.engine.store.round_rows()
        else:  # an earlier prompt's last token gives nearly its logits
            self._current.turns.clear()
        self._current.has_turn(n, n_prompt)

    # ---- several conversations in one pass over the weights

    def together(self, ids: Sequence[str]) -> list[str]:
        """Of these conversations those that `step` can give a token now; none if that is one."""
        with self._llm.guard.use():
            self._look()
            most = self._llm.context_params.n_seq_max - 1
            found = [id for id in ids if self._n_to_append(id) > 0][:most]
            # recurrent states lie in this order, from step to step
            found.sort(key=lambda id: (id != self._current.id, id))
        return found if len(found) > 1 else []

    def _n_to_append(self, id: str) -> int:
        if id == self._current.id:
            return parked.n_to_append(self._llm)
        key = self._key()
        here = (x for x in self._waiting if x.id == id and x.settings == key)
        return next((x.parked.n_to_append for x in here if x.parked), 0)

    def step(self, tokens: Mapping[str, int]) -> None:
        """Evaluate a token behind each of some conversations that `together` found, by their ids,
        in one pass over the weights. All stay where they are. The model's logits of the i-th have
        the index i.

        Raises EdgeKVError; all are as before then.
        """
        llm = self._llm
        with llm.guard.use():
            self._look()
            known = {x.id: x for x in self._known}
            entries = [known[id] for id in tokens]
            places = [_place_of(x) for x in entries]
            native.Place.step(llm.ctx, places, list(tokens.values()))
            llm.n_evaluated += len(entries)
            forgets = parked.forgets(llm)
            for entry, token in zip(entries, tokens.values()):
                entry.path = entry.last = None
                entry.last_used = self._now()
                if entry is self._current:
                    llm.input_ids[llm.n_tokens] = token
                    llm.n_tokens += 1
                    continue
                assert isinstance(entry.parked, parked.Aside)
                entry.parked = entry.parked.with_token(token, forgets)
                entry.tokens = entry.parked.tokens
                entry.set_reach(entry.parked.reach)
            llm.has_logits = False  # the last ones may be another's

    def reachable(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt `use` would find; nothing changes."""
        with self._llm.guard.use():
            self._look()
            prompt = np.asarray(tokens, np.int32)
            return self._best(prompt, None).n if len(prompt) else 0

    def tokens(self) -> list[NDArray[np.int32]]:
        """int32 [n] of each conversation and beginning to go on from, the one used last first."""
        with self._llm.guard.use():
            self._look()
            known = [x for x in self._known if x.settings == self._key()]
            return [x.tokens for x in sorted(known, key=lambda x: -x.last_used)]

    def _best(self, prompt: NDArray[np.int32], name: str | None) -> Best:
        others = [x for x in self._waiting if x.settings == self._key()]
        return best(self._llm, prompt, name, self._current, others)

    def _cut(self, n: int, cuts: set[int]) -> None:
        """Behind the n tokens that are there, the prompt is read in parts that end at `cuts`."""
        llm, checkpoints = self._llm, self._llm.turn.checkpoints
        checkpoints.is_eager, checkpoints.at = parked.forgets(llm), []
        if llm.engine is None and not checkpoints.is_eager:
            return  # it can be taken back anywhere
        # fewer tokens are read again in no time, and whoever goes on from a cut goes the same way
        for x in sorted(cuts):
            if x > [n, *checkpoints.at][-1] + APPEND_MAX:
                checkpoints.at.append(x)
        if checkpoints.is_eager and n and len(checkpoints.at) < len(cuts):
            self.keep_beginning(llm)

    def _open_best(self, prompt: NDArray[np.int32], name: str | None) -> int:
        """Make the best conversation current, and take it back to what it shares with `prompt`.
        Returns how many tokens of the prompt it then holds.
        """
        while True:
            entry, n, n_have = self._best(prompt, name)
            if entry is None:
                self._park_current()
                return 0
            if entry is not self._current:
                try:
                    self._open(entry, self._keeps(entry, n_have, name))
                except EdgeKVError as error:  # its file is damaged
                    self.losses.read_again(entry, str(error))
                    continue
            elif self._keeps(entry, n_have, name):
                self._copy_current()
            now = self._current
            if not self._take_back(n_have):
                self.losses.read_again(now, f"it cannot go back to {n_have} tokens")
                return 0
            if n == len(prompt) and not self._has_logits(prompt):
                continue
            return n

    def _has_logits(self, prompt: NDArray[np.int32]) -> bool:
        """Whether the model has the logits behind a prompt, or gets them back."""
        now = self._current
        now.tokens, end = prompt, now.end_of(prompt)
        if self._llm.has_logits or (end and parked.put_logits(self._llm, end.logits)):
            return True
        now.prompt = now.last = None
        return False

    def _keeps(self, entry: Entry, n_have: int, name: str | None) -> bool:
        """Whether a conversation is kept beside one that goes on from its first n_have tokens."""
        n_lost = len(entry.tokens) - n_have
        is_another = name is not None and entry.name is not None and name != entry.name
        stays = entry.is_boundary or entry.is_kept or entry.is_held
        return stays or is_another or n_lost > min(FEW, n_have)

    def _take_back(self, n: int) -> bool:
        """Go back to the current conversation's first n tokens; where that fails it is empty."""
        llm = self._llm
        if llm.back_to(n):
            return True
        llm.reset()
        self._current = self._fresh()
        return False

    def renew(self, changed: AbstractContextManager[object], why: str) -> None:
        """Have the model changed by a `with` block: to other settings, or another context. What was
        read with those before is forgotten, in memory and on disk, since nothing can go on from it.

        why: for the log. Raises what the block raises; all conversations are then as before.
        """
        with self._between_answers():
            context = self._llm.ctx
            with changed:
                is_other = self._llm.ctx is not context
                for entry in [x for x in self._known if is_other or x.settings != self._key()]:
                    self._erase(entry)
                    if len(entry.tokens) and not entry.is_boundary:
                        self.losses.read_again(entry, why)

    # ---- an answer, and its end

    def hold(self) -> None:
        """The current conversation's answer is going to be written in turns with others. Until
        `end_answer` or `give_up` it waits in memory, for which others have to leave: without it,
        all of it would have to be read again in each turn.
        """
        self._current.is_held = True

    def end_answer(self, id: str | None = None) -> None:
        """The answer behind the current conversation is complete. Others of which it holds every
        token are forgotten, and it takes the place of the longest: its prompt was read again.

        id: of the conversation, which `make_current` makes the current one first.
        """
        with self._llm.guard.use():
            if id is not None:
                self.make_current(id)
            self._look()
            now = self._current
            now.is_under_way = now.is_held = False
            held = [x for x in self._waiting if x.may_go and now.has_all_of(x)]
            if held and not (self._shelf and self._shelf.knows(now)):
                longest = max(held, key=lambda x: len(x.tokens))
                held.remove(longest)
                self._waiting.remove(longest)
                self.losses.part_of(now, longest)
                now.id = longest.id  # its file stays until there is a later one
            for x in held:
                self._erase(x)
                self.losses.part_of(x, now)

    def give_up(self, id: str) -> None:
        """The answer behind a conversation is stopped, if it is not complete. The conversation is
        forgotten if it goes nowhere that another one does not go.
        """
        with self._llm.guard.use():
            self._look()
            known = [x for x in self._known if not x.is_boundary]
            entry = next((x for x in known if x.id == id and x.is_under_way), None)
            if entry is None:
                return
            entry.is_under_way = entry.is_held = False
            self._make_room(0)
            others = [x for x in known if x.has_all_of(entry) and x.covers(entry)]
            if others and entry.may_go:
                self._erase(entry)
                if len(entry.tokens):
                    self.losses.part_of(entry, others[0])

    # ---- while a prompt is read

    def can_wait(self) -> bool:
        """Whether a prompt is read that `meanwhile` can set aside: compressed, on the CPU."""
        return can_wait(self._llm)

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """A `with` block inside of `kv_progress`, in which `use` takes other conversations than the
        one whose prompt is being read, if `can_wait`. See `edgekv.conversation.aside` for errors.
        """
        reader, is_answer = self._current, self._is_answer
        with aside(self._llm):
            self._current = self._fresh()
            try:
                yield
            finally:
                try:
                    self._look()
                    self._park_current()
                finally:
                    self._current, self._is_answer = reader, is_answer

    # ---- the current conversation

    @property
    def _known(self) -> list[Entry]:
        """All there are, the current one first."""
        return [self._current, *self._waiting]

    def _fresh(self) -> Entry:
        return Entry(np.zeros(0, np.int32), self._key())

    def _look(self) -> None:
        """See what the model holds: others than `use` may have changed it."""
        llm, now, key = self._llm, self._current, self._key()
        if llm.n_tokens and not self._is_in_step():
            llm.reset()
        tokens = llm.tokens
        if len(now.tokens) and not n_shared(now.tokens, tokens):
            self.losses.drop(now, "the model was reset, or a step failed", logging.INFO)
            now = self._current = self._fresh()
        if not np.array_equal(now.tokens, tokens):
            now.path = None  # the file, if there is one, is of an earlier state
        if now.settings != key:
            now.settings = "" if len(tokens) else key  # of several settings: fits none
        now.tokens, now.last = tokens, None
        now.set_reach(parked.reach(llm))

    def _is_in_step(self) -> bool:
        """Whether the cache holds the tokens that the model says, or can be made to."""
        llm = self._llm
        llm.settle()
        n_more = state.n_cached(llm) - llm.n_tokens
        return n_more == 0 or (n_more > 0 and native.take_back(llm.ctx, llm.n_tokens))

    def _park_current(self) -> None:
        """Let the current conversation wait; a fresh one is current."""
        now, self._current = self._current, self._fresh()
        if len(now.tokens):
            self._store_if_one(now, lambda: parked.park(self._llm))
        self._llm.reset()

    def _copy_current(self) -> None:
        """Let a copy of the current conversation wait; what is current is a branch of it."""
        now, self._current = self._current, self._fresh()
        self._branch_off(now)
        self._store_if_one(now, lambda: parked.copied(self._llm))

    def _name_current(self, name: str | None) -> None:
        if name is None:
            return
        for entry in self._waiting:
            if entry.name == name:
                entry.name = None
        self._current.name = name

    # ---- those that wait

    def _open(self, entry: Entry, stays: bool) -> None:
        """Put a conversation that waits into the model, in the place of the current one, which
        waits then.

        stays: it waits on, and the current one is a branch of it. Raises EdgeKVError if it cannot
        be had; it is forgotten.
        """
        self._waiting.remove(entry)  # it makes no room, it goes
        entry.last_used = self._now()
        if self._shelf:
            self._shelf.stamp(entry)
        self._park_current()
        try:
            self._put(entry, stays)
        except EdgeKVError:
            self._llm.reset()
            raise
        if stays:
            self._branch_off(entry)
            self._waiting.append(entry)
            self._make_room(0)
        else:
            entry.parked, self._current = None, entry

    def _put(self, entry: Entry, stays: bool) -> None:
        waits = entry.parked
        if waits is None:
            assert self._shelf is not None
            self._shelf.read(self._llm, entry)
        elif not (waits.put_copy(self._llm) if stays else waits.put(self._llm)):
            raise EdgeKVError("there is no memory for it")

    def _branch_off(self, entry: Entry) -> None:
        """The current conversation is as `entry`, and apart from it."""
        now = self._current
        now.tokens, now.least, now.mark = entry.tokens, entry.least, entry.mark
        now.anywhere = entry.anywhere
        now.prompt, now.last, now.turns = entry.prompt, entry.last, dict(entry.turns)

    def _store_if_one(self, entry: Entry, taken: Callable[[], Parked]) -> None:
        """`_store`, for a conversation that may be of several settings."""
        if entry.settings:
            self._store(entry, taken)
        else:
            self.losses.drop(entry, SEVERAL)

    def _store(self, entry: Entry, taken: Callable[[], Parked]) -> None:
        """Let a conversation, which the model holds, wait in memory, or on disk if it is too large.

        taken: takes it out of the model, or copies it.
        """
        if not entry.is_boundary and (values := parked.logits(self._llm)) is not None:
            entry.last = End(entry.tokens, values)
        n_bytes = parked.size(self._llm) + entry.tokens.nbytes + 8 * self._llm.n_vocab()
        n_archive = parked.archive_size(self._llm)
        entry.set_reach(parked.reach_of_copy(self._llm))
        if entry.is_held or (n_bytes <= self._cache_ram and n_archive <= self._most_archived):
            self._make_room(n_bytes, n_archive)
            why = self._take(entry, taken)
        elif entry.path is None:
            why = f"it takes {n_bytes:,} bytes, more than cache_ram"
            if n_bytes <= self._cache_ram:
                why = f"its archive takes {n_archive:,} bytes, more than cache_disk_size"
            n_bytes += n_archive
            why = self._written(entry, n_bytes, lambda: state.take(self._llm), why)
        else:
            why = ""
        if entry.parked is None:
            entry.leave_memory()
        if entry.parked or entry.path:
            self._waiting.append(entry)
        else:
            self.losses.drop(entry, why)
        self._forget_gone()

    def _take(self, entry: Entry, taken: Callable[[], Parked]) -> str:
        """Let it wait in memory. Returns why it cannot."""
        try:
            entry.parked = taken()
        except MemoryError:
            return "there is no memory for it"
        except EdgeKVError as error:
            return str(error)
        entry.set_reach(entry.parked.reach)
        return ""

    def _make_room(self, n_bytes: int, n_archive: int = 0) -> None:
        """n_bytes more fit into memory, and n_archive of archives on the disk."""

        def is_full() -> bool:
            if self.n_bytes + n_bytes > self._cache_ram:
                return True
            archives = self.n_bytes_archive + n_archive
            return n_archive > 0 and archives > self._most_archived

        while is_full() and (others := [x for x in self._waiting if x.parked and not x.is_held]):
            oldest = min(others, key=lambda x: x.last_used)
            why = self._write(oldest)
            oldest.leave_memory()
            if oldest.path is None:
                self._waiting.remove(oldest)
                self.losses.drop(oldest, why, logging.WARNING if self._shelf else logging.INFO)
            self._forget_gone()

    def _write(self, entry: Entry) -> str:
        """Have a file of a conversation that waits. Returns why there is none."""
        waiting = entry.parked
        if (self._shelf and self._shelf.has(entry)) or waiting is None:
            return ""
        if entry.settings != self._key():  # a file says what the model is like now
            return "it is of other settings than the model now"
        why = "cache_ram is full"
        n_bytes = entry.n_bytes + entry.n_bytes_archive
        return self._written(entry, n_bytes, lambda: waiting.state(self._llm), why)

    def _written(self, entry: Entry, n_bytes: int, taken: Callable[[], State], why: str) -> str:
        """Have a file of a conversation. Returns why there is none; why: it cannot be in memory."""
        if self._shelf is None:
            return f"{why}, and there is no cache_disk"
        try:
            self._shelf.write(self._llm, entry, n_bytes, taken)
        except EdgeKVError as error:  # a full disk must not end an answer
            return f"{why}; {error}"
        return ""

    def _forget_gone(self) -> None:
        """Of those whose file had to go, only what is in memory is left."""
        for entry in [x for x in self._waiting if not (x.parked or x.path)]:
            self._waiting.remove(entry)
            self.losses.drop(entry, "cache_disk is full, or its file is gone", logging.INFO)

    def keep_end(self, llm: Holder) -> None:
        """Keep what is needed to answer the prompt that was read once more: its last token alone
        gives other logits.

        A short one, or its short end, waits in f16 and is rounded later: it is read again.
        """
        if self._is_answer:
            return
        now, kv = self._current, llm.engine
        now.prompt = None
        if kv is not None and any(layer.waits for layer in kv.store.layers):
            begin = max(now.turns.get(llm.n_tokens, 0), kv.store.memory().boundary)
            if begin < llm.n_tokens:
                now.has_turn(begin, llm.n_tokens)
                return
        values = parked.logits(llm)
        if values is not None:
            now.prompt = End(llm.tokens, values)

    def keep_beginning(self, llm: Holder) -> None:
        """Keep the current conversation's beginning, which it cannot be taken back to later."""
        now = Entry(llm.tokens, self._key(), is_boundary=True)
        now.prompt, now.turns = self._current.prompt, dict(self._current.turns)
        now.set_reach(parked.reach_of_copy(llm))
        now.last_used = self._now()
        mine = [x for x in self._waiting if x.settings == now.settings]
        known = [x for x in mine if x.covers(now)]
        for x in known:
            x.last_used = now.last_used
        if known:
            return
        for x in mine:
            if x.is_boundary and now.covers(x):
                self._erase(x)
        before = [x for x in mine if x.is_boundary and x in self._waiting and now.begins_with(x)]
        while self._are_many(before):
            before.remove(gone := _cheapest(before))
            self._erase(gone)
        self._store(now, lambda: parked.copied(llm))

    def _are_many(self, beginnings: Sequence[Entry]) -> bool:
        """Whether no other beginning of the same conversation is kept beside these."""
        n = len(beginnings)
        n_bytes = sum(x.n_bytes for x in beginnings)
        n_archive = sum(x.n_bytes_archive for x in beginnings)
        is_much = 4 * n_bytes > self._cache_ram or 4 * n_archive > self._most_archived
        return n >= N_BOUNDARIES_MOST or (n >= N_BOUNDARIES and is_much)

    def _erase(self, entry: Entry) -> None:
        """Forget a conversation, in memory and on disk. In the place of the current one is a fresh
        one.
        """
        if entry is self._current:
            self._llm.reset()
            self._current = self._fresh()
        elif entry in self._waiting:
            self._waiting.remove(entry)
        entry.parked = None
        if self._shelf:
            self._shelf.erase(entry)

    # ---- looking after them

    def list(self) -> Sequence[Talk]:
        """All conversations, the one used last first."""
        with self._llm.guard.use():
            self._check_open()
            self._look()
            found = [self._talk(x) for x in self._waiting if not x.is_boundary]
            if len(self._current.tokens):
                found.append(self._talk(self._current))
        return sorted(found, key=lambda x: -x.last_used)

    def _talk(self, entry: Entry) -> Talk:
        return Talk(
            id=entry.id,
            name=entry.name,
            n_tokens=len(entry.tokens),
            n_bytes=parked.size(self._llm) if entry is self._current else entry.n_bytes,
            last_used=entry.last_used,
            is_current=entry is self._current,
            on_disk=entry.path is not None,
        )

    def look(self, id: str, function: Callable[[NDArray[np.int32]], Result]) -> Result:
        """What a function makes of a conversation's tokens while the store holds its rows. All
        conversations stay where they are.

        Raises BadInput if there is none of this id, if its file is damaged, and where the cache is
        not compressed.
        """
        with self._llm.guard.use():
            entry = self._find(id)
            if self._llm.engine is None:
                raise BadInput("every token is kept: this cache is not compressed")
            if entry is self._current:
                return function(entry.tokens)
            if entry.parked is None:
                assert entry.path is not None
                rows: Any = session.read(self._llm, entry.path)
            else:
                rows = entry.parked.rows
            with parked.shown(self._llm, rows):
                return function(entry.tokens)

    def save(self, id: str) -> None:
        """Write a conversation to the folder, where a later process finds it.

        Raises BadInput if there is no such conversation, no folder, or no room in it.
        """
        with self._llm.guard.use():
            entry = self._find(id)
            if self._shelf is None:
                raise BadInput("there is no folder for conversations: give cache_disk")
            why = self._save(entry)
            if why:
                raise BadInput(
                    f"conversation {id} cannot be written to '{self._shelf.folder}' ({why}): give a"
                    " larger cache_disk_size, or free space there"
                )

    def _save(self, entry: Entry) -> str:
        """Have a file of it. Returns why there is none."""
        if entry is not self._current:
            why = self._write(entry)
        elif self._shelf and self._shelf.has(entry):
            why = ""
        elif not entry.settings:
            why = SEVERAL
        else:
            entry.set_reach(parked.reach_of_copy(self._llm))
            n_bytes = parked.size(self._llm) + parked.archive_size(self._llm)
            why = self._written(entry, n_bytes, lambda: state.take(self._llm), "")
        self._forget_gone()
        return why.removeprefix("; ")

    def save_as(self, id: str, path: str) -> int:
        """Write a conversation to a file of this name, which `open_file` reads. Returns how many
        tokens it has.

        Raises BadInput if there is no such conversation, or the file cannot be written, which is
        then as before.
        """
        with self._llm.guard.use():
            entry = self._find(id)
            waits = entry.parked
            if waits is None:
                self.make_current(entry.id)
                entry.set_reach(parked.reach_of_copy(self._llm))
            taken = (lambda: waits.state(self._llm)) if waits else (lambda: state.take(self._llm))
            session.write(self._llm, path, taken, note_of(self._llm, entry))
            return len(entry.tokens)

    def open_file(
        self, path: str, check: Callable[[Any], object] | None = None, is_kept: bool = False
    ) -> Talk:
        """Make the conversation in a file the current one; the one that was waits.

        is_kept: it stays as it is: a prompt that goes on from it goes on from a copy.
        check: called with the file's note before anything changes, raises an EdgeKVError to refuse
        the file; None: it has to be one of `save_as`, of the settings now.
        Raises BadInput for a file that cannot be used; all conversations are then as before.
        """

        def fits(note: Any) -> None:
            if check is None:
                self._check_settings(note, path)
            else:
                check(note)
            self._park_current()

        with self._between_answers():
            session.load(self._llm, path, fits)
            self._look()
            now = self._current
            now.last_used, now.is_kept = self._now(), is_kept
            for x in list(self._waiting):
                is_same = x.settings == now.settings and np.array_equal(x.tokens, now.tokens)
                if is_same and not x.is_boundary:  # it takes its place
                    now.id = x.id
                    self._erase(x)
            return self._talk(now)

    def _check_settings(self, note: Any, path: str) -> None:
        if not is_of(note, self._key(), base_of(self._llm)):
            raise BadInput(
                f"'{path}' was saved with another method, other limits or another version of"
                " edgekv: save the conversation again"
            )

    def make_current(self, id: str) -> None:
        """Make a conversation the current one, whole as it is; the one that was waits.

        Raises BadInput if there is none of this id, or its file is damaged.
        """
        with self._llm.guard.use():
            entry = self._find(id)
            if entry is self._current:
                return
            self._llm.stop_answer()
            try:
                self._open(entry, False)
            except EdgeKVError as error:
                self.losses.drop(entry, str(error))
                raise BadInput(
                    f"conversation {id} cannot be read from its file ({error}): it is forgotten"
                ) from None

    def erase(self, id: str) -> None:
        """Forget a conversation, in memory and on disk, and the beginnings of it that no other
        conversation has.

        Raises BadInput if there is none of this id.
        """
        with self._llm.guard.use():
            entry = self._find(id)
            self._llm.stop_answer()
            others = [x for x in self._known if not x.is_boundary]
            others.remove(entry)
            for x in list(self._waiting):
                mine = x.is_boundary and entry.begins_with(x)
                if mine and not any(other.begins_with(x) for other in others):
                    self._erase(x)
            self._erase(entry)

    def flush(self) -> None:
        """Write everything that waits, and the current conversation, to the folder.

        Nothing happens without a folder. What the folder has no room for stays in memory alone.
        """
        with self._llm.guard.use():
            self._check_open()
            self._look()
            if self._shelf is None:
                return
            for entry in sorted(self._waiting, key=lambda x: x.last_used):
                if entry in self._waiting:
                    self._flush(entry)
            if len(self._current.tokens):
                self._flush(self._current)

    def _flush(self, entry: Entry) -> None:
        why = self._save(entry)
        if why:
            self.losses.unwritten(entry, why)

    def close(self) -> None:
        """`flush`, and give the memory back. The model stays as it is."""
        if self._is_closed:
            return
        atexit.unregister(self._at_exit)
        if self._llm.guard.is_closed:
            self._is_closed, self._waiting = True, []
            return
        with self._llm.guard.use():
            try:
                self.flush()
            finally:
                self._is_closed, self._waiting = True, []
                self._llm.pool = None
                self._llm.turn.checkpoints.at = []

    # ---- small things

    def _check_open(self) -> None:
        if self._is_closed:
            raise EdgeKVError("these conversations are closed: make new ones")

    def _find(self, id: str) -> Entry:
        """A conversation by its id."""
        self._check_open()
        self._look()
        for entry in self._known:
            if entry.id == id and not entry.is_boundary and len(entry.tokens):
                return entry
        raise BadInput(f"there is no conversation '{id}'; list() has their ids")

    def _key(self) -> str:
        """The digest of the settings that the cache has now."""
        kv = self._llm.engine
        of = None if kv is None else kv.settings
        if self._settings[0] is not of or not self._settings[1]:
            self._settings = of, settings_of(self._llm)
        return self._settings[1]

    def _now(self) -> float:
        """The time, later than that of anything before."""
        self._last = max(time.time(), self._last + 1e-6)
        return self._last


def _closing(pool: weakref.ref[Conversations]) -> Callable[[], None]:
    """Closes a pool, if there still is one: when Python is about to end, and can still write."""

    def close() -> None:
        found = pool()
        if found is not None:
            with suppress(EdgeKVError):
                found.close()

    return close


def _place_of(entry: Entry) -> native.Place | None:
    """Where a conversation of `together` is; None: in the context."""
    rows = entry.parked.rows if entry.parked else None
    assert not isinstance(rows, State)
    return rows


def _cheapest(beginnings: Iterable[Entry]) -> Entry:
    """Of beginnings of each other the one without which fewest tokens are read again."""
    inner = sorted(beginnings, key=lambda x: len(x.tokens))
    costs = [len(x.tokens) - n for x, n in zip(inner, [0, *(len(x.tokens) for x in inner)])]
    return inner[costs.index(min(costs))]
