"""Ollama's protocol: chats and texts, and what it says of models."""
