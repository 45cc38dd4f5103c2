"""``python -m autoparallel``."""

import gc

from autoparallel.tools.cli import main

if __name__ == "__main__":
    status = main()
    gc.freeze()  # what is left ends with the process: looking through it for garbage takes a second
    raise SystemExit(status)
