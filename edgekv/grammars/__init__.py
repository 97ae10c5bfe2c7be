"""Grammars of JSON schemas: what llama.cpp's converter takes exactly, and the rules that it lacks.

A leaf room: it knows no model and no chat.
"""
