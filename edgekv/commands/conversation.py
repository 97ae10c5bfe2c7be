"""A conversation: its messages, turn by turn, saved and loaded. Knows no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgekv.commands.saved import messages_of, note_of
from edgekv.commands.stream import Chunks, Stream
from edgekv.errors import Cancelled

if TYPE_CHECKING:
    from edgekv import Llama


class Conversation:
    """Messages on a model. Each turn hands over all messages; the engine reads what it does not have yet."""

    def __init__(self, llm: Llama, arguments: dict[str, Any], system: str = "") -> None:
        """arguments: keyword arguments of every `create_chat_completion`."""
        self.llm = llm
        self.arguments = arguments
        self.messages: list[dict[str, str]] = []
        self.documents: list[str] = []
        """Texts that go in front of the next message."""
        self.stream: Stream | None = None
        """The last turn's, with its numbers."""
        self.set_system(system)

    def set_system(self, text: str) -> None:
        """Sets the system message; an empty text takes it away."""
        others = [m for m in self.messages if m["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.documents = []
        self.llm.reset()

    def ask(self, text: str) -> Iterator[str]:
        """Yields the reply to `text` piece by piece. A reply that is stopped stays as far as it came.

        Raises Cancelled if the turn was stopped before the reply began, BadInput if its prompt cannot be read; the
        conversation is then as it was.
        """
        question = {"role": "user", "content": "\n\n".join([*self.documents, text])}
        self.stream = Stream(self.llm, lambda: self._complete([*self.messages, question]))
        pieces = []
        try:
            for piece in self.stream:
                pieces.append(piece)
                yield piece
        except Cancelled:
            raise Cancelled("stopped; the conversation is as it was before this turn") from None
        finally:
            if self.stream.n_read or pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
                self.documents = []

    def stop(self) -> None:
        """Stops the turn that is under way. May be called from a signal handler."""
        if self.stream:
            self.stream.stop()

    def _complete(self, messages: list[dict[str, str]]) -> Chunks:
        return self.llm.create_chat_completion(messages=messages, stream=True, **self.arguments)

    def save(self, path: str) -> None:
        """Writes cache and messages to the file `path`. Raises BadInput."""
        self.llm.kv_save(path, note_of(self.messages))

    def load(self, path: str) -> None:
        """Takes up a saved conversation. Raises BadInput and changes nothing if it is none."""
        self.messages, self.documents = messages_of(self.llm.kv_load(path, messages_of)), []
