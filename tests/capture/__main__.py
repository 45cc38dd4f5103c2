"""``python -m tests.capture [pattern ...]``: the verdict of each program on one rank; ``!`` marks the unexpected.

A program that ends the process (a fake tensor's memory is read) does not end the table.
"""

import fnmatch
import os
import signal
import sys
import time

import torch

from tests.capture.registry import programs
from tests.capture.runner import Program, verdict


def show(chosen: list[Program], pipe: int) -> None:
    """Prints verdicts, and tells through a pipe how far it came."""
    torch.set_num_threads(1)
    for program in chosen:
        os.write(pipe, b".")
        start = time.time()
        words = verdict(program)
        expected = "refused" if program.refused else "equal"
        mark = " " if words == expected else "!"
        print(f"{mark} {program.subject}.{program.name} [{time.time() - start:.1f} s]: {words}", flush=True)


def main() -> None:
    patterns = sys.argv[1:] or ["*"]
    chosen = [p for p in programs() if any(fnmatch.fnmatch(p.name, a) or p.subject == a for a in patterns)]
    while chosen:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            show(chosen, writer)
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(pid, 0)
        done = len(os.read(reader, 10_000))
        os.close(reader)
        code = os.waitstatus_to_exitcode(status)
        if code:
            program = chosen[done - 1]
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            print(f"! {program.subject}.{program.name}: DIED: {cause}", flush=True)
        chosen = chosen[done:]


if __name__ == "__main__":
    main()
