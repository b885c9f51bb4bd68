"""The command that makes published tables and figures again: `reproduce`.

What a study is and how it is made is in `experiments.study`, and each study in a file of `reproductions/`; here are the
words around it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.text import Text
from tyro.conf import Positional, arg

from ellzero.cli.app import FAILED, CommandError, app, foreseen, resumable, say, show, show_json, silent, tell
from ellzero.cli.opening import DataDir, Device, loader, refuse_below_one, refuse_several
from ellzero.experiments import study as making
from ellzero.experiments.campaign import AT_ONCE, CampaignError, Record
from ellzero.experiments.figures import PlotsMissingError, can_draw
from ellzero.experiments.study import Reproduction, Study, StudyError
from ellzero.experiments.train.watching import Bar
from ellzero.out.tables import new_table

WIDTH = 190  # of a table that goes to a file: one line for each row


@app.command
def reproduce(
    name: Annotated[str | None, Positional, arg(metavar="STUDY", help_behavior_hint="")] = None,
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the study's, mostly 5)")] = None,
    epochs: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the paper's)")] = None,
    device: Device = "auto",
    data: Annotated[Literal["mnist", "mnist5k"] | None, arg(help_behavior_hint="(default: the paper's)")] = None,
    data_dir: DataDir = None,
    only: Annotated[str | None, arg(metavar="PATTERN", help_behavior_hint="")] = None,
    every: Annotated[int, arg(metavar="N")] = 1,
    at_once: Annotated[int, arg(metavar="N")] = AT_ONCE,
    out: Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="(default: runs/reproduce/STUDY)")] = None,
    resume: bool = False,
    fresh: bool = False,
    draw_only: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Make a published table or figure again, ours beside the paper's; without STUDY list what there is.

    For example:

    $ ellzero reproduce
    $ ellzero reproduce louizos2018-table1 --seeds 1 --epochs 3
    $ ellzero reproduce louizos2018-table1 --seeds 1 --epochs 3 --resume
    $ ellzero reproduce gallego2021-table1 --only 'gallego-mlp*' --device cuda
    $ ellzero reproduce louizos2018-figure2

    All runs of a row, and rows that differ in their objective alone, are trained together; networks with batch norm
    one after the other. Ctrl-C ends it after the step, and saves; what is finished is not trained again when it goes on
    with --resume. The folder then holds one json for each row, and the figures, for which matplotlib must be installed
    (the extra `plots`).

    Args:
        name: which one.
        seeds: runs of each row, with the seeds 0, 1, 2, ….
        epochs: in place of the recipes' own.
        device: where to train; auto is a GPU if there is one.
        data: in place of the recipes' own; mnist5k, a part of MNIST, comes with the library.
        data_dir: folder of the data's files; else $ELLZERO_DATA, else the user's cache, to which they are downloaded.
        only: the rows whose recipe's name matches, such as 'louizos-mlp*'; several with commas between them.
        every: evaluate after every N epochs, and after the last.
        at_once: train no more than N runs together.
        out: folder of the reproduction.
        resume: go on with the reproduction in the folder, or begin one if there is none.
        fresh: remove the reproduction in the folder, and begin again.
        draw_only: train nothing: print the table and draw the figures from what is in the folder.
        json: print the records as JSON.
        quiet: show no progress.
    """
    study = _find(name, json)
    if study is None:
        return
    trained = {"seeds": seeds, "epochs": epochs, "data": data, "data-dir": data_dir, "only": only}
    options = {**trained, "every": every, "at-once": at_once, "device": device}
    _refuse(study, trained, options, resume + fresh + draw_only)
    with foreseen(bad_usage=(StudyError, ValueError)):
        asked = Reproduction(study, seeds, epochs, data, only or "*", every, at_once)
    home = Path("runs", "reproduce", study.name) if out is None else Path(out)
    records = _stored(asked, home) if draw_only else _made(asked, home, options, resume, fresh, quiet)
    _show(study, records, home, json)


def _find(name: str | None, json: bool) -> Study | None:
    """The study of this name; without a name all are listed."""
    with foreseen(bad_usage=(StudyError,)):
        known = making.studies()
        if name is not None:
            return making.find(name, known)
    if json:
        show_json([{"name": s.name, "title": s.title, "rows": len(s.rows), "seeds": s.seeds} for s in known.values()])
        return None
    table = new_table("", ("study", "what", "runs"))
    for column in table.columns:
        column.overflow = "fold"
    for study in known.values():
        runs = "none" if study.compute is not None else f"{len(study.rows)} rows × {study.seeds} seeds"
        table.add_row(study.name, Text(study.title), runs)
    show(table)
    say("For example: ellzero reproduce louizos2018-table1 --seeds 1 --epochs 3")
    return None


def _refuse(study: Study, trained: dict[str, Any], options: dict[str, Any], ways: int) -> None:
    refuse_below_one({name: options[name] for name in ("seeds", "epochs", "every", "at-once")})
    if ways > 1:
        raise CommandError("`--resume`, `--fresh` and `--draw-only` exclude each other: give one of them")
    refuse_several("reproduce")
    for option, value in trained.items():
        if study.compute is not None and value is not None:
            raise CommandError(f"`--{option}` must be absent: `{study.name}` trains nothing, got {value}")
    if study.compute is not None and not _drawable(study):
        raise CommandError(str(PlotsMissingError()), FAILED)


def _drawable(study: Study) -> bool:
    return study.draw is None or can_draw()


def _command(study: Study, home: Path, options: dict[str, Any]) -> str:
    """The command that goes on with this reproduction."""
    usual = {"every": 1, "at-once": AT_ONCE, "device": "auto"}
    given = {name: value for name, value in options.items() if value not in (None, usual.get(name))} | {"out": home}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return shlex.join(["ellzero", "reproduce", study.name, *words, "--resume"])


def _stored(asked: Reproduction, home: Path) -> list[Record]:
    if not _drawable(asked.study):
        raise CommandError(str(PlotsMissingError()), FAILED)
    with foreseen(bad_usage=(StudyError,)):
        records, missing = making.stored(asked.study, home, asked.only)
    if missing:
        tell(f"not there yet: {', '.join(missing)}")
    return records


def _made(
    asked: Reproduction, home: Path, options: dict[str, Any], resume: bool, fresh: bool, quiet: bool
) -> list[Record]:
    if not _drawable(asked.study):
        tell(f"no figures will be drawn: {PlotsMissingError()}, and draw them later by `--draw-only`")
    fewer = f"try fewer runs together than {asked.at_once}, by `--at-once` and a new folder"
    again, load = _command(asked.study, home, options), loader(options["data-dir"], options["device"])
    with resumable(again, fewer), foreseen(bad_usage=(StudyError, CampaignError, ValueError)):
        watchers, said = ([], silent) if quiet else ([Bar()], tell)
        return making.reproduce(asked, load, home, resume=resume, fresh=fresh, watchers=watchers, say=said)


def _show(study: Study, records: list[Record], home: Path, json: bool) -> None:
    with foreseen():
        files = making.draw(study, records, home) if _drawable(study) else []
    if json:
        show_json(records)
        return
    if study.table is not None:
        runs = sorted({len(r["seeds"]) for r in records})
        lengths = sorted({r["recipe"]["epochs"] for r in records})
        data = " and ".join(dict.fromkeys(r["recipe"]["data"] for r in records))
        epochs = f"{' or '.join(map(str, lengths))} epoch{'s' * (lengths != [1])}"
        devices = ", ".join(dict.fromkeys(str(r["device"]) for r in records))
        seeds = f"{' or '.join(map(str, runs))} seed{'s' * (runs != [1])}"
        show(study.table(records, f"{study.title}; {data}, {epochs}, {devices}, {seeds}"), WIDTH)
    say(f"results: {home}", *(f"figure: {file}" for file in files if file.suffix in (".png", ".svg")))
