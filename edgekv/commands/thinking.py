"""A reply's thinking block: <think> ... </think> at its beginning."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class Splitter:
    """Tells thought from answer in a reply that comes in pieces; a tag may be cut in two.

    is_open: the prompt ended with the opening tag, so the reply begins in the middle of a thought.
    """

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open
        self._may_open = not is_open
        self._held = ""

    def feed(self, piece: str) -> list[tuple[str, bool]]:
        """Returns what is certain by now: (text, whether it is thought). Tags are part of a
        thought.
        """
        text, self._held = self._held + piece, ""
        if self._may_open:
            begin = text.lstrip()
            if OPEN.startswith(begin[: len(OPEN)]) and len(begin) < len(OPEN):
                self._held = text
                return []
            self._may_open, self.is_open = False, begin.startswith(OPEN)
        if not self.is_open:
            return [(text, False)]
        thought, tag, answer = text.partition(CLOSE)
        if tag:
            self.is_open = False
            return [(thought + tag, True), (answer, False)]
        n_held = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - n_held :]
        return [(text[: len(text) - n_held], True)]

    def end(self) -> list[tuple[str, bool]]:
        """Returns what was held back, when the reply is over."""
        text, self._held = self._held, ""
        return [(text, self.is_open)]


def split(text: str) -> tuple[str, str]:
    """Returns thought (without tags) and answer of a whole reply."""
    pieces = Splitter()
    parts = [*pieces.feed(text), *pieces.end()]
    thought = "".join(part for part, is_thought in parts if is_thought)
    answer = "".join(part for part, is_thought in parts if not is_thought)
    if not thought:
        return "", text
    return thought.strip().removeprefix(OPEN).removesuffix(CLOSE).strip(), answer.lstrip()
