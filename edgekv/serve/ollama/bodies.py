"""What requests of Ollama's protocol may say."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from edgekv.errors import BadInput
from edgekv.serve.keep_alive import seconds
from edgekv.serve.schemas import TOKENS_MOST, Body, SamplingBody, ToolBody

THINKS = ("low", "medium", "high", "max")


class Options(SamplingBody):
    """How an answer is written. Those below the line say how a model is loaded, or what no model
    does any more: an answer is the same without them.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_predict: int | None = Field(None, ge=-2, le=TOKENS_MOST)
    num_ctx: int | None = Field(None, ge=0, le=TOKENS_MOST)
    stop: str | list[str] | None = None
    tfs_z: float | None = None
    # ----
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    penalize_newline: bool | None = None

    def check(self, n_ctx: int) -> None:
        """See `AskBody.check`."""
        if (self.num_ctx or 0) > n_ctx:
            raise BadInput(
                f"num_ctx is {self.num_ctx:,}, and this server's context has {n_ctx:,} tokens:"
                f" start it with -c {self.num_ctx}, or leave num_ctx out"
            )
        if self.tfs_z not in (None, 1):
            raise BadInput("there is no tail-free sampling here: leave tfs_z out")

    def limit(self) -> tuple[bool, int | None]:
        """(whether a number of tokens is named, the number; None: no limit)."""
        n = self.num_predict
        return n is not None, n if n and n > 0 else None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ModelBody(Body):
    """A body that names a model.

    name: what older clients call `model`.
    """

    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        return self.model or self.name or ""


class AskBody(ModelBody):
    """What chats and texts have in common."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def check(self, n_ctx: int) -> None:
        """Raises BadInput for what a context of n_ctx tokens cannot give, and for no duration."""
        self.how.check(n_ctx)
        if self.keep_alive is not None:
            seconds(self.keep_alive)

    @property
    def keep_s(self) -> float | None:
        """How long the model stays behind the answer. Raises BadInput."""
        return None if self.keep_alive is None else seconds(self.keep_alive)

    @property
    def how(self) -> Options:
        """The options, said or not."""
        return self.options or Options.model_validate({})

    @property
    def is_streamed(self) -> bool:
        """Unlike in other protocols, where nothing is said of it."""
        return self.stream is not False

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer is held to. Raises BadInput."""
        if isinstance(self.format, dict):
            return self.format
        if self.format not in (None, "", "json"):
            raise BadInput('format is "json" or a JSON schema')
        return {"type": "object"} if self.format else None

    @property
    def variables(self) -> dict[str, Any]:
        """Of the chat template. Raises BadInput."""
        if self.think is None:
            return {}
        if isinstance(self.think, bool):
            return {"enable_thinking": self.think}
        if self.think not in THINKS:
            raise BadInput(f"think is true, false, or one of: {', '.join(THINKS)}")
        return {"enable_thinking": True, "reasoning_effort": self.think}


class MessageBody(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(AskBody):
    messages: list[MessageBody] = Field(default_factory=list)
    tools: list[ToolBody] | None = None


class GenerateBody(AskBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class ShowBody(ModelBody):
    verbose: bool | None = None


class PullBody(ModelBody):
    stream: bool | None = None
