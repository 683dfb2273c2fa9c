"""`scaledot` and `python -m scaledot`."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    from scaledot.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
