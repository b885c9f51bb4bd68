"""A step made faster on a GPU: compiled, or captured and replayed. What the step does is not known here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor

_WARM = 3  # steps as they are before one is captured: until then kernels are chosen and memory is found


def compiled(method: Any) -> Any:
    """A method compiled by itself: torch gives up on a piece of code that was compiled eight times for others."""
    function = method.__func__
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    run = torch.compile(MethodType(own, method.__self__), dynamic=False)

    def quiet(*args: Any) -> Any:
        with meant_in_float32():
            return run(*args)

    return quiet


@contextmanager
def meant_in_float32() -> Iterator[None]:
    """Silences torch's advice to round products of matrices to TensorFloat32, which it gives while it compiles.

    A recipe in float32 means float32: its numbers are those of a CPU to rounding. Who wants speed takes bfloat16.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix multiplication", UserWarning)
        yield


@contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Lets cuDNN try which algorithm is fastest, in the few steps before one is captured."""
    flags = torch.backends.cudnn
    before, flags.benchmark = flags.benchmark, True
    try:
        yield
    finally:
        flags.benchmark = before


@final
class Captured:
    """A step on a GPU: a few times as it is, then captured as a CUDA graph and replayed, all its kernels at one launch.

    It takes tensors of the same shapes each time and returns one, which the next call overwrites.
    """

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self.step, self.warm = step, 0
        self.captured: tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.warm < _WARM:
            self.warm += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), _fastest_convolutions():
                out = self.step(*inputs)
            torch.cuda.current_stream().wait_stream(side)
            return out
        if self.captured is None:
            static = [t.clone() for t in inputs]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), _fastest_convolutions():
                out = self.step(*static)
            self.captured = graph, static, out
        graph, static, out = self.captured
        for own, new in zip(static, inputs, strict=True):
            own.copy_(new)
        graph.replay()
        return out
