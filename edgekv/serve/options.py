"""What `edgekv serve` was told besides how to load a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.chat.sampling import Sampling

REASONING = ("auto", "none", "deepseek")
THINKS = ("on", "off", "auto")


@dataclass(frozen=True)
class ServeOptions:
    """Fields are the options' names; see the command's help."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    file_keys: tuple[str, ...] = ()
    """More keys, those of a file."""
    alias: str | None = None
    """The model's names, with commas between them."""
    tags: str | None = None
    """What the list of models says of it besides, in the same form."""
    page: bool = True
    cors_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    """More names that requests may have as their host."""
    parallel: int = 4
    """Answers under way at once."""
    cont_batching: bool | None = None
    """Whether they are written in one pass; None: where each is then the same as alone."""
    max_queue: int = 64
    """Requests that may wait besides those that are answered."""
    max_request: int = 64 * 2**20
    """Bytes of a request's body."""
    cache_ram: int | None = None
    """Bytes of main memory for conversations that wait; None: what `Conversations` takes."""
    cache_disk: str | None = None
    """A folder for those that do not fit, and for a later start."""
    cache_disk_size: int | None = None
    packs: tuple[str, ...] = ()
    """Files of packs, which are opened at the start."""
    slot_save_path: str | None = None
    """The folder of /slots' files; None: there are none."""
    ignore_prefix: str | None = None
    """An expression for the front of first messages that is not compared."""
    metrics: bool = False
    slots: bool = True
    chat_template: str = ""
    """A template's text in the place of the model's."""
    reasoning: str = "auto"
    """Whether the model thinks where a request says nothing; auto: as its template has it."""
    reasoning_format: str = "auto"
    max_tokens: int | None = None
    """Tokens to write where a request names no number; None: until the context is full."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn where a request says nothing."""

    @property
    def names(self) -> list[str]:
        return _words(self.alias)

    @property
    def tag_words(self) -> list[str]:
        return _words(self.tags)


def _words(text: str | None) -> list[str]:
    """Each one once, by their letters as in llama-server."""
    return sorted({word.strip() for word in (text or "").split(",")} - {""})
