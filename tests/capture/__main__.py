"""``python -m tests.capture [pattern ...]``: the verdict of each program on one rank."""

import fnmatch
import sys
import time

import torch

from tests.capture.registry import programs
from tests.capture.runner import verdict


def main() -> None:
    torch.set_num_threads(1)
    patterns = sys.argv[1:] or ["*"]
    for program in programs():
        if any(fnmatch.fnmatch(program.name, p) or program.subject == p for p in patterns):
            start = time.time()
            words = verdict(program)
            expected = "refused" if program.refused else "equal"
            mark = " " if words == expected else "!"
            print(f"{mark} {program.subject}.{program.name} [{time.time() - start:.1f} s]: {words}", flush=True)


if __name__ == "__main__":
    main()
