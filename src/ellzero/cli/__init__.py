"""The command line: `ellzero COMMAND …`.

`app` has what the commands share; the other modules hold the commands, which register themselves when they are
imported here. Names as strings end in this package: below it, objects are passed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tyro.conf import FlagCreatePairsOff

from ellzero.cli import (
    app,
    compacting,
    evaluating,
    explaining,
    inspecting,
    listing,
    reporting,
    studies,
    sweeping,
    training,
)
from ellzero.cli.app import INTERRUPTED, CommandError
from ellzero.experiments.train import processes as parallel
from ellzero.out.saving import installed_version

# The modules that hold the commands: importing them has registered these.
COMMANDS = (training, evaluating, compacting, listing, reporting, inspecting, studies, sweeping, explaining)
SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """Learn sparse PyTorch networks with L0 gates, and get a smaller plain network back.

For example: ellzero train demo

Every command has a help of its own with examples, `ellzero train --help`. `--version` prints the version, and
`--print-completion bash` (zsh, fish) a script that completes commands and options in that shell.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments behind the program's name; those of the process if `None`.

    Returns:
        The exit code: 0 if all went well, 1 if the work failed, 2 for bad usage, 130 if it was interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args == ["--version"]:
            app.say(f"ellzero {installed_version()}")
            return 0
        if args[:1] == ["--print-completion"]:
            if len(args) != 2 or args[1] not in SHELLS:
                raise CommandError(f"`--print-completion` must be followed by {', '.join(SHELLS)}, got {args[1:]}")
            args = ["--tyro-print-completion", args[1]]
        with app.plain_warnings():
            app.app.cli(prog="ellzero", description=DESCRIPTION, args=args or ["--help"], config=(FlagCreatePairsOff,))
        sys.stdout.flush()
    except CommandError as error:
        rank = int(os.environ.get("RANK", "0")) if parallel.launched() else 0
        if error.code != INTERRUPTED:
            who = f"ellzero: process {rank}" if rank else "ellzero"  # each may have a reason of its own
            sys.stderr.write(f"{who}: error: {error}\n")
        elif rank == 0:
            sys.stderr.write(f"ellzero: {error}\n")
        return error.code
    except KeyboardInterrupt:
        sys.stderr.write("ellzero: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `ellzero recipes | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 0
    return 0


__all__ = ["CommandError", "main"]
