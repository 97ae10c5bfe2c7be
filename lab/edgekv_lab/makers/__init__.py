"""Profiles that take hours: LU-KV and EvolKV, and what they measure with."""
