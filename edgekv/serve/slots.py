"""POST /slots/ID: conversations to files and back, as llama-server saves its slots.

A slot's number is a place in the order of use: 0 is the conversation that was used last.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from edgekv.errors import BadInput
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.errors import ApiError
from edgekv.serve.schemas import SlotBody
from edgekv.serve.service import Service, between_steps, service_of

router = APIRouter(route_class=BoundedRoute)

NAME_MOST = 255
"""Bytes of a file's name."""
FORBIDDEN = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd')
"""Characters that llama-server allows in no name."""


@router.post("/slots/{id}")
async def act(
    id: str, http: HttpRequest, body: SlotBody | None = None, action: str = ""
) -> dict[str, Any]:
    """Save, restore or erase (`action`) the conversation in a slot."""
    service = service_of(http)
    if service.options.slot_save_path is None:
        raise ApiError(
            501, "This server does not support slots action. Start it with `--slot-save-path`"
        )
    if not id.isdecimal() or len(id) > 9 or int(id) >= service.options.parallel:
        raise BadInput(f"Invalid slot ID: there are 0 to {service.options.parallel - 1}")
    slot = int(id)
    if action == "erase":
        n_erased = await between_steps(service, lambda: _erase(service, slot))
        return {"id_slot": slot, "n_erased": n_erased}
    if action not in ("save", "restore"):
        raise BadInput("Invalid action: give save, restore or erase")
    if body is None:
        raise BadInput("give the name of a file: filename")
    path, begin = _path(service.options.slot_save_path, body.filename), time.perf_counter()
    work = _save if action == "save" else _restore
    try:
        n = await between_steps(service, lambda: work(service, slot, path))
    except BadInput as error:  # where the folder lies is nobody's business
        raise BadInput(str(error).replace(str(path), body.filename)) from None
    n_bytes, ms = path.stat().st_size, round(1e3 * (time.perf_counter() - begin), 3)
    said: dict[str, Any] = {"id_slot": slot, "filename": body.filename}
    if action == "save":
        return {**said, "n_saved": n, "n_written": n_bytes, "timings": {"save_ms": ms}}
    return {**said, "n_restored": n, "n_read": n_bytes, "timings": {"restore_ms": ms}}


def _save(service: Service, slot: int, path: Path) -> int:
    id = _in(service, slot)
    if id is None:
        raise BadInput(f"slot {slot} holds no conversation")
    return service.worker.conversations.save_as(id, str(path))


def _restore(service: Service, slot: int, path: Path) -> int:
    return service.worker.conversations.restore(str(path))


def _erase(service: Service, slot: int) -> int:
    found = service.worker.conversations.list()[slot : slot + 1]
    for talk in found:
        service.worker.conversations.erase(talk.id)
    return sum(talk.n_tokens for talk in found)


def _in(service: Service, slot: int) -> str | None:
    """The id of the conversation in a slot."""
    found = service.worker.conversations.list()
    return found[slot].id if slot < len(found) else None


def _path(folder: str, name: str) -> Path:
    """A file of this folder itself. Raises BadInput for a name that could be of another one."""
    path = Path(folder, name) if _is_name(name) else None
    if path is None or os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise BadInput("Invalid filename: give a name without folders")
    return path


def _is_name(name: str) -> bool:
    """As llama-server's, names that are the same on every system; and they can be printed."""
    return (
        name.isprintable()
        and 0 < len(name.encode()) <= NAME_MOST
        and not FORBIDDEN & set(name)
        and name == name.strip(" ")
        and not name.endswith(".")
        and ".." not in name
    )
