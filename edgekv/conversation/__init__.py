"""A conversation beyond one prompt: who may use it, its state, saving, loading and continuing."""
