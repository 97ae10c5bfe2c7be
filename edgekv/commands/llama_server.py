"""llama-server's options that change nothing here, or for which there is something else to write.

None is in the help. A command line of llama-server's works, or one line says what to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from edgekv.commands.declare import Decorator
from edgekv.errors import BadInput

Callback = Callable[[click.Context, click.Parameter, Any], None]

FLAGS = (
    "--jinja/--no-jinja",
    "--warmup/--no-warmup",
    "--perf/--no-perf",
    "--kv-unified/--no-kv-unified -kvu/-no-kvu",
    "--cache-prompt/--no-cache-prompt",
    "--no-context-shift",
    "--log-disable",
    "--log-colors",
    "--log-prefix",
    "--log-timestamps",
    "--props",
    "--offline",
    "--swa-full",
    "--cache-idle-slots/--no-cache-idle-slots",
    "--prefill-assistant/--no-prefill-assistant",
    "-bs --backend-sampling",
    "--spec-draft-backend-sampling/--no-spec-draft-backend-sampling",
)
"""Taken, and without effect: they are so anyway, or are about what this server does not have."""
VALUES = (
    "--threads-http",
    "-to --timeout",
    "--prio",
    "--prio-batch",
    "--poll",
    "--poll-batch",
    "-lv --verbosity --log-verbosity",
    "--cache-reuse",
    "-sps --slot-prompt-similarity",
    "--ctx-checkpoints --swa-checkpoints",
    "-dt --defrag-thold",
    "--log-file",
)
"""The same, with a value."""
REFUSED = {
    "--context-shift": "a context is not shifted here: leave --context-shift out, give a larger -c"
}
REFUSED_VALUES = {
    "-mm --mmproj": "this server reads no images: leave --mmproj out",
    "--ssl-key-file": "there is no encryption here: put a proxy with TLS in front of the server",
    "--ssl-cert-file": "there is no encryption here: put a proxy with TLS in front of the server",
    "--api-prefix": "paths have no prefix here: let a proxy take it away",
    "--models-preset": "models have no options of their own here: start a server for each",
    "--sleep-idle-seconds": "a server of one model keeps it: leave --sleep-idle-seconds out, or"
    " start edgekv serve without -m, whose models leave after --keep-alive",
    "--path": "this server has one page of its own: leave --path out",
}
BUDGET = "thoughts are not counted here: leave --reasoning-budget out, or give --reasoning off"
_GIVEN = "edgekv.chat_template"
TEMPLATES = (
    "there is no chat template of the name '{}' here: write its text into a file, and give"
    " --chat-template-file FILE; without it the model's own is used"
)


def _hidden(names: str, callback: Callback, **attributes: Any) -> Decorator:
    more = {"expose_value": False, "hidden": True, "callback": callback, **attributes}
    return click.option(*names.split(), **more)


def _nothing(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Click callback: the option changes nothing."""


def _refusal(line: str) -> Callback:
    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            raise BadInput(line)

    return refuse


def _budget(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    """Click callback: -1 is no limit, as it is here."""
    if value not in (None, -1):
        raise BadInput(BUDGET)


def _template(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Click callback: what --chat-template gives or names is `given_template`. Raises BadInput."""
    if value and value != "chatml" and not ("{%" in value or "{{" in value):
        raise BadInput(TEMPLATES.format(value))
    ctx.meta[_GIVEN] = value or ""


def given_template(ctx: click.Context) -> str:
    """The text of --chat-template, which is declared before whoever asks."""
    return str(ctx.meta.get(_GIVEN, ""))


OPTIONS: tuple[Decorator, ...] = (
    *(_hidden(names, _nothing, is_flag=True, default=None) for names in FLAGS),
    *(_hidden(names, _nothing) for names in VALUES),
    *(_hidden(names, _refusal(line), is_flag=True) for names, line in REFUSED.items()),
    *(_hidden(names, _refusal(line)) for names, line in REFUSED_VALUES.items()),
    _hidden("--reasoning-budget", _budget, type=int),
    _hidden("--chat-template template_given", _template, envvar="LLAMA_ARG_CHAT_TEMPLATE"),
)
