"""llama.cpp's own chats as Python has them: native/include/edgekv-chat.h has the contracts.

JSON goes in and comes out. Whoever calls bounds its depth: see `edgekv.chat.bounds`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput, Cancelled, EdgeKVError
from edgekv.library import lib_dir, library_path, open_llama

ABI = 3
INVALID = -2
P, TEXT, OUT = c_void_p, c_char_p, POINTER(c_void_p)
FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    ("error", c_char_p),
    ("free", None, P),
    ("template_open", c_int, P, TEXT, TEXT, TEXT, OUT),
    ("template_close", None, P),
    ("template_about", c_int, P, OUT),
    ("template_apply", c_int, P, TEXT, OUT),
    ("parser_open", c_int, TEXT, OUT),
    ("parser_close", None, P),
    ("parse", c_int, P, TEXT, c_size_t, c_bool, OUT),
    ("schema", c_int, TEXT, OUT),
    ("check_grammar", c_int, P, TEXT),
    ("sampler_open", c_int, P, TEXT, POINTER(c_bool), OUT),
    ("sampler_close", None, P),
    ("sampler_accept", c_int, P, c_int32),
    ("sampler_draw", c_int, P, POINTER(c_float), POINTER(c_int32)),
    (
        *("sampler_candidates", c_int, P),
        *(POINTER(c_int32), POINTER(c_float), c_size_t, POINTER(c_size_t)),
    ),
)
"""Name, result and arguments of every function that is called here."""


@cache
def _lib() -> Any:
    """The library, opened once per process. Raises EdgeKVError if it is missing."""
    open_llama()
    path = library_path("chat")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise EdgeKVError(f"the native library {path} cannot be loaded: {error}") from None
    if lib.edgekv_chat_abi() != ABI:
        raise EdgeKVError(
            f"the library in {lib_dir()} is of another edgekv version: build and install again"
        )
    for name, result, *arguments in FUNCTIONS:
        function = getattr(lib, f"edgekv_chat_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def _check(status: int) -> None:
    if status == 0:
        return
    reason = (_lib().edgekv_chat_error() or b"").decode(errors="replace")
    text = " ".join(reason.split()) or "the native library failed"
    raise BadInput(text) if status == INVALID else EdgeKVError(text)


def _called(name: str, *arguments: Any) -> Any:
    """What a function puts into its last argument: a text that is JSON."""
    return json.loads(_text(name, *arguments))


def _text(name: str, *arguments: Any) -> str:
    out = c_void_p()
    _check(getattr(_lib(), f"edgekv_chat_{name}")(*arguments, byref(out)))
    try:
        return (ctypes.cast(out, c_char_p).value or b"").decode("utf-8", "replace")
    finally:
        _lib().edgekv_chat_free(out)


def _bytes(text: str) -> bytes:
    """UTF-8 that C takes: half of a pair of surrogates and a zero become replacement marks."""
    return text.encode("utf-8", "replace").replace(b"\0", b"\xef\xbf\xbd")


def _json(value: Any) -> bytes:
    return _bytes(json.dumps(value, ensure_ascii=False))


class _Handle:
    """Something of the library's. Close it afterwards, or leave it to Python."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self._pointer = c_void_p()
        _check(getattr(_lib(), f"edgekv_chat_{self.kind}_open")(*arguments, byref(self._pointer)))

    def close(self) -> None:
        pointer, self._pointer = getattr(self, "_pointer", None), c_void_p()
        if pointer:
            getattr(_lib(), f"edgekv_chat_{self.kind}_close")(pointer)

    def __del__(self) -> None:
        self.close()


class Template(_Handle):
    """A chat template. model: llama.cpp's, or None; text: empty for the model's own.

    Raises BadInput for a template that is broken.
    """

    kind = "template"

    def __init__(self, model: Any, text: str = "", bos: str = "", eos: str = "") -> None:
        super().__init__(model, *map(_bytes, (text, bos, eos)))

    def about(self) -> dict[str, Any]:
        """Its source, and what it can do ("caps")."""
        return dict(_called("template_about", self._pointer))

    def apply(self, request: dict[str, Any]) -> dict[str, Any]:
        """The prompt of a request, its grammar, and how its answer is read. Raises BadInput."""
        return dict(_called("template_apply", self._pointer, _json(request)))


class Parser(_Handle):
    """Reads what a model wrote. said: the `parser` of a template's application."""

    kind = "parser"

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__(_json(said))

    def parse(self, text: str, is_partial: bool) -> dict[str, Any]:
        """The message in a text: "content", "reasoning_content", "tool_calls".

        Raises BadInput for a whole text that does not have the template's format.
        """
        data = text.encode("utf-8", "replace")
        return dict(_called("parse", self._pointer, data, len(data), is_partial))


class SamplerHandle(_Handle):
    """Draws tokens. settings: llama-server's names, and what a template's application says; stop:
    where another thread sets it, a grammar that thinks gives up, with Cancelled.
    """

    kind = "sampler"

    def __init__(self, model: Any, settings: dict[str, Any], stop: c_bool | None = None) -> None:
        self._stop = c_bool() if stop is None else stop  # it has to outlive the sampler
        with self._stops():
            super().__init__(model, _json(settings), byref(self._stop))

    @contextmanager
    def _stops(self) -> Iterator[None]:
        try:
            yield
        except EdgeKVError:
            if self._stop.value:
                raise Cancelled("the answer was stopped") from None
            raise

    def accept(self, token: int) -> None:
        """Count a token of the prompt."""
        _check(_lib().edgekv_chat_sampler_accept(self._pointer, token))

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token, from the last one's logits [n_vocab]. Raises EdgeKVError."""
        token = c_int32()
        pointer = logits.ctypes.data_as(POINTER(c_float))
        with self._stops():
            _check(_lib().edgekv_chat_sampler_draw(self._pointer, pointer, byref(token)))
        return token.value

    def candidates(self, n: int) -> list[tuple[int, float]]:
        """The likeliest tokens that the last draw chose among, n at most, with probabilities."""
        tokens, values, found = (c_int32 * n)(), (c_float * n)(), c_size_t()
        _check(
            _lib().edgekv_chat_sampler_candidates(self._pointer, tokens, values, n, byref(found))
        )
        return list(zip(tokens, values))[: found.value]


def grammar_of(schema: Any) -> str:
    """The grammar of a JSON schema, in GBNF. Raises BadInput for one that llama.cpp refuses."""
    return _text("schema", _json(schema))


def check_grammar(model: Any, grammar: str) -> None:
    """Raises BadInput for a grammar that llama.cpp cannot read."""
    _check(_lib().edgekv_chat_check_grammar(model, _bytes(grammar)))
