"""Where a model's weights go, as the commands' options say it. Loads no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Loading:
    """Fields are the options' names; each means what it means in llama.cpp."""

    override_tensor: tuple[str, ...] = ()
    cpu_moe: bool = False
    n_cpu_moe: int = 0

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
        }

    def arguments(self) -> dict[str, Any]:
        """All arguments of `Llama`."""
        return self.places()

    def check(self) -> None:
        """Raises BadInput for what no model could be loaded with, before anything takes long."""
        from edgekv.model.placement import check_buffers, placements

        check_buffers(placements(self.override_tensor, self.cpu_moe, self.n_cpu_moe))

    def words(self) -> list[str]:
        """What of a command line says where tensors go."""
        words = [word for text in self.override_tensor for word in ("-ot", text)]
        words += ["--cpu-moe"] if self.cpu_moe else []
        return words + (["--n-cpu-moe", str(self.n_cpu_moe)] if self.n_cpu_moe else [])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
