"""The families of RULER (arXiv 2404.06654), generated from text and words of our own."""
