"""A conversation: its messages, turn by turn, saved and loaded. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgekv.commands.chat_warnings import has_template
from edgekv.commands.saved import cache_of, messages_of, note_of
from edgekv.commands.stream import Chunks, Piece, Stream, or_larger
from edgekv.errors import BadInput, Cancelled, ContextFull, EdgeKVError

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.llama.pack import Pack


@dataclass(frozen=True)
class Document:
    """A text that goes in front of a message. name: what the user called it."""

    name: str
    text: str
    n_tokens: int
    is_read: bool = False
    """The cache has it already."""

    def __str__(self) -> str:
        return f"{self.name} ({self.n_tokens:,} tokens)"


class Conversation:
    """Messages on a model. Each turn hands over all of them; the engine reads what it has not yet.

    A message's content is text, or a list of text parts if documents stand in front of it.
    """

    def __init__(self, llm: Llama, arguments: dict[str, Any], system: str = "") -> None:
        """arguments: keyword arguments of every `create_chat_completion`."""
        self.llm = llm
        self.arguments = arguments
        self.has_template = has_template(llm)
        self.messages: list[dict[str, Any]] = []
        self.documents: list[Document] = []
        """They go in front of the next message."""
        self.stream: Stream | None = None
        """The last turn's, with its numbers."""
        self.is_stopped = False
        """Somebody wanted the next turn stopped, which has not begun."""
        self.learn: Callable[[float], None] = lambda ratio: None
        """Makes what a ratio needs the first time that it is used."""
        self.set_system(system)

    def set_system(self, text: str) -> None:
        """Sets the system message; an empty text takes it away."""
        others = [m for m in self.messages if m["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    @property
    def is_new(self) -> bool:
        """Nothing was asked yet."""
        return all(m["role"] == "system" for m in self.messages)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.documents = []
        self.llm.reset()

    def ask(self, text: str, *more: Document) -> Iterator[Piece]:
        """Yields the reply to `text` piece by piece. A reply that is stopped stays as far as it
        came.

        more: documents for this message. Raises Cancelled if the turn was stopped before the reply
        began, with all documents waiting for the next message, and BadInput if its prompt cannot be
        read, without `more`; the conversation is then as it was.
        """
        documents = [*self.documents, *more]
        question = {"role": "user", "content": content_of([x.text for x in documents], text)}
        try:
            yield from self._take_turn(self.messages, question)
        except Cancelled as stopped:
            self.documents = documents
            raise Cancelled(f"{stopped}{self._pending()}") from None
        except EdgeKVError as error:
            said = str(error)
            if isinstance(error, ContextFull) and not self.is_new:
                said = f"{error.what}; /reset starts afresh{or_larger(self.llm)}"
            raise BadInput(f"{said}{self._pending()}") from None
        finally:
            if self.stream and self.stream.has_begun:
                self.documents = []

    def regenerate(self) -> Iterator[Piece]:
        """Yields another reply to the last message, in the place of the one there is.

        Raises BadInput if there is none, and as `ask`.
        """
        if [m["role"] for m in self.messages[-2:]] != ["user", "assistant"]:
            raise BadInput("there is no reply to write again; ask something first")
        yield from self._take_turn(self.messages[:-2], self.messages[-2])

    def _take_turn(self, before: list[dict[str, Any]], question: dict[str, Any]) -> Iterator[Piece]:
        """Yields the reply to `question` behind the messages `before`, then the conversation."""
        self.stream = Stream(self.llm, lambda: self._complete([*before, question]))
        if self.is_stopped:
            self.stream.stop()
        pieces: list[Piece] = []
        try:
            for piece in self.stream:
                pieces.append(piece)
                yield piece
        except Cancelled:
            raise Cancelled("stopped; the conversation is as it was before this turn") from None
        finally:
            self.is_stopped = False
            if self.stream.has_begun:
                self.messages = [*before, question, reply_of(pieces)]

    def _pending(self) -> str:
        """What a turn that failed leaves behind."""
        if not self.documents:
            return ""
        names = ", ".join(map(str, self.documents))
        return f"; your next message begins with {names}: '/file -' drops that"

    def stop(self) -> None:
        """Stops the turn that is under way or the next. May be called from a signal handler."""
        self.is_stopped = True
        if self.stream:
            self.stream.stop()

    def _complete(self, messages: list[dict[str, Any]]) -> Chunks:
        if not self.has_template:
            return self.llm.create_completion(plain_text(messages), stream=True, **self.arguments)
        return self.llm.create_chat_completion(messages=messages, stream=True, **self.arguments)

    def save(self, path: str) -> None:
        """Writes cache and messages to the file `path`. Raises BadInput."""
        self.llm.kv_save(path, note_of(self.messages, self.llm))

    def open(self, pack: Pack, path: str) -> None:
        """Begins with a pack's documents. Raises BadInput if the model cannot take it."""
        from edgekv.llama import pack as packs

        packs.load(self.llm, path)
        self.set_system(pack.system)
        self.documents = [
            Document(x.name, x.text, x.n_tokens, is_read=True) for x in pack.documents
        ]

    def load(self, path: str) -> None:
        """Take up a saved conversation with its cache's options and types.

        Raises BadInput and changes nothing if it is none.
        """
        mine = self.llm.kv_config()
        note = self.llm.kv_load(path, messages_of, lambda note: cache_of(note, mine))
        self.messages, self.documents = messages_of(note), []


def reply_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The message of a reply that came in pieces; its thought stands apart."""
    thought = "".join(piece.text for piece in pieces if piece.is_thought)
    content = "".join(piece.text for piece in pieces if not piece.is_thought)
    more = {"reasoning_content": thought} if thought else {}
    return {"role": "assistant", "content": content, **more}


def content_of(documents: list[str], text: str) -> str | list[dict[str, str]]:
    """A message's content: documents are parts of their own, behind which a prompt is cut."""
    if not documents:
        return text
    parts = [*(f"{document}\n" for document in documents), text]
    return [{"type": "text", "text": part} for part in parts]


def text_of(message: dict[str, Any]) -> str:
    """A message's content as one text."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def plain_text(messages: list[dict[str, Any]]) -> str:
    """Messages as a base model continues them: replies stand right behind what they continue."""
    text = ""
    for message in messages:
        text += "\n" * bool(text and message["role"] != "assistant") + text_of(message)
    return text
