"""Stands for llama-cpp-python's server, which edgekv does not have."""

raise ImportError(
    "edgekv has no llama_cpp.server: start 'edgekv serve', which answers the same requests"
)
