"""What is read of the prompts of coding agents, beside what is new in them.

Requests are made by hand as Claude Code (Anthropic's messages), Codex (OpenAI's responses) and
OpenCode (chat completions) make them: a system prompt of 10,000 tokens with tools, 20 turns with
results of 500 to 8,000 tokens, two sub-agents that share its front, an old result that is cleared
away, another date at the front (--ignore-prefix), a restart (--cache-disk), a history that becomes
a summary. Models are tiny, with random weights: one whose layers attend to everything, one with
windows, a hybrid. --scale: of all numbers of tokens. New are tokens that no request had before,
answers included. A cell has tokens read / new; ! where more than 64 others are read. --peer-path: a
folder that has xllamacpp (`pip install --target`); OpenCode's requests go to its loop, which is
llama-server's, at ratio 1, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgekv.commands.declare import option
from edgekv.commands.values import Finite
from edgekv_lab.experiments.checkout import root
from edgekv_lab.experiments.experiment import THREADS, Options, experiment, many, say, sheet
from edgekv_lab.experiments.peer import PEER_PATH, serving_peer
from edgekv_lab.experiments.server import Server, serving

N_CTX = 1 << 17
AROUND = 64


@experiment(
    option("--models", default="dense,windows,hybrid", callback=many(str), help="Some of these."),
    option("--ratios", default="1,0.2", callback=many(str), help="Of the server."),
    option("--agents", callback=many(str), help="Some of them; without it all."),
    option("--scale", type=Finite(min=0, min_open=True), default=1.0, help="Of numbers of tokens."),
    THREADS,
    option("--words", default="", help="Further ones of the server's command line."),
    PEER_PATH,
)
def command(o: Options) -> None:
    root()
    with tempfile.TemporaryDirectory() as folder:
        for model in o.models:
            path = written(model, Path(folder))
            for ratio in o.ratios:
                show(o, model, path, ratio)


def written(model: str, folder: Path) -> Path:
    from tests import agents, archs, models

    if model == "hybrid":
        path = archs.write(folder, "^qwen35$") / "qwen35-dense.gguf"
        return agents.with_words(path, folder / "hybrid.gguf", N_CTX)
    shape = models.SHAPES[{"dense": "llama-gqa", "windows": "gemma3"}[model]]
    models.SHAPES[model] = replace(shape, n_ctx=N_CTX)
    return models.write(model, folder)


def show(o: Options, model: str, path: Path, ratio: str) -> None:
    from tests import agents

    names = o.agents or list(agents.AGENTS)
    found = [steps(o, path, ratio, agent) for agent in names]
    if o.peer_path and float(ratio) == 1:
        found.append(peer_steps(o, path, [x.n_new for x in found[-1]]))
        names = [*names, "llama-server"]
    about, name = f"{model}, ratio {ratio}", f"{model}-{ratio}"
    columns = [(agent, "{:,} / {:,}{}") for agent in names]
    with sheet(("request", ""), ("tokens", "{:,}"), *columns, name=name, about=about) as table:
        for row in zip(*found, strict=True):
            table.add(row[0].name, row[0].n_prompt, *map(cell, row))
        sums = [[sum(x.n_read for x in c), sum(x.n_new for x in c), ""] for c in found]
        table.add("all", sum(x.n_prompt for x in found[0]), *sums)


def cell(step: Any) -> list[Any]:
    return [step.n_read, step.n_new, " !" * (step.n_read > step.n_new + AROUND)]


def steps(o: Options, path: Path, ratio: str, agent: str) -> list[Any]:
    from tests import agents
    from tests.chats import TEMPLATE

    with tempfile.TemporaryDirectory() as disk:
        words = ["-m", str(path), "--kv-ratio", ratio, "-c", str(N_CTX), "--temp", "0"]
        words += ["-t", str(o.threads), "--ignore-prefix", agents.IGNORED]
        words += ["--cache-disk", disk, "--chat-template", TEMPLATE, *o.words.split()]
        if float(ratio) < 1:
            words += ["--kv-method", "snapkv"]
        return asked(agent, o.scale, lambda: serving(words))


def asked(
    agent: str,
    scale: float,
    serve: Callable[[], AbstractContextManager[Server]],
    new: Sequence[int] = (),
) -> list[Any]:
    """All requests of an agent to a server."""
    from tests import agents

    with ExitStack() as stack:

        def start() -> str:
            stack.close()
            return stack.enter_context(serve()).url

        found = list[Any]()
        for step in agents.Session(agent, start(), start, scale, new).steps():
            say(f"{agent}, {step}")
            found.append(step)
        return found


# ---- llama-server's loop


def peer_steps(o: Options, path: Path, new: list[int]) -> list[Any]:
    """As it is by default: 8 GiB for prompts that wait, 32 checkpoints, one slot."""
    from tests.chats import TEMPLATE

    def serve() -> AbstractContextManager[Server]:
        values = {"n_ctx": N_CTX, "n_threads": o.threads, "chat_template": TEMPLATE}
        return serving_peer(o.peer_path, model=str(path), **values)

    return asked("OpenCode", o.scale, serve, new)
