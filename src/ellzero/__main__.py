"""`python -m ellzero` is the command line."""

from ellzero.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
