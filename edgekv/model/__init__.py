"""A model file: its shape and header, its identity, and what it would take without its weights."""
