"""Profiles: which KV heads get the rows, learned off line for one model.

A profile is a table of kept shares [ratio, layer, KV head]. `file` says what it holds and reads and
writes it, `places` says where the profiles of a model are (`edgekv.model.identity` knows its file
again). `probe_profile` and `lukv` make one with the engine, and so does `evolkv`, which tries
schemes on the examples of `training`. `curves` exchanges them with published LU-KV curves, `draw`
shows them. How shares become rows is `edgekv.methods.budget`'s business. Importing this package
loads no library.
"""

from __future__ import annotations

from edgekv.model.identity import Identity, identify
from edgekv.profiles.file import Profile, read, write
from edgekv.profiles.places import NONE, Profiles, find

__all__ = ["NONE", "Identity", "Profile", "Profiles", "find", "identify", "read", "write"]
