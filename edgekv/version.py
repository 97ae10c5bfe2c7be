"""The version, once: the package, its metadata and its files take it from here."""

__version__ = "0.1.0"
