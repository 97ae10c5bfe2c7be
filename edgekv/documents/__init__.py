"""The text in a file: plain text, Markdown, HTML or PDF."""
