"""The one-time preparation of a model for programs: `edgekv.has_profile`, `edgekv.make_profile`.

The command line does the same on the first use of a model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from edgekv.base.stats import Progress
from edgekv.model.identity import identify
from edgekv.profiles.places import cached, find


def has_profile(path: str | os.PathLike[str]) -> bool:
    """Whether the method "auto" of `Llama` finds a profile with predicted scores for a model file.

    It may lie beside the model, come with edgekv, or be in the user's cache. Without one "auto"
    takes a method that reads every prompt twice; `Llama.kv_stats().why` says so.
    Raises BadInput if the file cannot be read or is no GGUF model.
    """
    identify(str(path))
    return find(str(path), predicts=True) is not None


def make_profile(
    path: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int = 0,
    override_tensor: str | Sequence[str] | None = None,
    cpu_moe: bool = False,
    n_cpu_moe: int = 0,
) -> str:
    """Learn the profile of the model `path`, which takes minutes, and return the file that has it.

    The file is in the user's cache, where every later `Llama` finds it; an older one is replaced.
    progress(done, total) is called many times, in units that take equally long; the first call says
    what an earlier run did that was stopped. It may raise to stop the work, which goes on from
    there the next time. n_threads, n_gpu_layers and where weights go are those of `Llama`.
    Raises BadInput if the file is no model or the cache cannot be written, Unsupported for a model
    whose cache edgekv does not compress.
    """
    from edgekv.learn import probe_profile

    places = dict(override_tensor=override_tensor, cpu_moe=cpu_moe, n_cpu_moe=n_cpu_moe)
    options: dict[str, Any] = {"n_gpu_layers": n_gpu_layers, **places}
    if n_threads is not None:
        options |= {"n_threads": n_threads, "n_threads_batch": n_threads}
    probe_profile.cache(str(path), progress, **options)
    return str(cached(identify(str(path))))
