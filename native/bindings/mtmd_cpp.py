"""Stands for llama-cpp-python's module of this name: edgekv does not build the library it needs."""

raise ImportError(
    "edgekv reads text only: pictures and sound need llama.cpp's mtmd library, which is not built"
    " here; take llama-cpp-python for them"
)
