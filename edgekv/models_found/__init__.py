"""The models that are on this computer already, and what their names mean.

A store is a folder in which some program keeps its models. Each has a file here with `NAME` and
`find()`, and a line in `STORES`. Nothing is downloaded. Loads no library.
"""

from __future__ import annotations

from edgekv.models_found.found import Found
from edgekv.models_found.names import path_of
from edgekv.models_found.stores import STORES, everything

__all__ = ["STORES", "Found", "everything", "path_of"]
