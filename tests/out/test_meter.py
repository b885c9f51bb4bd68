"""The latency meter against a clock made up here."""

import time

import pytest
import torch

from ellzero.out.latency.meter import device_name, interleaved

CPU = torch.device("cpu")


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now, self.called = 0.0, ""

    def passing(self, name: str, seconds: float):
        def call() -> None:
            self.now += seconds
            self.called += name

        return call

    def __call__(self) -> float:
        return self.now


def test_functions_take_turns_there_and_back_and_the_first_rounds_do_not_count() -> None:
    clock = Clock()
    functions = [clock.passing(name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    taken = interleaved(functions, CPU, rounds=3, warm_up=2, calls=2, clock=clock)
    assert taken == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    assert clock.called == "ccbbaa" + "aabbcc" + "ccbbaa" + "aabbcc" + "ccbbaa"


def test_a_budget_ends_it_after_three_rounds_at_the_earliest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    step = clock.passing("a", 1.0)
    for budget, rounds in ((0.0, 3), (6.5, 5), (1e9, 40)):
        assert len(interleaved([step], CPU, rounds=40, warm_up=2, budget=budget, clock=clock)[0]) == rounds


def test_a_device_that_works_on_its_own_is_waited_for_inside_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: clock.passing("s", 5.0)())
    assert interleaved([clock.passing("a", 1.0)], torch.device("meta"), rounds=2, warm_up=0, clock=clock) == [[6.0] * 2]
    assert clock.called == "asas"


def test_the_name_of_a_device() -> None:
    assert device_name(CPU).startswith("CPU ")
