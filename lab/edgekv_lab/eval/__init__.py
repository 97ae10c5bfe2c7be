"""Quality measured on a model: what is still found after the cache was compressed."""
