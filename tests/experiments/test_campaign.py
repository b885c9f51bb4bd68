"""Campaigns: stacks by hand, memory counted by hand, and what is left to do after whatever came between.

Nothing is trained here, but on a GPU: a stand-in writes what training would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ellzero.experiments import campaign
from ellzero.experiments import networks as zoo
from ellzero.experiments.campaign import (
    Campaign,
    CampaignError,
    activations,
    diverged,
    memory,
    room,
    stack_name,
    stacks,
)
from ellzero.experiments.data import Dataset, load, stand_in
from ellzero.experiments.papers import get
from ellzero.experiments.recipe import Recipe, differences
from ellzero.experiments.store.folder import Folder
from ellzero.experiments.store.records import FolderError
from ellzero.experiments.train import loop as training
from support.campaigns import Untrained, Watching, crash


@cache
def few_images() -> Dataset:
    return stand_in("mnist5k", images=250)


def tiny(name: str, **changes: Any) -> Recipe:
    changes = {"epochs": 2, "batch": 100, "data": "mnist5k"} | changes
    return get("gallego-mlp").override(name=name, **changes)


# ---- stacks ---------------------------------------------------------------------------------------------------------


def test_runs_are_stacked_where_only_seed_objective_and_name_differ() -> None:
    a, b, c = tiny("a"), tiny("b", at_most={"fc1": 0.3}), tiny("c", lr=0.1)
    d = tiny("d", at_most=None, penalty=0.1)
    runs = [r.override(seed=s) for r in (a, b, c, d) for s in range(2)]
    groups = [[(r.name, r.seed) for r in group] for group in stacks(runs)]
    assert groups == [[("a", 0), ("a", 1), ("b", 0), ("b", 1), ("d", 0), ("d", 1)], [("c", 0), ("c", 1)]]


def test_a_large_group_is_split_into_equal_parts() -> None:
    runs = [tiny("a", seed=seed) for seed in range(7)]
    parts = stacks(runs, limit=3)
    assert [len(p) for p in parts] == [2, 2, 3]
    assert [r for part in parts for r in part] == runs
    assert [len(p) for p in stacks(runs, limit=7)] == [7]
    with pytest.raises(ValueError, match="`limit` must be at least 1, got 0"):
        stacks(runs, limit=0)


def test_a_stack_is_named_by_all_that_is_in_it() -> None:
    a, b = tiny("a"), tiny("b", seed=1)
    names = [stack_name(s) for s in ([a], [b], [a, b], [b, a], [a.override(lr=0.1)], [a.override(name="c")])]
    assert len(set(names)) == len(names)
    assert stack_name([a, b]) == stack_name([Recipe.from_dict(a.to_dict()), b])
    assert all(re.fullmatch(r"lenet300-[0-9a-f]{12}", name) for name in names)


def test_what_cannot_share_a_stack_goes_alone() -> None:
    for one in (
        get("louizos-wrn-0.001-cifar10"),
        tiny("shrinks", shrink_at=(3,)),
        tiny("last", channels_last=True),
    ):
        runs = [one, one.override(seed=1), one.override(name="other")]
        assert stacks(runs) == [[r] for r in runs]


# ---- how many at once -----------------------------------------------------------------------------------------------


def test_activations_are_what_a_backward_pass_needs_counted_by_hand() -> None:
    images = torch.zeros(3, 1, 28, 28)
    assert activations(zoo.LeNet300(10), images) == 4 * (784 + 300 + 100)
    maps = 4 * (784 + 20 * 24**2 + 20 * 12**2 + 50 * 8**2 + 800 + 500)
    indices = 8 * (20 * 12**2 + 800)  # of the largest in each window
    assert activations(zoo.LeNet5(10), images) == maps + indices


def test_the_memory_of_a_run_grows_with_what_it_holds() -> None:
    base = get("budget-mlp").override(data="mnist5k")
    weights = 4 * sum(p.numel() for p in zoo.LeNet300(10).parameters())
    image = 4 * (784 + 300 + 100)
    each, once = memory(base, few_images())
    assert once > 4 * few_images().train_x.numel()
    assert memory(base.override(ema=0.9), few_images())[0] - each == 2 * weights
    assert memory(base.override(optimizer="sgd"), few_images())[0] - each == -weights
    # Five batches of 50 or two of 100: the activations of 50 images more, and the noise of three steps less.
    gates = (784 + 300) + (300 + 100) + (100 + 10)
    fifty, hundred = (memory(base.override(batch=b), few_images())[0] for b in (50, 100))
    assert hundred - fifty == 4 * image * 50 - 3 * 2 * 4 * gates


def test_how_many_fit_is_bounded_by_memory_and_by_what_can_share_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    base = get("budget-lenet5").override(data="mnist5k")
    assert room(base, few_images()) == 8
    assert room(base.override(channels_last=True), few_images()) == 1
    assert room(get("wrn-cifar10"), few_images()) == 1

    class Elsewhere:  # a data set that says it is on a GPU
        device = torch.device("cuda", 0)

    each, once = 1000, 500
    monkeypatch.setattr(campaign, "memory", lambda recipe, dataset: (each, once))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    for free, most in [(0, 1), (10_000, 9), (10**9, 64)]:  # 0.9·(10,000 + 600) − 500 = 9040
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**9))
        assert room(base, Elsewhere()) == most  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("network", ["budget-mlp", "budget-lenet5"])
def test_training_on_a_gpu_takes_no_more_memory_than_estimated(network: str) -> None:
    recipe = get(network).override(data="mnist5k", epochs=1, finetune_epochs=1)
    data = load("mnist5k", device="cuda")
    data = replace(data, test_x=data.test_x.repeat(10, 1, 1, 1), test_y=data.test_y.repeat(10))
    each, once = memory(recipe, data)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    trainer = training.train([recipe.override(seed=s) for s in range(4)], data)
    assert before - torch.cuda.mem_get_info()[0] <= 4 * each + once
    del trainer


# ---- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> Untrained:
    stand_in_for_training = Untrained()
    monkeypatch.setattr(training, "train", stand_in_for_training)
    return stand_in_for_training


def at(home: Path) -> Campaign:
    return Campaign(home, "head.json", "tests.campaign", "campaign", ("own*",))


def penalised(*penalties: float, seeds: int = 1) -> list[Recipe]:
    one = tiny("one", at_most=None, penalty=1.0)
    return [one.override(name=f"p{p:g}".replace("+", ""), penalty=p, seed=s) for p in penalties for s in range(seeds)]


def carry_out(home: Path, runs: list[Recipe], at_once: int = 2, watcher: Watching | None = None, **options: Any) -> Any:
    """Trains what is left, with the head as a study or a sweep would write it; gives the lines that were said."""
    here, said = at(home), list[str]()
    asked = {"names": [run.name for run in runs]}
    here.holds(lambda head: differences(head["asked"], asked), resume=True, fresh=False)
    work = here.work(runs, lambda _: few_images(), at_once=at_once, say=said.append)
    here.write({"asked": asked})
    watchers = [] if watcher is None else [watcher]
    for _ in here.train(work, title="all", watchers=watchers, say=said.append, **options):
        pass
    return said


def test_runs_that_are_finished_are_not_trained_again(untrained: Untrained, tmp_path: Path) -> None:
    runs = penalised(0.1, 0.2, seeds=2)
    said = carry_out(tmp_path, runs)
    assert said == [
        "all: 4 runs, 0 done before, the others in 2 stacks",
        "2 runs together: p0.1",
        "2 runs together: p0.2",
    ]
    assert [run for stack in untrained.stacks for run in stack] == runs
    assert carry_out(tmp_path, runs) == []
    assert untrained.sizes == [2, 2]


def test_a_killed_campaign_has_the_stacks_of_one_that_was_not(untrained: Untrained, tmp_path: Path) -> None:
    runs = penalised(*(k / 10 for k in range(1, 11)))
    carry_out(tmp_path / "whole", runs, at_once=3)
    whole, untrained.stacks = untrained.stacks, []
    assert [len(stack) for stack in whole] == [2, 3, 2, 3]
    with pytest.raises(RuntimeError):  # in the second stack, which has no checkpoint
        carry_out(tmp_path / "killed", runs, at_once=3, watcher=Watching(1, 1, crash))
    assert len(at(tmp_path / "killed").folders()) == 2
    said = carry_out(tmp_path / "killed", runs, at_once=3)
    assert said[0] == "all: 10 runs, 2 done before, the others in 3 stacks"
    assert [untrained.stacks[0], *untrained.stacks[2:]] == whole


def test_stacks_may_be_smaller_when_a_campaign_goes_on(untrained: Untrained, tmp_path: Path) -> None:
    runs = penalised(0.1, 0.2, 0.3)
    with pytest.raises(RuntimeError):
        carry_out(tmp_path, runs, at_once=3, watcher=Watching(0, 1, crash))
    (folder,) = at(tmp_path).folders()
    (folder.checkpoints / "1").mkdir(parents=True)
    said = carry_out(tmp_path, runs, at_once=2)
    assert said[0] == f"{folder.path.name} was begun with 3 runs together, and is begun again with fewer"
    assert untrained.sizes == [3, 1, 2]


def test_a_run_that_diverges_spoils_no_other(untrained: Untrained, tmp_path: Path) -> None:
    runs = penalised(0.1, 1e30)
    said = carry_out(tmp_path, runs)
    assert untrained.sizes == [2, 1, 1]
    assert said[2] == "the loss of `p1e30`, seed 0, is nan; the 2 runs are trained one by one now"
    notes = {folder.recipes[0].name: diverged(folder) for folder in at(tmp_path).folders()}
    assert notes == {"p0.1": None, "p1e30": "the loss of `p1e30`, seed 0, is nan"}
    carry_out(tmp_path, runs)
    assert untrained.sizes == [2, 1, 1]  # it is done with


def test_what_another_process_trains_is_not_removed(untrained: Untrained, tmp_path: Path) -> None:
    runs = penalised(0.1, 0.2)
    with pytest.raises(RuntimeError):  # before the first checkpoint: it would be begun again
        carry_out(tmp_path, runs, watcher=Watching(0, 1, crash))
    (folder,) = at(tmp_path).folders()
    for forbidden in (lambda: carry_out(tmp_path, runs), at(tmp_path).clear):
        with folder.locked(), pytest.raises(FolderError, match="is being trained by another process"):
            forbidden()
        assert (folder.path / "run.json").exists()
    carry_out(tmp_path, runs)
    assert untrained.sizes == [2, 2]


def test_a_stack_with_other_runs_is_refused(tmp_path: Path) -> None:
    runs = penalised(0.1)
    Folder.create(tmp_path / "stacks" / stack_name(runs), [tiny("other")])
    at(tmp_path).write({"asked": {"names": ["p0.1"]}})
    with pytest.raises(FolderError, match="must hold runs of this campaign, and holds others"):
        carry_out(tmp_path, runs)


def test_data_is_loaded_where_something_is_left_to_train(untrained: Untrained, tmp_path: Path) -> None:
    carry_out(tmp_path, penalised(0.1))

    def nothing(name: str) -> Dataset:
        raise AssertionError(name)

    assert at(tmp_path).work(penalised(0.1), nothing, say=print).data == {}
    with pytest.raises(AssertionError, match="mnist5k"):
        at(tmp_path).work(penalised(0.1), nothing, fresh=True, say=print)
    assert untrained.sizes == [1]


@pytest.mark.parametrize(
    ("prepare", "options", "says"),
    [
        (lambda home: (home / "letter.txt").touch(), {}, "`--out` must be a new or empty folder"),
        (lambda home: (home / "letter.txt").touch(), {"fresh": True}, "`--fresh` must be given a campaign's folder"),
        (lambda home: (home / "head.json").write_text("{"), {}, "damaged.*`--fresh` begins again"),
        (lambda home: (home / "head.json").write_text('{"format": "x"}'), {}, "format 'tests.campaign'"),
        (
            lambda home: at(home).write({"lr": 1}),
            {},
            r"other settings \(`lr` is 1 there and 2 here\): give another folder",
        ),
        (lambda home: at(home).write({"lr": 2}), {"resume": False}, "`--resume` goes on with it"),
    ],
)
def test_a_folder_that_holds_something_else_is_refused(
    prepare: Callable[[Path], Any], options: dict[str, bool], says: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CampaignError, match=says):
        at(tmp_path).holds(
            lambda head: differences({"lr": head["lr"]}, {"lr": 2}), **{"resume": True, "fresh": False} | options
        )
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_is_removed_is_its_own(untrained: Untrained, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CampaignError, match="something else"):
        at(tmp_path).clear()
    (tmp_path / "head.json").write_text('{"format": ')  # damaged, and known by its name
    (tmp_path / "stacks" / "one").mkdir(parents=True)
    (tmp_path / "own.png").touch()
    (tmp_path / "own pictures").mkdir()
    at(tmp_path).clear()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert at(tmp_path / "nowhere").clear() is None
