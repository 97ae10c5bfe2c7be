"""The commands inside a chat: one function each, found by name. They write to standard error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from edgekv.commands import terminal, wrap
from edgekv.commands.conversation import Conversation, Document
from edgekv.commands.report import cache_words, method_name, mib, stats_table, table
from edgekv.commands.saved import last_turn
from edgekv.commands.stream import or_larger
from edgekv.documents.extract import document_text
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv.base.stats import KVStats
    from edgekv.commands.stream import Piece

Command = Callable[[Conversation, str], "Iterator[Piece] | None"]
"""(conversation, what stands behind the name) -> a reply to print, or None."""


class Quit(Exception):
    """The user wants to leave."""


def run(conversation: Conversation, line: str) -> Iterator[Piece] | None:
    """Carries out a line that begins with '/'. Returns a reply that is to be printed, or None.

    Raises BadInput and Quit.
    """
    typed, _, rest = line.partition(" ")
    command = COMMANDS.get(ALIASES.get(typed, typed))
    if command is None:
        raise BadInput(f"there is no command {typed}; /help lists them")
    if rest.strip() and " " not in described(command)[0]:
        raise BadInput(f"{typed} stands alone; leave '{rest.strip()}' out")
    return command(conversation, rest.strip())


def help_(conversation: Conversation, rest: str) -> None:
    """/help | this list"""
    rows = list(map(described, COMMANDS.values()))
    others = (" ".join(ALIASES), "as elsewhere: " + ", ".join(dict.fromkeys(ALIASES.values())))
    keys = [
        ('"""', "begins and ends a text of several lines"),
        ("Tab", "complete a command or a path"),
        ("Ctrl-C", "stop the reply, or reading"),
        ("Ctrl-D", "leave"),
    ]
    say(table([*rows, others, *keys], width=terminal.width()))


def described(command: Command) -> tuple[str, str]:
    """How a command is written, and what it does."""
    usage, _, meaning = " ".join((command.__doc__ or "").split()).partition(" | ")
    return usage, meaning


def file(conversation: Conversation, rest: str) -> Iterator[Piece] | None:
    """/file [PATH [question]] | put a document in front of the next message, and ask at once if
    a question follows; without a path list the files that wait, with - drop them"""
    if rest in ("", "-"):
        names = ", ".join(map(str, conversation.documents)) or "no file"
        if rest:
            conversation.documents = []
        say(f"{names} {'dropped' if rest else 'in front of your next message'}")
        return None
    path, question = split_path(rest)
    text = document_text(path)
    document = next((x for x in conversation.documents if x.text == text), None)
    if document is None:  # else it waits already, perhaps because its turn was stopped
        document = Document(path, text, check_room(conversation, path, text))
        if question:
            return conversation.ask(question, document)
        conversation.documents.append(document)
    elif question:
        return conversation.ask(question)
    say(f"{document}: read with your next message")
    return None


def regen(conversation: Conversation, rest: str) -> Iterator[Piece]:
    """/regen | write the last reply anew"""
    return conversation.regenerate()


def stats(conversation: Conversation, rest: str) -> None:
    """/stats | what the cache holds"""
    say(stats_table(conversation.llm.kv_stats(), width=terminal.width()))


def save(conversation: Conversation, rest: str) -> None:
    """/save PATH | write the conversation to a file"""
    path = needed(rest, "/save PATH")
    conversation.save(path)
    say(f"saved in {path}")


def load(conversation: Conversation, rest: str) -> None:
    """/load PATH | take up a saved conversation, with its cache's options"""
    llm = conversation.llm
    before = cache_words(llm.kv_stats(), llm.kv_config().method)
    conversation.load(needed(rest, "/load PATH"))
    stats = llm.kv_stats()
    end, now = last_turn(conversation.messages), cache_words(stats, llm.kv_config().method)
    say(
        f"loaded: {len(conversation.messages)} messages, {stats.n_seen:,} tokens"
        + f"; the cache is as it was saved: {now}" * (now != before)
        + (f"; the last ones:\n{end}" if end else "")
    )


def reset(conversation: Conversation, rest: str) -> None:
    """/reset | forget everything but the system message"""
    has_begun = not conversation.is_new or bool(conversation.documents)
    conversation.reset()
    say("forgotten" if has_begun else "there is nothing to forget")


def system(conversation: Conversation, rest: str) -> None:
    """/system TEXT | set the system message; without a text take it away"""
    conversation.set_system(rest)
    say(
        "the system message is "
        + ("set" if rest else "gone")
        + "; the conversation is read again with your next message"
    )


def ratio(conversation: Conversation, rest: str) -> None:
    """/ratio R | keep the share R of the cache from the next prompt on"""
    from edgekv.methods.budget import check_ratio

    llm, share = conversation.llm, check_ratio(needed(rest, "/ratio 0.2"))
    if share < 1:
        conversation.learn(share)
    before = llm.kv_stats()
    llm.kv_set(ratio=share)
    now = llm.kv_stats()
    method = f"method {method_name(now)}" if share < 1 else ""
    again = (
        "the conversation is read again with your next message"
        if before.n_seen > now.n_seen
        else ""
    )
    say("; ".join(filter(None, [kept_from_now(share, before, now), method, again, now.note])))


def kept_from_now(share: float, before: KVStats, now: KVStats) -> str:
    """What the next prompt keeps, with an example: the tokens that were seen before."""
    wish = f"{100 * share:g} % of the memory from the next prompt on"
    if not before.n_seen:
        return wish
    n_kept = min(int(share * now.per_f16 * before.n_seen), before.n_seen)
    n_bytes = before.n_bytes_full * n_kept / now.per_f16 / before.n_seen
    return (
        f"{wish}: {mib(n_bytes)} of {mib(before.n_bytes_full)} MiB, "
        f"{n_kept:,} of the {before.n_seen:,} tokens seen would stay"
    )


def quit_(conversation: Conversation, rest: str) -> None:
    """/quit | leave"""
    raise Quit


COMMANDS: dict[str, Command] = {
    "/help": help_,
    "/file": file,
    "/regen": regen,
    "/stats": stats,
    "/save": save,
    "/load": load,
    "/reset": reset,
    "/system": system,
    "/ratio": ratio,
    "/quit": quit_,
}
WITH_PATH = ("/file", "/read", "/save", "/load")
ALIASES = {"/exit": "/quit", "/bye": "/quit", "/clear": "/reset", "/read": "/file", "/?": "/help"}
"""What llama.cpp and Ollama call them."""


def say(text: str) -> None:
    """A line for the user that is no part of the result."""
    click.echo(wrap.lines(text, terminal.width()), err=True)


def needed(rest: str, usage: str) -> str:
    """What stands behind a command. Raises BadInput if there is nothing."""
    if not rest:
        raise BadInput(f"something is missing; write {usage}")
    return rest


def check_room(conversation: Conversation, path: str, text: str) -> int:
    """Tokens of the text. Raises BadInput if they do not fit beside what is there and waits."""
    llm = conversation.llm
    n_tokens = len(llm.tokenize(text.encode(), add_bos=False))
    n_waiting = sum(x.n_tokens for x in conversation.documents if not x.is_read)
    n_seen = llm.kv_stats().n_seen
    n_left = llm.n_ctx() - n_seen - n_waiting
    if n_tokens >= n_left:
        more = ", or /reset" * (n_seen > 0) + ", or '/file -'" * (n_waiting > 0)
        raise BadInput(
            f"'{path}' has {n_tokens:,} tokens, and {n_left:,} of the context's {llm.n_ctx():,} are"
            f" left; give a shorter text{more}{or_larger(llm)}"
        )
    return n_tokens


def split_path(rest: str) -> tuple[str, str]:
    """'PATH question' in its two parts. A path with blanks is quoted, unless it is all there is."""
    if rest[0] in "'\"" and rest.find(rest[0], 1) > 0:
        path, _, question = rest[1:].partition(rest[0])
        return path, question.strip()
    if os.path.isfile(os.path.expanduser(rest)):  # raises nothing, whatever the text
        return rest, ""
    path, _, question = rest.partition(" ")
    return path, question.strip()
