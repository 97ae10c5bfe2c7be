"""What is read of agents' prompts: what is new, and a few tokens around it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest

from edgekv.chat.sampling import Sampling
from edgekv.serve.options import ServeOptions
from tests import agents, archs, models
from tests.chats import TEMPLATE
from tests.serving import serving

pytestmark = pytest.mark.slow  # 26 requests each
SCALE = 0.05
AROUND = 64


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Tiny models: all layers attend to everything, some have windows, some are recurrent."""
    folder = tmp_path_factory.mktemp("models")
    hybrid = archs.write(folder, "^qwen35$") / "qwen35-dense.gguf"
    for name in ("llama-gqa", "gemma3"):
        models.SHAPES[f"{name}-long"] = replace(models.SHAPES[name], n_ctx=16384)
    return {
        "dense": models.write("llama-gqa-long", folder),
        "windows": models.write("gemma3-long", folder),
        "hybrid": agents.with_words(hybrid, folder / "hybrid.gguf", 16384),
    }


@pytest.mark.parametrize("ratio", [1, 0.2])
@pytest.mark.parametrize("model", ["dense", "windows", "hybrid"])
def test_an_agent_reads_what_is_new(paths, tmp_path, model, ratio):
    options = ServeOptions(
        chat_template=TEMPLATE,
        cache_disk=str(tmp_path),
        ignore_prefix=agents.IGNORED,
        sampling=Sampling(temperature=0),
    )
    with ExitStack() as stack:

        def start() -> str:
            stack.close()
            cache = {"kv_ratio": ratio, "kv_method": "snapkv"} if ratio < 1 else {}
            url, _ = stack.enter_context(serving(paths[model], options, n_ctx=8192, **cache))
            return url

        session = agents.Session("OpenCode", start(), start, SCALE)
        steps = list(session.steps())
    assert len(steps) == 26
    for step in steps:
        assert step.n_read <= step.n_new + AROUND, step
