"""The models that are on this computer already, and what their names mean.

A store is a folder in which some program keeps its models. Each has a file here with `NAME` and
`find()`, and a line in `stores.STORES`. `edgekv.models.hub` downloads. Loads no library.
"""
