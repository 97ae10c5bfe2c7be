"""What goes wrong because of what the user asked for.

Each error's text is one line that says what is wrong and what to do next. The command line prints
it and exits with code 2; programmer mistakes are asserts and keep their traceback.
"""


class EdgeKVError(Exception):
    """A user mistake. `str(error)` is one line that says what to do."""


class BadInput(EdgeKVError):
    """A value, file or name that cannot be used."""


class ContextFull(BadInput):
    """A text that the context has no room for. what: the line without what to do."""

    def __init__(self, what: str, to_do: str) -> None:
        super().__init__(f"{what}; {to_do}")
        self.what = what


class UnknownArgument(BadInput, TypeError):
    """An argument that does not exist."""


class Cancelled(EdgeKVError):
    """Reading a prompt or writing an answer was stopped."""


class Unsupported(EdgeKVError):
    """A valid wish that this model, cache type or build cannot fulfil."""
