"""The command line's part of the lab; `edgekv.commands.lab` names each of them."""
