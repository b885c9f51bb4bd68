"""The command line: `ellzero COMMAND …`.

A command is a function with type hints and a docstring, from which its arguments and its help come. `console` has what
all of them share, `opening` what those about runs do. Names as strings end in this package: below, objects are passed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

from tyro.conf import FlagCreatePairsOff
from tyro.extras import SubcommandApp

from ellzero.cli.campaigns import reproduce, sweep
from ellzero.cli.console import INTERRUPTED, CommandError, foreseen, refuse, say, tell, warn
from ellzero.cli.inspecting import inspect, method
from ellzero.cli.runs import compact, evaluate, report
from ellzero.cli.training import recipes, train
from ellzero.experiments.train import processes
from ellzero.out.saving import installed_version

COMMANDS = (compact, evaluate, method, inspect, recipes, report, reproduce, sweep, train)  # as `--help` lists them
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
    try:
        with warnings.catch_warnings(), foreseen():
            warnings.showwarning = lambda message, *_, **__: warn(message)  # without the line of code it comes from
            _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except CommandError as error:
        rank = int(os.environ.get("RANK", "0")) if processes.launched() else 0
        if error.code != INTERRUPTED:
            who = f"ellzero: process {rank}" if rank else "ellzero"  # each may have a reason of its own
            tell(f"{who}: error: {error}")
        elif rank == 0:
            tell(f"ellzero: {error}")
        return error.code
    except KeyboardInterrupt:
        tell("ellzero: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `ellzero recipes | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    return 0


def _run(args: list[str]) -> None:
    if args == ["--version"]:
        say(f"ellzero {installed_version()}")
        return
    if args[:1] == ["--print-completion"]:
        known = len(args) == 2 and args[1] in SHELLS
        refuse(not known, f"`--print-completion` must be followed by {', '.join(SHELLS)}, got {args[1:]}")
        args = ["--tyro-print-completion", args[1]]
    app = SubcommandApp()
    for command in COMMANDS:
        app.command(command)
    app.cli(prog="ellzero", description=DESCRIPTION, args=args or ["--help"], config=(FlagCreatePairsOff,))


__all__ = ["CommandError", "main"]
