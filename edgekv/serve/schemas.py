"""What requests may say. Fields that are not named here are ignored, as in llama-server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from edgekv.chat.sampling import Sampling
from edgekv.errors import BadInput

TOKENS_MOST = 2**31 - 1
NOT_DONE = {
    "n_indent": "an answer does not end by the indentation of its lines",
    "t_max_predict_ms": "an answer has no limit in time",
    "lora": "adapters are the server's (--lora)",
}
"""llama-server's fields that would change an answer, and are refused unless they are off."""
OFF: tuple[Any, ...] = (None, False, 0, -1, [])


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class SamplingBody(Body):
    """What a request says of how tokens are drawn; null is as not said."""

    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = Field(None, ge=-TOKENS_MOST, le=TOKENS_MOST)
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = Field(None, gt=0)
    repeat_last_n: int | None = Field(None, ge=-1, le=TOKENS_MOST)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = Field(None, ge=0, le=TOKENS_MOST)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=TOKENS_MOST)
    dry_sequence_breakers: tuple[str, ...] | None = Field(None, max_length=1024)
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = Field(None, ge=0, lt=1)
    min_keep: int | None = Field(None, ge=0, le=TOKENS_MOST)
    samplers: tuple[str, ...] | None = Field(None, max_length=64)
    seed: int | None = None
    logit_bias: (
        dict[str, float | Literal[False]] | list[tuple[int | str, float | Literal[False]]] | None
    ) = None
    ignore_eos: bool | None = None

    def sampling(self, usual: Sampling, tokens_of: Callable[[str], list[int]]) -> Sampling:
        """The server's own way of drawing, with what is said here. tokens_of: of a text that a
        logit_bias names, or its number if it is one.
        """
        names = set(SamplingBody.model_fields) - {"seed", "logit_bias", "ignore_eos"}
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.seed is not None:  # -1: another one each time
            said["seed"] = self.seed if self.seed >= 0 else None
        if self.logit_bias is not None:
            bias_of = self.logit_bias
            pairs = bias_of.items() if isinstance(bias_of, dict) else bias_of
            said["logit_bias"] = {
                token: float("-inf") if bias is False else float(bias)
                for name, bias in pairs
                for token in tokens_of(str(name))
            }
        return replace(usual, **said)


class StreamOptions(Body):
    include_usage: bool = False


class GenerationBody(SamplingBody):
    """What both of OpenAI's older protocols have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    n_cmpl: int | None = Field(None, ge=1)
    """llama-server's name for n."""
    timings_per_token: bool | None = None
    post_sampling_probs: bool | None = None
    reasoning_budget_tokens: int | None = Field(None, ge=-1, le=TOKENS_MOST)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=-1, le=TOKENS_MOST)
    n_predict: int | None = Field(None, ge=-1, le=TOKENS_MOST)
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_progress: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None

    def is_fresh(self, n_slots: int) -> bool:
        """Whether the prompt is to be read anew. Raises BadInput for a slot that there is not:
        conversations are found in each of them.
        """
        if self.id_slot is not None and not -1 <= self.id_slot < n_slots:
            raise BadInput(f"id_slot is -1, or 0 to {n_slots - 1}: see --parallel")
        return self.cache_prompt is False

    def check(self) -> None:
        """Raises BadInput for a field of llama-server's that this server does not apply."""
        for name, why in NOT_DONE.items():
            if (self.model_extra or {}).get(name) not in OFF:
                raise BadInput(f"{why} here: leave {name} out")

    @property
    def n_answers(self) -> int:
        """To each prompt."""
        return self.n or self.n_cmpl or 1

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def limit(self, *names: str) -> tuple[bool, int | None]:
        """(whether a number of tokens is named, the number; None: no limit)."""
        for name in (*names, "max_tokens", "n_predict"):
            value = getattr(self, name)
            if value is not None:
                return True, None if value < 0 else value
        return False, None


class ChatMessage(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionBody(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(Body):
    type: str | None = None
    function: FunctionBody | None = None


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1, le=TOKENS_MOST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_format: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = None
    parse_special: bool | None = None
    """Control tokens in people's texts are tokens: edgekv's own field."""


class CompletionBody(GenerationBody):
    prompt: Any
    """In the forms of `edgekv.serve.texts`."""
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class NativeBody(CompletionBody):
    n_probs: int | None = Field(None, ge=0, le=20)
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


class TokenizeBody(Body):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    tokens: list[int]


class ApplyTemplateBody(Body):
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class SlotBody(Body):
    filename: str


class MessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicToolBody(Body):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class CountBody(SamplingBody):
    """Anthropic's messages, as far as they make a prompt."""

    model: str | None = None
    messages: list[MessageBody] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicToolBody] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody):
    max_tokens: int | None = Field(None, ge=0, le=TOKENS_MOST)
    stop_sequences: list[str] | None = None
    stream: bool | None = None


class ResponsesBody(SamplingBody):
    """OpenAI's newest protocol, as far as this server has it."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=0, le=TOKENS_MOST)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
