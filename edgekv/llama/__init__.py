"""`edgekv.Llama`, level by level: a model with a context (`loaded`), where tokens go
(`evaluation`), how answers are written (`answering`), and the class itself (`llama`).
"""
