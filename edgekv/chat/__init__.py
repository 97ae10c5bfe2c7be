"""Chats: from messages to a prompt, and from what a model writes to a message, as llama.cpp has it.

The only room that knows templates, tool calls and thoughts. It knows no cache.
"""
