"""A window for questions about documents. Each document has a conversation of its own.

    python examples/desktop/app.py model.gguf report.txt novel.txt --kv-ratio 0.2

Tk's thread draws, and the worker's thread alone uses the model. Questions go to the worker through
a queue. Its events come back through another one, which Tk's thread empties twenty times a second.
"""

from __future__ import annotations

import argparse
import queue
import threading
from pathlib import Path
from tkinter import Text, Tk, filedialog, messagebox, ttk
from typing import Any

import edgekv


class Worker(threading.Thread):
    """Loads a model and answers the questions of one tab after the other. While it reads a
    document, it answers about those that it has read.

    asked: takes tabs, paths of models to go on with, and None for the end. Events are (name, tab or
    None, value); a tab or the window has a method of each name.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        super().__init__(name="model")
        self.asked: queue.SimpleQueue[Tab | str | None] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[tuple[str, Tab | None, Any]] = queue.SimpleQueue()
        self._model: str | None = model
        self._options, self.is_closing = options, False
        self._lock, self._current = threading.Lock(), None
        self._later: list[Tab | str | None] = []  # taken from `asked` while a document was read

    def cancel(self, tab: Tab) -> None:
        """Stop the tab's question, whether it is answered now or waits."""
        with self._lock:
            tab.is_cancelled = True
            if self._current is tab:
                self._llm.kv_cancel()

    def close(self) -> None:
        """End the thread as soon as what is under way has stopped."""
        with self._lock:
            self.is_closing = True
            if self._current:
                self._llm.kv_cancel()
        self.asked.put(None)

    def run(self) -> None:
        while self._model:
            try:
                self._model = self._use(self._model)
            except edgekv.EdgeKVError as error:
                self._model = self._without(str(error))

    def _use(self, model: str) -> str | None:
        """Answer with a model. Returns the one to go on with."""
        self.events.put(("say", None, f"loading {Path(model).name}"))
        if self._options["kv_ratio"] < 1 and not edgekv.has_profile(model):
            edgekv.make_profile(model, self._prepared)
        self._has_read: set[Tab] = set()
        with edgekv.Llama(model, kv_progress=self._read, **self._options) as self._llm:
            self.events.put(("say", None, f"{Path(model).name}: ready"))
            while isinstance(one := self._next(), Tab):
                self._answer(one)
        return one

    def _without(self, why: str) -> str | None:
        """Wait for another model, as there is none."""
        if not self.is_closing:
            self.events.put(("fail", None, why))
        while isinstance(one := self._next(), Tab):
            self.events.put(("end", one, ("", None, why)))
        return one

    def _next(self) -> Tab | str | None:
        return self._later.pop(0) if self._later else self.asked.get()

    def _prepared(self, done: int, total: int) -> None:
        if self.is_closing:
            raise edgekv.Cancelled("the window was closed")
        self.events.put(("say", None, f"one-time preparation of this model: {done} of {total}"))

    def _read(self, done: int, total: int) -> None:
        self.events.put(("read", self._current, (done, total)))
        has_switch = bool(self._later) and not isinstance(self._later[-1], Tab)
        if self.asked.empty() or has_switch or not self._llm.conversations.can_wait():
            return
        guest, reader = self.asked.get(), self._current
        if guest not in self._has_read:
            self._later.append(guest)
            return
        with self._llm.conversations.meanwhile():  # the document waits half read
            self._answer(guest)
        self._begin(reader)

    def _begin(self, tab: Tab) -> None:
        with self._lock:
            self._current = tab
            self._llm.kv_cancel(self.is_closing or tab.is_cancelled)

    def _answer(self, tab: Tab) -> None:
        answer, stats, problem = "", None, ""
        self._begin(tab)
        try:
            # What the other documents' conversations have read stays in memory meanwhile.
            with self._llm.conversation(str(tab)):
                options = {"stream": True, "max_tokens": 512}  # a small model may find no end
                for chunk in self._llm.create_chat_completion(tab.pending, **options):
                    piece = chunk["choices"][0]["delta"].get("content") or ""
                    answer += piece
                    self.events.put(("write", tab, piece))
                stats = self._llm.kv_stats()
                self._has_read.add(tab)
        except edgekv.EdgeKVError as error:
            problem = "cancelled" if isinstance(error, edgekv.Cancelled) else str(error)
        with self._lock:
            self._current = None
        self.events.put(("end", tab, (answer, stats, problem)))


class Tab(ttk.Frame):
    """A document: what was said about it, a question, and what its conversation takes."""

    def __init__(self, parent: ttk.Notebook, worker: Worker, path: Path) -> None:
        super().__init__(parent, padding=8)
        self.worker, self.is_cancelled = worker, False
        self.document = {"type": "text", "text": path.read_text(encoding="utf-8")}
        self.messages: list[dict[str, Any]] = []  # of answered questions
        self.pending: list[dict[str, Any]] = []  # the same and the question that is open, if any
        self.transcript = Text(self, wrap="word", state="disabled", padx=6, font="TkDefaultFont")
        self.question = ttk.Entry(self)
        self.ask_button = ttk.Button(self, text="Ask", command=self.ask)
        self.cancel_button = ttk.Button(self, text="Cancel", command=lambda: worker.cancel(self))
        self.progress, self.memory = ttk.Progressbar(self), ttk.Progressbar(self)
        self.kept = ttk.Label(self, text="nothing read yet")
        self.transcript.grid(row=0, columnspan=3, sticky="nsew")
        for x, widget in enumerate((self.question, self.ask_button, self.cancel_button)):
            widget.grid(row=1, column=x, sticky="ew", pady=8)
        for y, name, bar in ((2, "read of the prompt", self.progress), (3, "kept", self.memory)):
            bar.grid(row=y, column=0, sticky="ew", pady=2)
            ttk.Label(self, text=name).grid(row=y, column=1, columnspan=2, sticky="w", padx=8)
        self.kept.grid(row=4, columnspan=3, sticky="w")
        self.columnconfigure(0, weight=1)
        self.rowconfigure(0, weight=1)
        self.question.bind("<Return>", lambda _: self.ask())

    def ask(self) -> None:
        text = self.question.get().strip()
        if self.pending or not text:
            return
        content = text if self.messages else [self.document, {"type": "text", "text": text}]
        self.is_cancelled = False
        self.pending = [*self.messages, {"role": "user", "content": content}]
        self.question.delete(0, "end")
        self.write(f"> {text}\n")
        self.ask_button.state(["disabled"])
        self.worker.asked.put(self)

    def read(self, value: tuple[int, int]) -> None:
        self.progress["value"], self.progress["maximum"] = value

    def write(self, text: str) -> None:
        self.transcript["state"] = "normal"
        self.transcript.insert("end", text)
        self.transcript["state"] = "disabled"
        self.transcript.see("end")

    def end(self, value: tuple[str, edgekv.KVStats | None, str]) -> None:
        answer, stats, problem = value
        self.write(f"({problem})\n\n" if problem else "\n\n")
        if stats:  # a question that was not answered is forgotten
            self.messages = [*self.pending, {"role": "assistant", "content": answer}]
            used, full = stats.n_bytes_used / 2**20, stats.n_bytes_full / 2**20
            self.memory["value"], self.memory["maximum"] = used, full
            self.kept["text"] = f"{used:.1f} of {full:.1f} MiB kept for {stats.n_seen:,} tokens"
        self.pending = []
        self.ask_button.state(["!disabled"])
        self.progress["value"] = 0


class Window(Tk):
    """All documents. options: of `edgekv.Llama`."""

    def __init__(self, model: str, documents: list[str], options: dict[str, Any]) -> None:
        super().__init__()
        self.title("edgekv")
        self.tabs = ttk.Notebook(self)
        self.status = ttk.Label(self)
        buttons = ttk.Frame(self, padding=8)
        for text, command in (("Open...", self.open), ("Model...", self.use_model)):
            ttk.Button(buttons, text=text, command=command).pack(side="left")
        buttons.pack(anchor="w")
        self.status.pack(side="bottom", anchor="w", padx=8, pady=4)
        self.tabs.pack(fill="both", expand=True)
        self.worker = Worker(model, options)
        if documents:
            self.open(*documents)
        self.protocol("WM_DELETE_WINDOW", self.worker.close)
        self.worker.start()
        self.after(50, self.take_events)

    def open(self, *paths: str) -> None:
        for path in map(Path, paths or filedialog.askopenfilenames(parent=self)):
            try:
                self.tabs.add(Tab(self.tabs, self.worker, path), text=path.name)
            except (OSError, UnicodeDecodeError) as error:
                messagebox.showerror("edgekv", f"{path} cannot be read: {error}", parent=self)

    def use_model(self, path: str = "") -> None:
        """Questions from now on are for another model, which reads the documents anew."""
        if path := path or filedialog.askopenfilename(parent=self, filetypes=[("GGUF", "*.gguf")]):
            self.say(f"{Path(path).name}: waits for the questions that are open")
            self.worker.asked.put(path)

    def take_events(self) -> None:
        is_over = not self.worker.is_alive()  # asked first: no event comes behind it
        while not self.worker.events.empty():
            name, tab, value = self.worker.events.get()
            getattr(tab or self, name)(value)
        if is_over and self.worker.is_closing:
            self.destroy()
        else:
            self.after(50, self.take_events)

    def say(self, text: str) -> None:
        self.status["text"] = text

    def fail(self, text: str) -> None:
        self.say("no model is loaded")
        messagebox.showerror("edgekv", text, parent=self)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about documents, in a window.")
    parser.add_argument("model")
    parser.add_argument("documents", nargs="*")
    parser.add_argument("--kv-ratio", type=float, default=0.2)
    parser.add_argument("-c", "--ctx-size", type=int, default=8192)
    given = parser.parse_args()
    options = {"n_ctx": given.ctx_size, "kv_ratio": given.kv_ratio, "verbose": False}
    Window(given.model, given.documents, options).mainloop()


if __name__ == "__main__":
    main()
