"""The models that are on this computer already, and what their names mean.

A store is a folder in which some program keeps its models. Each has `NAME` and `find()`, a
file here or a line in `plain`, and a place in `stores.STORES`. `edgekv.models.hub` downloads. Loads
no library.
"""
