"""From a model's name to its file: those on this computer, the demo model, and the hub."""
