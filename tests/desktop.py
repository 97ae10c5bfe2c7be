"""Uses the window of examples/desktop as somebody would, in a process of its own.

python -m tests.desktop MODEL OTHER_MODEL DOCUMENT DOCUMENT DOCUMENT

Prints one JSON object: what the window showed.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

APP = Path(__file__).resolve().parent.parent / "examples" / "desktop" / "app.py"
PATIENCE = 120
OPTIONS = {"n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "n_batch": 64, "n_ubatch": 64}
CACHE = {"kv_ratio": 0.2, "kv_method": "snapkv", "seed": 1, "verbose": False}


def main(model: str, other: str, *documents: str) -> dict[str, Any]:
    app = runpy.run_path(str(APP))
    app["edgekv"].has_profile = lambda _: True  # the method needs none
    go_on, errors = hold(app["Worker"]), list[str]()
    app["messagebox"].showerror = lambda _, text, parent: errors.append(text)
    window = app["Window"](model, list(documents), {**OPTIONS, **CACHE})
    one, two, three = (window.nametowidget(name) for name in window.tabs.tabs())
    reads: dict[Any, list[int]] = {one: [], two: [], three: []}
    for tab in reads:
        watch(tab, reads[tab])
    wait(window, lambda: window.status["text"].endswith(": ready"))
    shown: dict[str, Any] = {"tabs": [window.tabs.tab(x, "text") for x in window.tabs.tabs()]}

    ask(two, "to be stopped")  # while its document is read
    wait(window, lambda: reads[two])
    two.cancel_button.invoke()
    go_on.set()
    wait(window, lambda: not two.pending)
    shown["cancelled"] = {"text": said(two), "kept": two.kept["text"]}

    ask(one, "first")
    ask(two, "second")  # waits for the other one
    wait(window, lambda: not one.pending and not two.pending)
    shown["answered"] = [said(one), said(two)]
    shown["kept"] = [tab.kept["text"] for tab in (one, two)]
    shown["bars"] = [(tab.memory["value"], float(tab.memory["maximum"])) for tab in (one, two)]
    shown["read"] = [max(reads[tab]) for tab in (one, two)]

    reads[one].clear()
    ask(one, "third")
    ask(two, "fourth")
    two.cancel_button.invoke()  # while it waits for the other one
    wait(window, lambda: not one.pending and not two.pending)
    shown["cancelled while it waits"] = said(two)
    shown["read again"] = max(reads[one], default=0)

    go_on.clear()
    ask(three, "long")
    wait(window, lambda: reads[three])
    ask(one, "short")
    go_on.set()
    wait(window, lambda: not one.pending)
    shown["answered while it reads"] = bool(three.pending)
    wait(window, lambda: not three.pending)
    shown["read on"] = said(three)

    window.use_model("nothing.gguf")
    wait(window, lambda: errors)
    ask(one, "nobody")
    wait(window, lambda: not one.pending)
    shown["without a model"] = [*errors, said(one)]

    reads[one].clear()
    window.use_model(other)
    ask(one, "another model")
    wait(window, lambda: not one.pending)
    shown["switched"] = [window.status["text"], said(one), max(reads[one])]

    ask(one, "to be closed")
    window.worker.close()  # as the window's own button does
    window.mainloop()
    shown["closed"] = not window.worker.is_alive()
    return shown


def hold(worker: Any) -> threading.Event:
    """Prompts are not read beyond the first report of progress until the event is set."""
    go_on, report = threading.Event(), worker._read

    def read(self: Any, done: int, total: int) -> None:
        report(self, done, total)
        go_on.wait(PATIENCE)

    worker._read = read
    return go_on


def watch(tab: Any, totals: list[int]) -> None:
    """Note the tokens of each prompt that the tab shows the progress of."""
    show = tab.read

    def read(value: tuple[int, int]) -> None:
        show(value)
        totals.append(value[1])

    tab.read = read


def ask(tab: Any, question: str) -> None:
    tab.question.insert(0, question)
    tab.ask_button.invoke()


def said(tab: Any) -> str:
    return tab.transcript.get("1.0", "end").strip()


def wait(window: Any, condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen in time: {window.status['text']}"
        window.update()
        time.sleep(0.005)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
