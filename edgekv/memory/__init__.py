"""Memory: bytes from shapes, what the machine has free, and whether a prompt or a cache fits."""
