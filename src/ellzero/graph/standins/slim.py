"""`Slim` lets attention of one's own, which takes the width of its input for that of its heads, have fewer heads, or an
input of another width.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ellzero.graph.standins.layers import first_tensor


@final
class Slim(nn.Module):
    """Shows a module an input that is as wide as its heads are together, and its layers the input itself.

    `b, t, c = x.shape` and `view(b, t, self.heads, c // self.heads)` take the width of the input for that of all heads.
    What the module is shown has this width and no numbers: its layers, which compute, read the input that it stands
    for.

    Args:
        whole: the width of the input.
        width: as which it is shown.
    """

    def __init__(self, whole: int, width: int) -> None:
        super().__init__()
        self.whole, self.width = whole, width
        self.shown: Tensor | None = None
        self.meant: Tensor | None = None

    def show(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The forward pre-hook of the module."""
        x = first_tensor(args, kwargs)
        if torch.compiler.is_compiling():  # which takes no attribute of a tensor, and nobody else runs the module
            self.meant, self.shown = x, self._outline(x)
            return _instead(args, kwargs, lambda given: self.shown if given is x else given)
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # it is no step of the forward
            shown = self._outline(x).requires_grad_(x.requires_grad)
        setattr(shown, _MEANT, x)  # there, and not here: other threads may run the module, and a backward run it again
        return _instead(args, kwargs, lambda given: shown if given is x else given)

    def read(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The forward pre-hook of the layers in the module."""
        if torch.compiler.is_compiling():
            return _instead(args, kwargs, lambda given: self.meant if given is self.shown else given)
        return _instead(args, kwargs, _meant)

    def forget(self, module: nn.Module, args: Any, out: Any) -> None:
        """The forward hook of the module."""
        self.shown = self.meant = None

    def _outline(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.whole,):
            raise ValueError(f"the input must have width {self.whole}, got {tuple(x.shape)}")
        return x.detach().new_full((), torch.nan).expand(*x.shape[:-1], self.width)

    def extra_repr(self) -> str:
        return f"whole={self.whole}, width={self.width}"


_MEANT = "_ellzero_meant"  # where a tensor that is shown has the one that it stands for


def _meant(given: Any) -> Any:
    """What a tensor that is shown stands for; another one itself."""
    meant = getattr(given, _MEANT, None)
    if meant is not None or not isinstance(given, Tensor):
        return given if meant is None else meant
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        if given.numel() and not any(given.stride()) and bool(given.flatten()[0].isnan()):  # shown, and copied since
            what = "activation checkpointing inside attention that has lost heads"
            raise RuntimeError(f"{what} must have `use_reentrant=False`")
    return given


def _instead(args: tuple[Any, ...], kwargs: dict[str, Any], of: Any) -> tuple[Any, dict[str, Any]]:
    return tuple(map(of, args)), {name: of(given) for name, given in kwargs.items()}


SLIM = "slim"  # where a module has its `Slim`
WHOLE, WIDTH = f"{SLIM}.whole", f"{SLIM}.width"  # the sizes that it keeps: the same before anything goes


def put_slim(module: nn.Module, whole: int, width: int) -> None:
    """Gives a module a `Slim` as its child, or another than it has; none where its input is as wide as shown."""
    old = module._modules.pop(SLIM, None)
    layers = [layer for layer in module.modules() if layer is not module]
    for layer in (module, *layers) if old is not None else ():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) is old]:
                del hooks[key]
                layer._forward_pre_hooks_with_kwargs.pop(key, None)
    if width != whole:
        slim = Slim(whole, width)
        module.add_module(SLIM, slim)
        module.register_forward_pre_hook(slim.show, with_kwargs=True)
        module.register_forward_hook(slim.forget)
        for layer in layers:
            layer.register_forward_pre_hook(slim.read, prepend=True, with_kwargs=True)
