"""What can be said about models that lie on this computer, from their headers alone.

Runs in a process of its own (`edgekv.commands.overview`): llama.cpp may end it over a damaged file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

from edgekv import methods, profiles
from edgekv.commands.fit import LOADED_BYTES, Place, preset_of
from edgekv.commands.info import bytes_per_token
from edgekv.commands.overview import Fits, Overview
from edgekv.errors import BadInput, EdgeKVError
from edgekv.memory.fit import PICKED, RATIOS, STEP, TYPES, Planner, Wish
from edgekv.memory.machine import rss_now
from edgekv.methods import Preset
from edgekv.methods.choose import AUTO
from edgekv.model import facts, identity, kind
from edgekv.model.blueprint import Blueprint
from edgekv.model.header import DAMAGE, Header, files_of, opened
from edgekv.model.outline import outline
from edgekv.models_found.found import Found
from edgekv.profiles import places

MARGIN = 2**30
"""Bytes of memory to leave alone, as `edgekv fit` does."""
SIZE_F16 = 1, 2
"""Values of a block of f16, and its bytes."""


class Machine:
    """This computer's memory, to which models are held. n_bytes: that may be taken."""

    def __init__(self, n_ctx: int) -> None:
        """n_ctx: tokens that have to fit, or as many as a model was trained with."""
        self.place = Place.of(None, facts.devices())
        self.n_bytes = max(self.place.free - MARGIN, 0)
        self._n_ctx = n_ctx
        self._shapes = places.shapes()
        self._seen: dict[str, Overview] = {}

    def look(self, model: Found) -> Overview:
        """What a model's header says. A file that has two names is looked at once."""
        bare = Overview(model.name, model.source, model.path)
        if model.why_not:
            return replace(bare, why_not=model.why_not)
        path = os.path.realpath(model.path)
        if path not in self._seen:
            self._seen[path] = self._look(bare)
        known = self._seen[path]
        return replace(known, name=bare.name, source=bare.source, path=bare.path)

    def _look(self, bare: Overview) -> Overview:
        path = bare.path
        try:
            files = files_of(path)
            missing = [file for file in files if not os.path.isfile(file)]
            if missing:
                gone = os.path.basename(missing[0])
                return replace(bare, why_not=f"its part {gone} is missing: download it again")
            bare = replace(bare, size_bytes=sum(map(os.path.getsize, files)))
            why = kind.EMBEDDING if kind.gives_embeddings(path) else kind.why_no_model(path)
            if why:
                return replace(bare, why_not=why)
            with opened(path) as data:
                header = Header(data)
                with self._blueprint(path, header) as blueprint:
                    return self._overview(bare, header, blueprint)
        except OSError as error:
            why = error.strerror or str(error)
        except DAMAGE:
            why = "it is no GGUF file, or it is incomplete: download it again"
        except EdgeKVError as error:
            why = str(error).removeprefix(path).strip()
        return replace(bare, why_not=why)

    @contextmanager
    def _blueprint(self, path: str, header: Header) -> Iterator[Blueprint]:
        """The model without weights, and if possible without its vocabulary."""
        with ExitStack() as stack:
            found = None
            if len(files_of(path)) == 1:
                try:
                    short = stack.enter_context(outline(header))
                    found = stack.enter_context(Blueprint(short, on_gpu=self.place.is_gpu))
                except (OSError, BadInput, *DAMAGE):
                    found = None  # the whole file says what is wrong, if something is
            yield found or stack.enter_context(Blueprint(path, on_gpu=self.place.is_gpu))

    def _overview(self, bare: Overview, header: Header, blueprint: Blueprint) -> Overview:
        has_profile = self._has_profile(bare.path, header)
        return replace(
            bare,
            architecture=blueprint.shape["arch"],
            kv_bytes_per_token=bytes_per_token(blueprint.shape, *SIZE_F16),
            compressible=not blueprint.why,
            uncompressed_because=blueprint.why,
            profile=has_profile,
            fits=self._fits(blueprint, self._preset(bare.path, has_profile)),
        )

    def _has_profile(self, path: str, header: Header) -> bool:
        """Whether `edgekv.profiles.find` finds one; weights are read only if one may be there."""
        try:
            arch, *rest = identity.shape(header.meta)
        except DAMAGE:
            return False
        beside = places.together(places.beside(path))
        if (arch, *rest) not in self._shapes and not any(map(os.path.isfile, beside)):
            return False
        return profiles.find(path) is not None

    def _preset(self, path: str, has_profile: bool) -> Preset:
        if has_profile:
            return preset_of(AUTO, path)
        return methods.get("score=keydiff,budget=pooled")  # as `preset_of` without a profile

    def _fits(self, blueprint: Blueprint, preset: Preset) -> Fits | None:
        n_ctx = -(-min(self._n_ctx, blueprint.n_ctx_train) // STEP) * STEP
        if not n_ctx:
            return None
        process = 0 if self.place.is_gpu else rss_now() + LOADED_BYTES
        kinds = [PICKED, *((name, name) for name in TYPES[1:])]
        wish = Wish(self.n_bytes, n_ctx, RATIOS, kinds, process=process)
        point = Planner(blueprint, preset, wish, on_gpu=self.place.is_gpu).best(n_ctx)
        return Fits(point.ratio, point.type_k, point.type_v, n_ctx) if point else None


def main() -> None:
    """Read the request from standard input, and print a line about the machine, then one about each
    model as soon as it is known.
    """
    request = json.load(sys.stdin)
    machine = Machine(request["n_ctx"])
    print(json.dumps({"device": machine.place.name, "memory": machine.n_bytes}), flush=True)
    for words in request["models"]:
        print(json.dumps(asdict(machine.look(Found(**words)))), flush=True)
