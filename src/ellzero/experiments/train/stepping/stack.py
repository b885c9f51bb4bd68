"""Several training runs of one network as one module: the same step for one run and for forty.

A small network leaves a GPU idle. Each parameter gets a leading dimension, one slice per run, and `torch.func.vmap`
runs the network over the slices: runs never mix. This file knows neither data nor optimizers nor epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ellzero.gated.base.local import Noisy
from ellzero.gated.module import Gated
from ellzero.gated.multiplying import Held
from ellzero.gates.abstract import NoExpectation
from ellzero.gates.families.bernoulli import AbstractBernoulliGate
from ellzero.objectives import costs
from ellzero.objectives.costs import Cost

Part = tuple[Cost, str | None]  # a cost, and the pattern of what it is asked of
WATCHED = (costs.l0_norm, costs.params, costs.macs)
l2_of_weights = partial(costs.l2_norm, detach_gates=True)  # the gates feel nothing of it
NORMS = (costs.l2_norm, l2_of_weights)
ABSOLUTE = (*NORMS, costs.complexity)  # have no dense value to be a fraction of


class Objective(nn.Module):
    """One run's network as a module whose weights *and* gates are parameters of one call.

    Costs are fractions of those of the dense network, one for each part; norms and complexity are as they are.
    """

    def __init__(
        self,
        network: nn.Module,
        parts: Sequence[Part],
        autocast: bool = False,
        task: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,  # the loss, of outputs and targets
    ) -> None:
        super().__init__()
        self.network, self.parts = network, tuple(parts)
        # With autocast the network is in bfloat16 where that is safe, in training; not loss and costs.
        self.task, self.autocast = task, autocast
        self.has_gates = isinstance(network, Gated)
        self.held: dict[str, Held] | None = None  # what gates do to weights while they stay as they are
        self.dense = [1.0 if c in ABSOLUTE else costs.dense(costs.only(c, only), self.gated) for c, only in parts]
        self._asked = [(c, [part for _, part in of]) for c, of in groupby(self.parts, itemgetter(0))]
        self._dense: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.whole = [costs.dense(c, self.gated) for c in WATCHED] if self.has_gates else []

    @property
    def gated(self) -> Gated:
        """The network, of which it is known that it has gates."""
        return cast(Gated, self.network)

    def forward(self, *args: Tensor, function: Callable[..., Any] | None = None) -> Any:
        """The `loss` of a batch, or what another function of the objective says."""
        return (function or Objective.loss)(self, *args)

    def loss(self, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The task loss of a batch, and the costs, which nobody asks of gates that stay as they are: zeros then."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            given = {"gate_noise": noise} if self.has_gates and not self.gated.per_example else {}
            logits = self.network(x, **given) if self.held is None else self.gated.forward_held(self.held, x)
        charged = self.costs() if self.network.training else logits.new_zeros(len(self.parts))
        return self.task(logits.to(torch.promote_types(logits.dtype, torch.float32)), y), charged

    def logits(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.network(x))

    def costs(self) -> Tensor:
        """The fractions of the dense cost, one per part, in expectation."""
        if not self.parts:
            return torch.zeros(0, device=next(self.network.parameters()).device)
        with self.gated.asked_once():
            absolute = torch.stack([of for cost, patterns in self._asked for of in self._of(cost, patterns)])
            return absolute / self._divisor(absolute)

    def _of(self, cost: Cost, patterns: Sequence[str | None]) -> list[Tensor]:
        if cost is not costs.complexity:
            return costs.of_parts(cost, patterns, self.gated)
        every = self.gated.complexity()  # of all gates at once, not of all for each part
        charged = {None: every} | dict(self.gated.by_placement(every).items())
        return [charged[pattern].sum() for pattern in patterns]

    def _divisor(self, of: Tensor) -> Tensor:
        """The dense costs, for these. They are made once: a captured step cannot bring them to the device."""
        key = of.device, of.dtype
        if key not in self._dense:
            with torch.inference_mode(False):
                self._dense[key] = torch.tensor(self.dense, dtype=of.dtype, device=of.device)
        return self._dense[key]

    def kept(self) -> Tensor:
        """The same with the test-time gates. The formula of the expectation at 0 and 1: exact but for padded groups."""
        with self._as_kept():
            return self.costs()

    def counts(self) -> Tensor:
        """How many gates of each placement are open at test time."""
        return torch.stack([part.sum() for part in self.gated.by_placement(self.gated.opens()).values()])

    def watched(self) -> Tensor:
        """`l0_norm`, `params` and `macs` as fractions of dense: expected, then as kept now.

        Gates without an atom at zero are never closed while they are drawn: what is expected is the dense network.
        """
        try:
            with torch.no_grad():
                expected = self._fractions()
        except NoExpectation:
            expected = torch.ones(len(WATCHED), device=self.gated.tables["ends"].device)
        with self._as_kept():
            return torch.stack([expected, self._fractions()])

    def follow(self, step: float | Tensor | None) -> None:
        """Lets gates act after a step of the optimizer, of this length where it has one."""
        for _, gate in self.gated.named_gates():
            gate.after_step(step)

    def learn(self, noise: Tensor, loss: Tensor, mirrored: Tensor | None = None) -> None:
        """Gives gates that learn from the value of the loss their gradients (`objectives.estimating`)."""
        parts = self.gated.by_placement(noise)
        for name, gate in self.gated.named_gates():
            if isinstance(gate, AbstractBernoulliGate) and gate.needs_loss:
                gate.learn_(parts[name], loss, mirrored)

    def _fractions(self) -> Tensor:
        return torch.stack([c(self.gated) / d for c, d in zip(WATCHED, self.whole, strict=True)])

    @contextmanager
    def _as_kept(self) -> Iterator[None]:
        gated = self.gated
        with torch.no_grad(), gated.assuming(gated.opens().to(gated.tables["ends"])):
            yield


def _reads_one_map(conv: nn.Conv2d) -> bool:
    plain = conv.stride == conv.dilation == (1, 1) and conv.padding == (0, 0) and conv.padding_mode == "zeros"
    return conv.in_channels == conv.groups == 1 and plain


def _as_product(conv: nn.Conv2d, x: Tensor, weight: Tensor | Noisy, bias: Tensor | None) -> Tensor:
    """The convolution of images of one map, image by image, as products of matrices.

    Of a stack, `vmap` makes a convolution with a group for each run. Where that reads one map in each group, torch has
    slow kernels for it: forward and backward took two fifths of a step of ten LeNet-5.
    """
    if isinstance(weight, Noisy):
        return weight.through(partial(_as_product, conv), x, bias)
    rows, columns = conv.kernel_size
    windows = x[:, 0].unfold(1, rows, 1).unfold(2, columns, 1)  # `F.unfold` would launch a kernel for each image
    height, width = windows.shape[1:3]
    flat = windows.permute(0, 3, 4, 1, 2).reshape(len(x), rows * columns, height * width)
    out = torch.bmm(weight.flatten(1).expand(len(x), -1, -1), flat)
    out = out if bias is None else out + bias[:, None]
    return out.view(*out.shape[:2], height, width)


class Runs(nn.Module):
    """One run, or a stack of runs of equal architecture."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        super().__init__()
        self.size, first = len(objectives), objectives[0]
        if self.size > 1 and any(True for _ in first.buffers()):
            raise ValueError(
                "a network with buffers (batch norm) cannot be stacked: train its seeds one after the other"
            )
        # In a list, so that the template's own parameters are not those of this module when there is a stack.
        self._template = [first]
        self.alone = first if self.size == 1 else None
        self.keys = [name for name, _ in first.named_parameters()]
        if self.size > 1:
            members = [dict(o.named_parameters()) for o in objectives]
            for name in self.keys:
                stacked = nn.Parameter(torch.stack([m[name].detach() for m in members]), members[0][name].requires_grad)
                self.register_parameter(name.replace(".", "|"), stacked)
            for module in first.modules():
                if isinstance(module, nn.Conv2d) and _reads_one_map(module):
                    module._conv_forward = partial(_as_product, module)  # type: ignore[method-assign]

    @property
    def template(self) -> Objective:
        return self._template[0]

    def values(self) -> dict[str, Tensor]:
        """All parameters by the name they have in one run, with the leading dimension of the stack (if it is one)."""
        if self.alone is not None:
            return dict(self.alone.named_parameters())
        return {name: self.get_parameter(name.replace(".", "|")) for name in self.keys}

    def forward(self, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Task loss (runs,) and cost fractions (runs, parts) of one batch for each run: `x` is (runs, batch, …)."""
        if self.alone is not None:
            loss, cost = self.alone(x[0], y[0], noise[0])
            return loss[None], cost[None]
        one = partial(self._one, Objective.loss)
        return cast(tuple[Tensor, Tensor], vmap(one, randomness="different")(self.values(), x, y, noise))

    def evaluate(
        self, function: Callable[..., Tensor], *args: Tensor, values: dict[str, Tensor] | None = None, own: bool = False
    ) -> Tensor:
        """A function of every run's objective (`Objective.logits` of the same images, `Objective.kept`), stacked; with
        `own`, each run has its own slice of the arguments.
        """
        one, values = partial(self._one, function), self.values() if values is None else values
        if self.size == 1:
            return cast(Tensor, one(values, *(a[0] if own else a for a in args))[None])
        return cast(Tensor, vmap(one, in_dims=(0, *[0 if own else None] * len(args)))(values, *args))

    def _one(self, function: Callable[..., Any], values: dict[str, Tensor], *args: Tensor) -> Any:
        return functional_call(self.template, values, args, {"function": function})

    @torch.no_grad()
    def each(self, function: Callable[..., None], *args: Tensor) -> None:
        """Calls a function of every run's objective, one after the other, with its slice of each argument: what it does
        to parameters and gradients in place is done to those of the stack.
        """
        values = self.values()
        for run in range(self.size):
            own = {}
            for name, value in values.items():
                own[name] = value.detach() if self.size == 1 else value.detach()[run]
                if value.grad is not None:
                    own[name].grad = value.grad if self.size == 1 else value.grad[run]
            self._one(function, own, *(a[run] for a in args))

    def network(self, run: int, values: dict[str, Tensor] | None = None) -> nn.Module:
        """A copy of one run's network (a `Gated`, unless dense) with its parameters."""
        out = copy.deepcopy(self.template.network)
        for module in out.modules():
            module.__dict__.pop("_conv_forward", None)  # see `_as_product`: for stacks alone
        own = dict(out.named_parameters())
        with torch.no_grad():
            for name, value in (self.values() if values is None else values).items():
                own[name.removeprefix("network.")].copy_(value if self.size == 1 else value[run])
        return out

    def train(self, mode: bool = True) -> Runs:
        super().train(mode)
        self.template.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.template._apply(fn)  # type: ignore[no-untyped-call]
        return self
