"""Which tokens of a text the cache has kept, and a page that shows it."""
