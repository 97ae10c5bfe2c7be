"""What a model learns at its first use: a profile, and the contest that `auto` follows."""
