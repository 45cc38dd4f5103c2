"""``python -m autoparallel``."""

from autoparallel.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
