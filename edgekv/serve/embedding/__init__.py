"""A server of a model that writes no text: it gives embeddings, or ranks documents."""
