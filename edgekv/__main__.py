"""`python -m edgekv ...` is `edgekv ...`."""

from edgekv.commands import main

if __name__ == "__main__":
    main(prog_name="edgekv")
