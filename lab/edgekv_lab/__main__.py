"""`python -m edgekv_lab ...` is `edgekv-lab ...`."""

from edgekv_lab.experiments import main as experiments


def main() -> None:
    """Run the command line."""
    experiments(prog_name="edgekv-lab")


if __name__ == "__main__":
    main()
