"""What every protocol has: a `Writer` of its answers."""

from __future__ import annotations

from typing import Any

from edgekv.chat.reply import Part
from edgekv.serve import sse, wording
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Progress, Written
from edgekv.serve.schemas import GenerationBody, ResponsesBody


class Writer:
    """Writes one answer in a protocol's events. Every method returns what to send, maybe nothing.

    A protocol overrides those that it needs.
    """

    media_type = "text/event-stream"
    now = Progress()
    """How far the answer is."""
    done: Done | None = None
    """The end of the answer, once it is written."""

    def __init__(self, body: GenerationBody | ResponsesBody | None = None) -> None:
        """body: asks for llama-server's events while the prompt is read (`return_progress`), or for
        the time that each piece took.
        """
        self.with_progress = bool(body and body.return_progress)
        self.with_timings = bool(body and body.timings_per_token)

    @property
    def timings(self) -> dict[str, Any]:
        """`timings` by now, if the client asked for them."""
        return {"timings": wording.timings(self.now)} if self.with_timings else {}

    def begin(self, progress: Progress) -> str:
        """The prompt is going to be read."""
        return ""

    def comment(self, text: str) -> str:
        """What clients leave out."""
        return f": {text}\n\n"

    def progress(self, progress: Progress) -> str:
        """A comment, and the event if there is one."""
        comment = self.comment(f"prompt {progress.n_read}/{progress.n_prompt}")
        if not self.with_progress:
            return comment
        said = {"prompt_progress": wording.progress(progress), **self.timings}
        return comment + self.progress_event(said)

    def progress_event(self, said: dict[str, Any]) -> str:
        """An event of the protocol with one more field."""
        return ""

    def written(self, written: Written) -> str:
        """Text has come; its parts follow."""
        return ""

    def part(self, part: Part) -> str:
        return ""

    def end(self, done: Done, has_calls: bool) -> str:
        return ""

    def failed(self, error: ApiError) -> str:
        return sse.event(error.body(""))
