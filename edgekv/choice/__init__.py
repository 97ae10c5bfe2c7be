"""From what a user wishes to what the engine does: options, a method, cache types."""
