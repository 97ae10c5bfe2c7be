"""The commands inside a chat: one function each, found by its name. What they print goes to standard error."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from edgekv.commands.conversation import Conversation
from edgekv.commands.report import mib, stats_table, table
from edgekv.commands.text import read_document
from edgekv.errors import BadInput

Command = Callable[[Conversation, str], "str | None"]
"""(conversation, what stands behind the name) -> a question to ask now, or None."""


class Quit(Exception):
    """The user wants to leave."""


def run(conversation: Conversation, line: str) -> str | None:
    """Carries out a line that begins with '/'. Returns a question to ask now, or None. Raises BadInput and Quit."""
    name, _, rest = line.partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        raise BadInput(f"there is no command {name}; /help lists them")
    return COMMANDS[name](conversation, rest.strip())


def help_(conversation: Conversation, rest: str) -> None:
    """/help | this list"""
    rows = [[part.strip() for part in (command.__doc__ or "").split("|")] for command in COMMANDS.values()]
    others = [" ".join(ALIASES), "as elsewhere: " + ", ".join(dict.fromkeys(ALIASES.values()))]
    say(table([*rows, others, ["Ctrl-C", "stop the reply, or reading"], ["Ctrl-D", "leave"]]))


def file(conversation: Conversation, rest: str) -> str | None:
    """/file PATH [question] | put a text file in front of the next message, and ask at once if a question follows"""
    path, question = split_path(rest)
    text = read_document(path)
    n_tokens = check_room(conversation, path, text)
    conversation.documents.append(text)
    if question:
        return question
    say(f"{path}: {n_tokens:,} tokens; they are read with your next message")
    return None


def stats(conversation: Conversation, rest: str) -> None:
    """/stats | what the cache holds"""
    say(stats_table(conversation.llm.kv_stats()))


def save(conversation: Conversation, rest: str) -> None:
    """/save PATH | write the conversation to a file"""
    files = conversation.save(needed(rest, "/save PATH"))
    say(f"saved in {' and '.join(map(str, files))}")


def load(conversation: Conversation, rest: str) -> None:
    """/load PATH | take up a saved conversation"""
    conversation.load(needed(rest, "/load PATH"))
    say(f"loaded: {len(conversation.messages)} messages, {conversation.llm.kv_stats().n_seen:,} tokens")


def reset(conversation: Conversation, rest: str) -> None:
    """/reset | forget everything but the system message"""
    conversation.reset()
    say("forgotten")


def system(conversation: Conversation, rest: str) -> None:
    """/system TEXT | set the system message; without a text take it away"""
    conversation.set_system(rest)
    say("the system message is " + ("set" if rest else "gone") + "; the conversation is read again with your next message")


def ratio(conversation: Conversation, rest: str) -> None:
    """/ratio R | keep the share R of the cache from the next prompt on"""
    from edgekv.budget import check_ratio

    share = check_ratio(needed(rest, "/ratio 0.2"))
    now = conversation.llm.kv_stats()
    conversation.llm.kv_set(ratio=share)
    per_f16 = conversation.llm.kv_stats().per_f16
    n_kept = min(int(share * per_f16 * now.n_seen), now.n_seen)
    n_bytes = now.n_bytes_full * n_kept / per_f16 / max(now.n_seen, 1)
    say(f"{100 * share:g} % of the memory from the next prompt on: {mib(n_bytes)} of {mib(now.n_bytes_full)} MiB, "
        f"{n_kept:,} of the {now.n_seen:,} tokens seen would stay")


def quit_(conversation: Conversation, rest: str) -> None:
    """/quit | leave"""
    raise Quit


COMMANDS: dict[str, Command] = {
    "/help": help_, "/file": file, "/stats": stats, "/save": save, "/load": load, "/reset": reset,
    "/system": system, "/ratio": ratio, "/quit": quit_,
}
ALIASES = {"/exit": "/quit", "/bye": "/quit", "/clear": "/reset", "/read": "/file", "/?": "/help"}
"""What llama.cpp and Ollama call them."""


def say(text: str) -> None:
    """A line for the user that is no part of the result."""
    click.echo(text, err=True)


def needed(rest: str, usage: str) -> str:
    """What stands behind a command. Raises BadInput if there is nothing."""
    if not rest:
        raise BadInput(f"something is missing; write {usage}")
    return rest


def check_room(conversation: Conversation, path: str, text: str) -> int:
    """Tokens of the text. Raises BadInput if they cannot fit beside what the context holds and what waits already."""
    llm = conversation.llm
    n_tokens, n_waiting = (len(llm.tokenize(t.encode(), add_bos=False)) for t in (text, "\n\n".join(conversation.documents)))
    n_left = llm.n_ctx() - llm.kv_stats().n_seen - n_waiting
    if n_tokens >= n_left:
        raise BadInput(f"'{path}' has {n_tokens:,} tokens, and {n_left:,} of the context's {llm.n_ctx():,} are left; "
                       "give a shorter text, /reset, or start with a larger -c")
    return n_tokens


def split_path(rest: str) -> tuple[str, str]:
    """'PATH question' in its two parts. A path with blanks stands in quotes, unless it is all there is."""
    needed(rest, "/file PATH, or /file PATH question")
    if rest[0] in "'\"" and rest.find(rest[0], 1) > 0:
        path, _, question = rest[1:].partition(rest[0])
        return path, question.strip()
    if os.path.isfile(os.path.expanduser(rest)):  # raises nothing, whatever the text
        return rest, ""
    path, _, question = rest.partition(" ")
    return path, question.strip()
