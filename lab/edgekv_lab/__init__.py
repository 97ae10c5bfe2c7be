"""What measures edgekv, and makes profiles that take hours: the distribution `edgekv-lab`.

It imports edgekv, and brings `edgekv bench`, `edgekv eval` and `edgekv profile lukv` and `evolkv`.
In edgekv only `edgekv.commands.lab` knows of it.
"""
