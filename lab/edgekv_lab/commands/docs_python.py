"""docs/python-api.md, written from the public names' signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any

import edgekv
from edgekv_lab import markdown

HEAD = """# Python API

Generated from docstrings by `python -m edgekv_lab.commands.docs`; change them in the code.

`edgekv` has the names below; `edgekv.llama_cpp` has the rest of llama-cpp-python's bindings.
[Beside llama-cpp-python](llama-cpp-python.md) says which of the parent's methods differ, which
errors come instead of its own, and how to use threads and asyncio.

```python
from edgekv import Llama

with Llama("model.gguf", n_ctx=8192, kv_ratio=0.2, verbose=False) as llm:
    reply = llm.create_chat_completion(messages=[{"role": "user", "content": "Hello"}])
    print(llm.kv_stats().n_bytes_used)
```

Several conversations take turns on one model. None is read again when it goes on, and a document
that two of them share is read once:

```python
from edgekv import Conversations, Llama

with Llama("model.gguf", n_ctx=8192, kv_ratio=0.2, verbose=False) as llm:
    Conversations(llm, cache_ram=2 << 30, cache_disk="talks")  # 2 GiB, then files; both optional
    for name, question in (("report", "Who?"), ("novel", "Who?"), ("report", "When?")):
        document = {"type": "text", "text": open(f"{name}.txt").read()}
        with llm.conversation(name):
            llm.create_chat_completion(
                [{"role": "user", "content": [document, {"type": "text", "text": question}]}]
            )
```
"""
METHODS = (
    *("close", "reset", "create_chat_completion", "conversation"),
    *("use", "list", "save", "erase", "flush"),
)
"""Methods of `Llama` and `Conversations` that are on the page besides those that begin with kv_."""


def page() -> str:
    """The whole page."""
    things = [
        (name, getattr(edgekv, name)) for name in sorted(edgekv.__all__) if not name.startswith("_")
    ]
    functions = [
        function(f"edgekv.{name}", thing) for name, thing in things if inspect.isfunction(thing)
    ]
    errors = [
        thing for _, thing in things if isinstance(thing, type) and issubclass(thing, Exception)
    ]
    classes = [thing for _, thing in things if isinstance(thing, type) and thing not in errors]
    return "\n".join(
        [HEAD, *(described(thing) for thing in classes), *functions, error_section(errors)]
    )


def described(kind: type) -> str:
    """A class: its docstring, its fields if it is a dataclass, and its methods."""
    parts = [f"## edgekv.{kind.__name__}\n", text(kind)]
    if is_dataclass(kind):
        return "\n".join([*parts, fields_table(kind)])
    ours = [
        one
        for one in reversed(kind.__mro__)
        if one.__module__.startswith("edgekv.") and "llama_cpp" not in one.__module__
    ]
    found = {name: value for one in ours for name, value in vars(one).items() if name in METHODS}
    found |= {name: value for name, value in vars(kind).items() if name.startswith("kv_")}
    own = [function(f"{kind.__name__}.{name}", value, "###") for name, value in found.items()]
    return "\n".join([*parts, *own])


def function(name: str, thing: Any, level: str = "##") -> str:
    signature = inspect.signature(thing)
    kept = [
        p.replace(annotation=_plain(p.annotation))
        for n, p in signature.parameters.items()
        if n != "self"
    ]
    shown = str(
        signature.replace(parameters=kept, return_annotation=_plain(signature.return_annotation))
    )
    return f"{level} {name}\n\n    {name}{shown}\n\n{text(thing)}"


def _plain(annotation: Any) -> Any:
    """An annotation that prints as it is written, without the quotes of postponed ones."""
    return annotation if annotation is inspect.Parameter.empty else _Written(str(annotation))


class _Written:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def text(thing: Any) -> str:
    """A docstring as Markdown: arguments at the beginning of a paragraph become code."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    return re.sub(r"(?m)^((?:\w+, )*\w+): ", lambda found: f"`{found[1]}`: ", doc) + "\n"


def fields_table(kind: type) -> str:
    """The fields of a dataclass and the docstring below each, read from its source.

    What an option of the command line means stands on its page alone.
    """
    said: dict[str, str] = {}
    name = ""
    pattern = r'(?ms)^    (\w+): [^\n]*$|^    """(.*?)"""$'
    for field, doc in re.findall(pattern, inspect.getsource(kind)):
        if field:
            name = field
        else:
            said[name] = " ".join(doc.split())
    rows, head = [], ["field", "type", "default", "meaning"]
    for f in fields(kind):
        option = f.metadata.get("option")  # of the cache
        own = option.help if option and option.is_python_only else ""
        meaning = " ".join(part for part in (own, said.get(f.name)) if part)
        rows.append([f"`{f.name}`", str(f.type), f"`{f.default!r}`" if option else "", meaning])
    if not any(row[2] for row in rows):
        rows, head = [[*row[:2], row[3]] for row in rows], ["field", "type", "meaning"]
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    return markdown.table(head, ([cell.replace("|", "\\|") for cell in row] for row in rows), head)


def error_section(errors: list[type]) -> str:
    """The errors, the family's root first."""
    rows = []
    for kind in sorted(errors, key=lambda kind: (len(kind.__mro__), kind.__name__)):
        above = ", ".join(base.__name__ for base in kind.__bases__)
        rows.append([f"`edgekv.{kind.__name__}`", above, " ".join((kind.__doc__ or "").split())])
    said = "## Errors\n\nEach error's text is one line that says what to do next.\n\n"
    return said + table(["error", "kind of", "meaning"], rows)
