"""What goes wrong because of what the user asked for.

Each error's text is one line that says what is wrong and what to do next. The command line prints
it and exits with code 2; programmer mistakes are asserts and keep their traceback.

Errors of `edgekv.Llama` are of the kinds, too, that llama-cpp-python raises in their place:
ValueError, RuntimeError or TypeError.
"""


class EdgeKVError(Exception):
    """A user mistake. `str(error)` is one line that says what to do."""


class BadInput(EdgeKVError, ValueError):
    """A value, file or name that cannot be used."""


class DamagedState(BadInput, RuntimeError):
    """A state that is damaged, or of another model."""


class ContextFull(BadInput, RuntimeError):
    """A text that the context has no room for. what: the line without what to do."""

    def __init__(self, what: str, to_do: str) -> None:
        super().__init__(f"{what}; {to_do}")
        self.what = what


class UnknownArgument(BadInput, TypeError):
    """An argument that does not exist."""


class StepFailed(EdgeKVError, RuntimeError):
    """llama.cpp could not compute what was valid."""


class Cancelled(EdgeKVError):
    """Reading a prompt or writing an answer was stopped."""


class Unsupported(EdgeKVError):
    """A valid wish that this model, cache type or build cannot fulfil."""
