"""``python -m tests.capture [--jobs N] [pattern ...]``: the verdict of each program on one rank; ``!`` marks the
unexpected.

A program that ends the process (a fake tensor's memory is read) does not end the table.
"""

import argparse
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
        line = f"{mark} {program.subject}.{program.name} [{time.time() - start:.1f} s]: {words}\n"
        os.write(sys.stdout.fileno(), line.encode())  # whole, whoever else writes


def show_all(chosen: list[Program]) -> None:
    """Prints the verdicts of all programs, each process's end among them."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="how many programs run at a time")
    parser.add_argument("patterns", nargs="*", default=["*"])
    arguments = parser.parse_args()
    chosen = [p for p in programs() if any(fnmatch.fnmatch(p.name, a) or p.subject == a for a in arguments.patterns)]
    children = []
    for part in range(arguments.jobs):
        pid = os.fork()
        if pid == 0:
            show_all(chosen[part :: arguments.jobs])
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
