"""What a schema's $ref means."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import unquote


class References:
    """References into one document: pointers, anchors, and names that its parts have."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def find(self, ref: str) -> Any:
        """Raises LookupError for one that leads nowhere, or out of the document."""
        base, _, fragment = ref.partition("#")
        node = self._named[base] if base else self._root
        fragment = unquote(fragment)
        if not fragment:
            return node
        if not fragment.startswith("/"):
            return self._named[f"#{fragment}"]
        for step in fragment[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            node = node[step if isinstance(node, dict) else _index(step, node)]
        return node

    @cached_property
    def _named(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        left = [self._root]
        while left:
            node = left.pop()
            if isinstance(node, dict):
                for key, mark in (("$anchor", "#"), ("$id", ""), ("id", "")):
                    if isinstance(node.get(key), str):
                        found.setdefault(mark + node[key].removesuffix("#"), node)
            if isinstance(node, (dict, list)):
                left.extend(node.values() if isinstance(node, dict) else node)
        return found


def _index(step: str, node: Any) -> int:
    if not isinstance(node, list) or not step.isdecimal() or len(step) > 9:
        raise LookupError(step)
    return int(step)
