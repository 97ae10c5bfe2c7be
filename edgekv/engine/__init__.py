"""The loop over a prompt's layers, from what is observed to what is evicted, and the recent buffer.

It knows tokens and a context, no text and no sampling.
"""
