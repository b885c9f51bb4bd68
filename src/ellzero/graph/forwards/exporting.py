"""The operations of a forward, by the first way that gives them: written down while it runs (`recording.py`), the same
while torch says that it exports, or by `torch.export` itself. Where none does, the reason names the line of the model
that is in the way. This file does not know what an operation means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from typing import Any

import torch
from torch import fx, nn

from ellzero.graph.forwards.recording import Members, Unrecorded, copied, mapped, no_shortcuts, recorded

_INSTEAD = "leave out the input that it looks at, write it with tensors of fixed sizes, or pass axes by hand as `axes`"


class Untraced(Exception):
    """No way gives the operations of a forward; says why, in one line."""


def program(
    model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], training: bool
) -> tuple[fx.Graph, Members]:
    """The operations of one forward, which is run, and which of its placeholders are parameters and buffers.

    Raises:
        Untraced: nothing says what they are.
    """
    doubt = Unrecorded("")
    for way in (nullcontext, as_for_export):
        try:
            with way():
                return recorded(model, *mapped(copied, inputs))
        except Unrecorded as error:
            doubt = error
        except Exception:  # it rejects the batch, or torch can do this in no such way
            break
    try:
        with torch.set_grad_enabled(training), no_shortcuts(), redirect_stderr(StringIO()):  # torch says much
            args, kwargs = mapped(copied, inputs)
            model(*args, **kwargs)  # it must run, and what it caches must not be made of fake tensors
            exported = torch.export.export(model, *inputs, strict=False)
    except Exception as error:
        raise Untraced(_why(model, doubt, error)) from error
    inline(exported.graph_module)
    signature = exported.graph_signature
    return exported.graph, {**signature.inputs_to_parameters, **signature.inputs_to_buffers}


def _why(model: nn.Module, doubt: Unrecorded, error: Exception) -> str:
    """Why there is no program, and what to do."""
    said = f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}"
    what = "`torch.export` cannot trace the model with `example_inputs`"
    if "Cache'>" in str(error):
        return f"{what} (it returns a cache: pass `use_cache=False` among the example's keyword arguments): {said}"
    if not doubt.line:
        return f"{what} (data-dependent control flow is a common cause; axes can be passed by hand as `axes`): {said}"
    settings = vars(model.get_submodule(doubt.module)).get("config")
    instead = _INSTEAD
    if getattr(settings, "_experts_implementation", None) == "eager":  # as Hugging Face keeps it
        instead = 'ask for `experts_implementation="batched_mm"` in its configuration, where all is done at once'
    astray = f"{doubt.line} goes by what the data are, or past torch, where no trace follows"
    return f"the model cannot be traced with `example_inputs`: {astray}; {instead}"


@contextmanager
def as_for_export() -> Iterator[None]:
    """Says in the block that the model is exported: many ask the data nothing then, where it was for a warning, or to
    leave out a mask that masks nothing.
    """
    was = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = was


_BLOCKS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def inline(module: torch.fx.GraphModule) -> None:
    """Puts the operations of `with torch.no_grad():` and `with torch.autocast(…):` in the place of such a block."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in _BLOCKS:
            continue
        place = next(k for k, a in enumerate(node.args) if isinstance(a, torch.fx.Node) and a.op == "get_attr")
        inner: Any = module.get_submodule(node.args[place].target)
        inline(inner)
        if any(n.op == "get_attr" for n in inner.graph.nodes):  # it holds on to something of its own
            continue
        given = iter(node.args[place + 1 :])
        copies: dict[torch.fx.Node, Any] = {}
        with module.graph.inserting_before(node):
            for n in inner.graph.nodes:
                if n.op == "placeholder":
                    copies[n] = next(given)
                elif n.op == "output":
                    made = torch.fx.node.map_arg(n.args[0], copies.__getitem__)
                else:
                    copies[n] = module.graph.node_copy(n, copies.__getitem__)
        for user in list(node.users):  # a block returns a tuple
            user.replace_all_uses_with(made[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
