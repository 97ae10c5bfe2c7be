"""A conversation beyond one prompt: who may use it, its state, saving, loading and continuing. Many
on one model: which of them a prompt goes on from, where the others wait, what is kept on disk.
"""
