"""Speed and memory of one machine, in llama-bench's terms: a row is a test under one setting,
measured in processes of its own.
"""
