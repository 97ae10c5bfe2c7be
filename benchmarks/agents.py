"""What is read of the prompts of coding agents, beside what is new in them.

    python benchmarks/agents.py [--models dense,windows,hybrid] [--ratios 1,0.2] [--scale 1]
                                [--agents "Codex,OpenCode"] [--threads 2]
                                [--words="--cache-ram 4096"] [--peer-path FOLDER]

Requests are made by hand as Claude Code (Anthropic's messages), Codex (OpenAI's responses) and
OpenCode (chat completions) make them: a system prompt of 10,000 tokens with tools, 20 turns with
results of 500 to 8,000 tokens, two sub-agents that share its front, an old result that is cleared
away, another date at the front (--ignore-prefix), a restart (--cache-disk), a history that becomes
a summary. Models are tiny, with random weights: one whose layers attend to everything, one with
windows, a hybrid. --scale: of all numbers of tokens. New are tokens that no request had before,
answers included. A cell has tokens read / new; ! where more than 64 others are read. Markdown goes
to standard output, progress to standard error. --peer-path: a folder that has xllamacpp (`pip
install --target`); OpenCode's requests go to its loop, which is llama-server's, at ratio 1, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from process import heading  # noqa: E402
from served import Server, serving  # noqa: E402

from tests import agents, archs, models  # noqa: E402
from tests.chats import TEMPLATE  # noqa: E402

N_CTX = 1 << 17
AROUND = 64


def main() -> None:
    options = parse()
    print(heading("agents.py"))
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models.split(","):
            path = written(model, Path(folder))
            for ratio in options.ratios.split(","):
                print_table(options, model, path, ratio)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="dense,windows,hybrid")
    parser.add_argument("--ratios", default="1,0.2")
    parser.add_argument("--agents", default=",".join(agents.AGENTS))
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--words", default="")
    parser.add_argument("--peer-path", default="")
    return parser.parse_args()


def written(model: str, folder: Path) -> Path:
    if model == "hybrid":
        path = archs.write(folder, "^qwen35$") / "qwen35-dense.gguf"
        return agents.with_words(path, folder / "hybrid.gguf", N_CTX)
    shape = models.SHAPES[{"dense": "llama-gqa", "windows": "gemma3"}[model]]
    models.SHAPES[model] = replace(shape, n_ctx=N_CTX)
    return models.write(model, folder)


def print_table(options: argparse.Namespace, model: str, path: Path, ratio: str) -> None:
    names = options.agents.split(",")
    columns = [steps(options, path, ratio, agent) for agent in names]
    if options.peer_path and float(ratio) == 1:
        columns.append(peer_steps(options, path, [x.n_new for x in columns[-1]]))
        names.append("llama-server")
    print(f"\n### {model}, ratio {ratio}\n")
    print("| request | tokens | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(columns))
    for row in zip(*columns, strict=True):
        cells = " | ".join(map(cell, row))
        print(f"| {row[0].name} | {row[0].n_prompt:,} | {cells} |", flush=True)
    sums = [f"{sum(x.n_read for x in c):,} / {sum(x.n_new for x in c):,}" for c in columns]
    print(f"| all | {sum(x.n_prompt for x in columns[0]):,} | {' | '.join(sums)} |", flush=True)


def cell(step: agents.Step) -> str:
    mark = " !" if step.n_read > step.n_new + AROUND else ""
    return f"{step.n_read:,} / {step.n_new:,}{mark}"


def steps(options: argparse.Namespace, path: Path, ratio: str, agent: str) -> list[agents.Step]:
    with tempfile.TemporaryDirectory() as disk:
        words = ["-m", str(path), "--kv-ratio", ratio, "-c", str(N_CTX), "--temp", "0"]
        words += ["-t", str(options.threads), "--ignore-prefix", agents.IGNORED]
        words += ["--cache-disk", disk, "--chat-template", TEMPLATE, *options.words.split()]
        if float(ratio) < 1:
            words += ["--kv-method", "snapkv"]
        return asked(agent, options.scale, lambda: serving(words))


def asked(
    agent: str,
    scale: float,
    serve: Callable[[], AbstractContextManager[Server]],
    new: Sequence[int] = (),
) -> list[agents.Step]:
    """All requests of an agent to a server."""
    with ExitStack() as stack:

        def start() -> str:
            stack.close()
            return stack.enter_context(serve()).url

        found = []
        for step in agents.Session(agent, start(), start, scale, new).steps():
            print(f"{agent}, {step}", file=sys.stderr, flush=True)
            found.append(step)
        return found


# ---- llama-server's loop

PEER = """
import json, sys, threading, xllamacpp
model, n_ctx, n_threads, template, port = json.loads(sys.argv[1])
given = xllamacpp.CommonParams()
given.model.path, given.n_ctx, given.port, given.chat_template = model, n_ctx, port, template
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = n_threads
given.sampling.temp = 0
server = xllamacpp.Server(given)
threading.Event().wait()
"""


class Peer(Server):
    """A process of xllamacpp. words: a list of JSON, whose last value is its port."""

    def start(self, words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        given, _, port = words
        values = [*json.loads(given), int(port)]
        command = [sys.executable, "-c", PEER, json.dumps(values)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, **more)


def peer_steps(options: argparse.Namespace, path: Path, new: list[int]) -> list[agents.Step]:
    """As it is by default: 8 GiB for prompts that wait, 32 checkpoints, one slot."""
    words = [json.dumps([str(path), N_CTX, options.threads, TEMPLATE])]
    env = {**os.environ, "PYTHONPATH": options.peer_path}
    return asked("OpenCode", options.scale, lambda: serving(words, Peer, env=env), new)


if __name__ == "__main__":
    main()
