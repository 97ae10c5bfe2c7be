"""What a server without a model was told about models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterOptions:
    """Fields are the options' names; see the command's help. models_memory: bytes, None: what is
    free; keep_alive: seconds that a model stays without a request.
    """

    models_dir: str | None = None
    models_max: int = 4
    models_memory: int | None = None
    models_autoload: bool = True
    keep_alive: float = 300.0
    allow_pull: bool = False
