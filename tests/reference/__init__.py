"""An independent re-implementation in torch of what edgekv does, read from the same GGUF files and
sharing none of its code.

weights.py reads a file, cache.py rounds rows as a cache type would, model.py runs the transformer
over a full cache of which each KV head may see some rows only, scores.py judges the keys. It is
slow and plain on purpose; it knows nothing of llama.cpp.
"""
