"""``python -m autoparallel``."""

from autoparallel.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
