"""How a model's weights are loaded, as the commands' options say it. Loads no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekv.model.adapters import Adapter
    from edgekv.model.placement import Placement

SPLIT_MODES = ("none", "layer", "row")
"""llama.h's llama_split_mode, by its numbers."""


@dataclass(frozen=True)
class Loading:
    """Fields are the options' names; each means what it means in llama.cpp."""

    override_tensor: tuple[str, ...] = ()
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    rpc: tuple[str, ...] = ()
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    mmap: bool = True
    mlock: bool = False
    repack: bool | None = None
    lora: tuple[Adapter, ...] = ()
    lora_scaled: tuple[Adapter, ...] = ()
    override_kv: tuple[tuple[str, bool | int | float | str], ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Loading:
        """The same from plain values, with lists for tuples, as JSON has them."""
        return cls(**{name: _tuples(value) for name, value in values.items()})

    def places(self) -> dict[str, Any]:
        """Arguments of `Llama` that say where the weights go, and change nothing else."""
        return {
            "override_tensor": self.override_tensor,
            "cpu_moe": self.cpu_moe,
            "n_cpu_moe": self.n_cpu_moe,
            "rpc_servers": list(self.rpc) or None,
            "split_mode": SPLIT_MODES.index(self.split_mode),
            "tensor_split": list(self.tensor_split) or None,
            "main_gpu": self.main_gpu,
            "use_mmap": self.mmap,
            "use_mlock": self.mlock,
            "repack": self.repack,
        }

    @property
    def load_mode(self) -> str:
        """llama.cpp's word for how the file is read."""
        return {
            (True, False): "auto",
            (False, False): "none",
            (True, True): "mmap+mlock",
            (False, True): "mlock",
        }[self.mmap, self.mlock]

    def arguments(self) -> dict[str, Any]:
        """All arguments of `Llama`."""
        adapters = [*self.lora, *self.lora_scaled]
        return {
            **self.places(),
            "lora_path": [path for path, _ in adapters] or None,
            "lora_scale": [scale for _, scale in adapters] or 1.0,
            "kv_overrides": dict(reversed(self.override_kv)) or None,
        }

    def placements(self) -> list[Placement]:
        """Where tensors lie that were told to. Raises BadInput."""
        from edgekv.model.placement import placements

        return placements(self.override_tensor, self.cpu_moe, self.n_cpu_moe)

    def check(self, model: str) -> None:
        """Raises BadInput for what a file cannot be loaded with, before anything takes long."""
        from edgekv.model import adapters, metadata, rpc
        from edgekv.model.placement import check_buffers

        for endpoint in self.rpc:
            rpc.check(endpoint)
        check_buffers(self.placements())
        for path, _ in (*self.lora, *self.lora_scaled):
            adapters.check(path, model)
        metadata.check(dict(reversed(self.override_kv)), model)

    def words(self) -> list[str]:
        """What of a command line says where tensors go."""
        words = [word for text in self.override_tensor for word in ("-ot", text)]
        words += ["--cpu-moe"] if self.cpu_moe else []
        return words + (["--n-cpu-moe", str(self.n_cpu_moe)] if self.n_cpu_moe else [])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
