"""Contests fought: seed by seed, in several processes if asked for, and taken up again where they were interrupted.

A folder has in `bouts/` a file for each seed of a contest that is finished, the networks that ours found, and a record
for each contest with all its seeds. What is there is not trained again. What a contest does is not known here.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import final

import torch

from ellzero.experiments.arena.contest import Contest, Record
from ellzero.experiments.arena.rivals import RIVALS, package
from ellzero.experiments.data import Dataset
from ellzero.experiments.store import records
from ellzero.experiments.store.provenance import in_common

BOUTS = "bouts"  # the folder


@final
class ArenaError(Exception):
    """A run of the arena failed, or its process is gone; the message says which."""


Job = tuple[Contest, int]
Loader = Callable[[str], Dataset]
_LOAD: list[Loader] = []  # of this process


def fight(
    contests: Sequence[Contest],
    seeds: int,
    load: Loader,
    out: Path,
    *,
    at_once: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """Trains what is left of all contests, each with the seeds from 0 on, and gives a record for each.

    `at_once` processes train at the same time; for several, `load`, which gives the data set of a name, must be
    picklable. An ArenaError says that some have failed; all others were trained and stored before.
    """
    jobs = [(contest, seed) for seed in range(seeds) for contest in contests]  # what is cut short has whole seeds
    left = [job for job in jobs if not _file(out, *job).exists()]
    _refuse_without_start(left, out)
    if any(contest.method in RIVALS for contest, _ in left):
        package()
    if left:
        say(f"{len(contests)} rows × {seeds} seeds: {len(jobs)} runs, {len(jobs) - len(left)} done before")
    failed: list[str] = []
    for number, ((contest, seed), record) in enumerate(_trained(left, load, out, at_once), 1):
        if isinstance(record, str):
            failed.append(f"{contest.name}, seed {seed}: {record}")
            say(failed[-1])
            continue
        records.write(_file(out, contest, seed), {**record, "at_once": at_once, "settings": contest.settings()})
        kept = f"{record['error_last']:.2f} % error at {100 * record['macs']['kept']:.2f} % of the MACs"
        say(f"{number} of {len(left)}: {contest.name}, seed {seed}: {kept}, {record['seconds_in_all']:.0f} s")
        if all(_file(out, contest, other).exists() for other in range(seeds)):
            _recorded(contest, seeds, out)
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise ArenaError(f"{failed[0]}{more}; all others are stored")
    return [_recorded(contest, seeds, out) for contest in contests]


def _file(out: Path, contest: Contest, seed: int) -> Path:
    return out / BOUTS / f"{contest.name}-seed{seed}.json"


def _found(out: Path, contest: Contest, seed: int) -> Path:
    """The network that the contest leaves, or starts from."""
    return out / BOUTS / f"{contest.needs or contest.name}-seed{seed}.safetensors"


def _refuse_without_start(left: Sequence[Job], out: Path) -> None:
    coming = {(contest.name, seed) for contest, seed in left}
    for contest, seed in left:
        ready = contest.needs is None or (contest.needs, seed) in coming or _found(out, contest, seed).exists()
        if not ready:
            raise ValueError(f"`--only` must match `{contest.needs}` too: `{contest.name}` starts from its networks")


def _trained(left: Sequence[Job], load: Loader, out: Path, at_once: int) -> Iterator[tuple[Job, Record | str]]:
    """What comes out, or why nothing does, in the order in which it does; nobody starts before what it needs is there,
    or has failed.
    """
    out.joinpath(BOUTS).mkdir(parents=True, exist_ok=True)
    waiting = list(left)

    def next_ready(running: Iterable[Job]) -> Job | None:
        """The first that waits for nobody, taken from those that wait."""
        ahead = {(contest.name, seed) for contest, seed in (*waiting, *running)}
        job = next((job for job in waiting if (job[0].needs, job[1]) not in ahead), None)
        if job is not None:
            waiting.remove(job)
        return job

    if at_once == 1:
        while (job := next_ready(())) is not None:
            yield job, _bout(load, *job, _found(out, *job))
        return
    threads = max(1, (os.cpu_count() or 1) // at_once)
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(at_once, _context(), initializer=_begin, initargs=(load, threads)) as pool:
        running: dict[Future[Record | str], Job] = {}
        try:
            while waiting or running:
                while len(running) < at_once and (job := next_ready(running.values())) is not None:
                    running[pool.submit(_bout_here, *job, _found(out, *job))] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            left_over = "a process that trained is gone, perhaps for want of memory: fewer `--at-once` need less"
            raise ArenaError(f"{left_over}; what is finished is stored") from error
        except BaseException:  # an interrupt too: nobody trains on for what nobody waits for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise


def _context() -> BaseContext:
    """How processes begin: as forks of one that has imported all and never saw a GPU; where there is no such, anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Contest.__module__])
    return context


def _begin(load: Loader, threads: int) -> None:
    torch.set_num_threads(threads)
    _LOAD[:] = [load]
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when the one that waits for it is gone: killed, it cannot say so."""
    connection.wait([parent])
    os._exit(1)


def _bout(load: Loader, contest: Contest, seed: int, found: Path) -> Record | str:
    try:
        return contest.fought(seed, load(contest.data), found)
    except Exception as error:  # the others go on, and it is told in the end
        return f"{type(error).__name__}: {error}"


def _bout_here(contest: Contest, seed: int, found: Path) -> Record | str:
    return _bout(_LOAD[0], contest, seed, found)


def _recorded(contest: Contest, seeds: int, out: Path) -> Record:
    """A contest's record, written beside the others. Where its seeds come from different commits or devices, it names
    them all.
    """
    read = [records.read(_file(out, contest, seed)) for seed in range(seeds)]
    record = {
        "row": contest.name,
        "recipe": contest.settings(),
        **in_common([bout["about"] for bout in read]),
        "seeds": [{key: bout[key] for key in bout if key not in ("about", "settings")} for bout in read],
    }
    records.write(out / f"{contest.name}.json", record)
    return record
