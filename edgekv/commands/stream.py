"""A streamed completion: its text piece by piece, its cost, and how it stops. Knows no terminal."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from edgekv.errors import BadInput, Cancelled, ContextFull, EdgeKVError

if TYPE_CHECKING:
    from edgekv import Llama

Chunks = Generator[dict[str, Any], None, None]
"""What `create_completion` and `create_chat_completion` return with stream=True."""


class Piece(NamedTuple):
    """Text as it comes: of a thought, or of the answer."""

    text: str
    is_thought: bool = False


def pieces_of(choice: dict[str, Any]) -> Iterator[Piece]:
    """The text in a chunk's choice."""
    said = choice.get("delta", {})
    if said.get("reasoning_content"):
        yield Piece(said["reasoning_content"], True)
    if text := choice.get("text") or said.get("content"):
        yield Piece(text)


class Stream:
    """Iterate over it once for the pieces of text; the numbers are there when that has ended.

    Iterating raises Cancelled if it was stopped while its prompt was read, BadInput if the prompt
    cannot be read.
    """

    def __init__(self, llm: Llama, begin: Callable[[], Chunks]) -> None:
        self._llm = llm
        self._begin = begin
        self._reading = False
        self._stopped = False
        self.has_begun = False
        """The prompt has been read: the model has seen this turn."""
        self.n_read = 0
        """Tokens of the prompt that were not in the cache yet."""
        self.read_s = 0.0
        self.n_decoded = 0
        """Decoding steps since the first chunk."""
        self.decode_s = 0.0
        self.finish = ""
        """stop: the model ended; length: a limit or the end of the context; stopped: the user."""

    @property
    def read_tps(self) -> float:
        return self.n_read / self.read_s if self.read_s else 0.0

    @property
    def write_tps(self) -> float:
        return self.n_decoded / self.decode_s if self.decode_s else 0.0

    def stop(self) -> None:
        """Stops as soon as possible. May be called from a signal handler."""
        self._stopped = True
        if self._reading:
            self._llm.kv_cancel()

    def __iter__(self) -> Iterator[Piece]:
        chunk: dict[str, Any] | None
        chunks, chunk = self._read()
        n_before, start = self._llm.n_evaluated, time.perf_counter()
        while chunk is not None:
            choice = chunk["choices"][0]
            self.finish = choice["finish_reason"] or self.finish
            yield from pieces_of(choice)
            chunk = None if self._stopped else next(chunks, None)
        chunks.close()
        self.n_decoded = self._llm.n_evaluated - n_before
        self.decode_s = time.perf_counter() - start
        self.finish = "stopped" if self._stopped else self.finish

    def _read(self) -> tuple[Chunks, dict[str, Any]]:
        """The chunks and the first of them, before which the prompt is read."""
        n_before, start = self._llm.n_evaluated, time.perf_counter()
        self._llm.kv_cancel(False)  # a Ctrl-C that came too late for an earlier turn
        self._reading = True
        try:
            if self._stopped:  # from now on `stop` says it to the model
                raise Cancelled("stopped")
            with refused_prompts(self._llm):
                chunks = self._begin()
                chunk = next(chunks)
        finally:
            self._reading = False
        if self._stopped:
            chunks.close()
            raise Cancelled("stopped")
        self.has_begun = True
        self.n_read = self._llm.n_evaluated - n_before
        self.read_s = time.perf_counter() - start
        return chunks, chunk


@contextmanager
def refused_prompts(llm: Llama) -> Iterator[None]:
    """Turns what is wrong with a prompt (its length, what a chat template says) into one line."""
    try:
        yield
    except ContextFull as error:
        what = f"the model cannot take this prompt: {error.what}"
        raise ContextFull(what, f"give a shorter prompt{or_larger(llm)}") from error
    except EdgeKVError:
        raise
    except Exception as error:
        if not isinstance(error, ValueError) and not _is_of_template(error):
            raise
        reason = " ".join(str(error).split())
        raise BadInput(f"the model cannot take this prompt: {reason}") from error


def _is_of_template(error: Exception) -> bool:
    """Whether it comes out of a chat template, whose mistakes can be of any kind."""
    return any(
        frame.filename == "<template>" for frame in traceback.extract_tb(error.__traceback__)
    )


def trained_context(llm: Llama) -> int:
    """Tokens that the model was trained with, 0 if it does not say."""
    architecture = llm.metadata.get("general.architecture", "")
    value = llm.metadata.get(f"{architecture}.context_length", "")
    return int(value) if value.isdecimal() else 0


def or_larger(llm: Llama) -> str:
    """The advice of a larger context, if that is one."""
    trained = trained_context(llm)
    return ", or start with a larger -c" if llm.n_ctx() < trained or not trained else ""
