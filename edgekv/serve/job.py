"""One request on its way through the worker: it waits, is read, then each step writes a token."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from edgekv.chat.reply import Reply
from edgekv.chat.sampler import Sampler
from edgekv.chat.stops import Stops
from edgekv.llama.llama import Llama
from edgekv.native import llama_cpp
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.events import Done, Event, Progress, TokenLogprob, Written
from edgekv.serve.request import Request

LEAST = float(np.finfo(np.float32).min)
"""llama-server's logarithm of zero."""
N_BEFORE = 64
"""Tokens of the prompt that penalties may count."""


class State(Enum):
    """How far a job is."""

    WAITING, READING, WRITING, DONE = range(4)


class Job:
    """A request on its way. emit: takes its events, in the worker's thread; client: whose it is.

    When its turn has come: call `begin`, then `step` until it returns False. Call `close` at the
    end in any case.
    """

    _ids = itertools.count()

    def __init__(
        self, request: Request, emit: Callable[[Event], None], client: Hashable = None
    ) -> None:
        self.id = next(self._ids)
        self.request, self.emit, self.client = request, emit, client
        self.is_cancelled, self.state = False, State.WAITING
        self.progress = Progress(len(request.prompt.tokens))
        """It changes; events take a copy along."""
        self.switch_s = 0.0
        """Seconds that it took to make this conversation current again."""
        self._close = ExitStack()

    def begin(
        self,
        llm: Llama,
        conversations: ServerConversations,
        deliver: Callable[[Event], None],
        let_others: Callable[[], None],
    ) -> None:
        """Its prompt is read next. deliver: takes the events; let_others: called while the prompt
        is read, it may let others go on, or raise to stop this one. Raises EdgeKVError.
        """
        self._llm, self._conversations, self._deliver = llm, conversations, deliver
        self._let_others = let_others
        request, syntax = self.request, self.request.prompt.syntax
        self._prompt, self._tokens = request.prompt, list(request.prompt.tokens)
        self._stops = Stops(request.stops)
        self._reply = Reply(syntax) if syntax.is_one_call else None
        self._logprobs: list[TokenLogprob] = []
        self._n_said = 0
        """Written tokens whose text has gone out."""
        self._most, self._n_decodes, self._mark = 0, 0, 0.0
        n_before = max(N_BEFORE, request.sampling.repeat_last_n)
        self._sampler = Sampler(llm, request.sampling, self._tokens[-n_before:], request.constraint)
        self._close.callback(self._sampler.close)
        self._talk = ""
        """The id of its conversation."""
        self._close.callback(lambda: conversations.give_up(self._talk))
        self._guesses = llm.drafts()
        self._n_sure: int | None = None
        """Tokens of the conversation, while there may be a draft behind them."""
        self.state = State.READING

    def close(self) -> None:
        self._close.close()
        self.state = State.DONE

    @property
    def has_read(self) -> bool:
        """Whether the prompt is read."""
        return self.state in (State.WRITING, State.DONE)

    def step(self, is_current: bool) -> bool:
        """Read the prompt, or write a token and as many of its draft as were right. False: the
        answer is complete.

        is_current: no other answer has used the model since the last step.
        """
        if self.state is State.READING:
            self._read()
            return True
        self._mark = time.perf_counter()
        if self.progress.n_written >= self._most:
            self.finish("length")
            return False
        draft: list[int] = []
        # the last token has not been read, or its logits left
        if self.progress.n_written or not is_current:
            draft = self._read_last(is_current)
        goes_on = self._write_checked(draft)
        self._count_time()
        return goes_on

    @property
    def unread(self) -> tuple[str, int] | None:
        """Its conversation, and the token that was written last, if it may be read beside those of
        others. Then `write` comes next instead of `step`.
        """
        if self.state is not State.WRITING or self._llm.drafts_in_turns:
            return None
        is_whole = 0 < self.progress.n_written < self._most
        return (self._talk, self._tokens[-1]) if is_whole else None

    def write(self, index: int) -> str | None:
        """Write a token by the logits at an index of a step that had tokens of several answers.
        Returns why the answer is complete, for `finish`, or None.
        """
        self._n_decodes += 1
        finish = self._write(index)
        self._count_time()
        return finish

    def wait(self) -> None:
        """A step with others begins, whose time is this answer's too."""
        self._mark = time.perf_counter()

    def _write_checked(self, draft: list[int]) -> bool:
        """Write a token, and as long as that was the draft's, another one."""
        self._n_sure = self._llm.n_tokens - len(draft)
        try:
            for i in range(len(draft) + 1):
                finish = self._write(i - len(draft) - 1)
                if finish or i == len(draft) or self._tokens[-1] != draft[i]:
                    break
                self._n_sure += 1
                self.progress.n_right += 1
        finally:
            self._take_back()
        if finish:
            self.finish(finish)
        return not finish

    def _take_back(self) -> None:
        """What is left of a draft is none of the conversation's."""
        if self._n_sure is not None:
            self._llm.back_to(self._n_sure)
        self._n_sure = None

    def _count_time(self) -> None:
        """Add the time since the step began, or since this was called last."""
        now = time.perf_counter()
        self.progress.write_ms += 1e3 * (now - self._mark)
        self._mark = now

    def _read(self) -> None:
        begin, n_before, lent = time.perf_counter(), self._llm.n_evaluated, 0.0
        self._prompt = prompt = self._conversations.settled(self.request.prompt)
        self._tokens, self.progress.n_prompt = list(prompt.tokens), len(prompt.tokens)
        n = self._conversations.begin_answer(prompt, self.request.is_fresh)
        self._talk = self._conversations.current_id
        now, total, n_new = self.progress, len(prompt.tokens), len(prompt.tokens) - n
        # llama-server reads the last one in any case
        now.n_read = now.n_cached = min(n, total - 1)

        def report(done: int, of: int) -> None:
            nonlocal n_before, lent
            if not done:  # that is said already
                return
            paused, n_read = time.perf_counter(), n + n_new * done // max(of, 1)
            if n_read > now.n_read:
                now.n_read, now.read_ms = n_read, 1e3 * (paused - begin - lent)
                self._deliver(replace(now))
            n_evaluated = self._llm.n_evaluated
            self._let_others()
            lent += time.perf_counter() - paused
            n_before += self._llm.n_evaluated - n_evaluated

        self._deliver(replace(now))
        self._llm.kv_progress = report
        try:
            self._llm.eval(self._tokens[n:])
        finally:
            self._llm.kv_progress = None
        # llama.cpp's cache may have had to be read again where it cannot go back
        now.n_cached = max(total - max(self._llm.n_evaluated - n_before, 1), 0)
        now.read_ms = 1e3 * (time.perf_counter() - begin - lent)
        self._n_decodes += -(-n_new // self._llm.n_batch)
        if now.n_read < total:  # few tokens are read at once
            now.n_read = total
            self._deliver(replace(now))
        room, wished = self._llm.n_ctx() - self._llm.n_tokens, self.request.max_tokens
        self._most = room if wished is None else min(wished, room)
        self.state = State.WRITING

    def _read_last(self, is_current: bool) -> list[int]:
        """Read the last token, and what is missing before it. Returns the draft read with it."""
        self._n_decodes += 1
        if is_current:
            draft = self._draft()
            self.progress.n_drafts += bool(draft)
            self.progress.n_drafted += len(draft)
            self._llm.check(self._tokens[-1], draft)
            return draft
        begin = time.perf_counter()
        n = self._conversations.resume_answer(self._talk, self._tokens, self._prompt)
        self._talk = self._conversations.current_id
        n_prompt = self.progress.n_prompt
        self._llm.eval(self._tokens[n:n_prompt])
        for token in self._tokens[max(n, n_prompt) :]:  # together they have other logits
            self._llm.eval([token])
        self.switch_s = time.perf_counter() - begin
        return []

    def _draft(self) -> list[int]:
        if not self._llm.is_drafting:
            return []
        most = min(self._llm.most_drafted(), self._most - self.progress.n_written - 1)
        return self._guesses.next(self._tokens, most)

    def _write(self, index: int) -> str | None:
        """Write a token by the logits at an index of the last step. Returns why it was the last."""
        logits = self._sampler.logits(index)
        token = self._sampler.draw(logits)
        if self._is_end(token):
            return "stop"
        self.progress.n_written += 1
        self._tokens.append(token)
        data = self._piece(token)
        if self.request.n_probs is not None:
            self._logprobs.append(self._logprob(token, data, logits))
        text = self._stops.feed(data)
        if text:
            self._say(text)
        return "stop" if self._stops.found is not None or self._is_over(text) else None

    def _is_over(self, text: str) -> bool:
        """Whether more has come than the request allows."""
        if self._reply is None or not text:
            return False
        self._reply.feed(text)
        return self._reply.is_over

    def _say(self, text: str) -> None:
        self._count_time()
        tokens = self._tokens[self.progress.n_prompt + self._n_said :]
        self._deliver(Written(text, self._logprobs, tokens, replace(self.progress)))
        self._logprobs, self._n_said = [], self.progress.n_written

    def finish(self, finish: str) -> None:
        """The answer is complete. finish: why."""
        rest = "" if self._stops.found is not None else self._stops.feed(b"", final=True)
        if self._stops.found is not None:
            finish = "stop"
        if rest or self._n_said < self.progress.n_written:
            self._say(rest)
        self._count_time()
        self._conversations.end_answer(self._talk)
        stats = self._llm.kv_stats()
        self._deliver(
            Done(
                finish,
                self._stops.found,
                tuple(self._tokens[self.progress.n_prompt :]),
                replace(self.progress),
                stats,
                self._conversations.handle,
                stats.n_bytes_archive + self._conversations.n_bytes_archive,
                self._n_decodes,
            )
        )

    # ---- tokens

    def _is_end(self, token: int) -> bool:
        return bool(
            llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(self._llm.model), token)
        )

    def _piece(self, token: int) -> bytes:
        return self._llm.detokenize([token], special=token in self.request.prompt.syntax.shown)

    def _logprob(self, token: int, data: bytes, drawn_from: NDArray[np.float32]) -> TokenLogprob:
        """Of the model's own logits, or behind the samplers, as the request says."""
        if self.request.probs_drawn:
            return self._drawn(token, data)
        logits: NDArray[np.float64] = drawn_from.astype(np.float64)
        peak = logits.max()
        logs = logits - peak - np.log(np.exp(logits - peak).sum())
        n = min(self.request.n_probs or 0, len(logs))
        best = np.argpartition(-logs, n - 1)[:n] if n else np.empty(0, np.int64)
        best = best[np.argsort(-logs[best], kind="stable")]
        rivals = tuple((int(i), self._piece(int(i)), float(logs[i])) for i in best)
        return TokenLogprob(token, data, float(logs[token]), rivals)

    def _drawn(self, token: int, data: bytes) -> TokenLogprob:
        found = self._sampler.candidates(self._llm.n_vocab())
        own = next((p for other, p in found if other == token), 0.0)
        best = found[: self.request.n_probs or 0]
        rivals = tuple((other, self._piece(other), math.log(p)) for other, p in best)
        return TokenLogprob(token, data, math.log(own) if own else LEAST, rivals, True)
