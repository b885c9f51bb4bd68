"""Folders of Hugging Face: `save_pretrained(small, folder)` writes a compact network, and it loads as what it is.

Where the configuration can say the small widths, the folder is one like any other, and the stock class loads it. Where
it cannot, the weights get a name that the stock class does not look for, and `from_pretrained` of this file loads them.
Which numbers of a configuration are which widths is the business of `widths.py`. No file here knows an architecture.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ellzero.gated.module import Gated
from ellzero.graph.forwards.copying import duplicate
from ellzero.graph.tracing import Inputs, as_inputs, mode
from ellzero.graph.trials import fingerprint
from ellzero.graph.trials.routing import without_shares
from ellzero.graph.trials.running import agree, outputs
from ellzero.integrations.preparing import prepare, said_of
from ellzero.integrations.widths import Widths
from ellzero.out.compaction import TOLERANCE
from ellzero.out.files import write_text, writing
from ellzero.out.saving import load, members_of, save

WEIGHTS = "ellzero.safetensors"
_TAKEN = ("config.json", "*.safetensors", "*.bin", "*.index.json")  # what makes a folder one of a network
_README = """This network has widths that the stock class of Transformers cannot build. Load it so:

```python
from ellzero.integrations.transformers import from_pretrained

model = from_pretrained("this folder")  # a {kind}
```

It needs `pip install "ellzero[transformers]"`. The weights are in `{weights}`.
"""

C = TypeVar("C", bound=PreTrainedModel)


def save_pretrained(small: nn.Module, folder: str | os.PathLike[str], *, example_inputs: Any = None) -> bool:
    """Writes a compact network of Hugging Face to a folder, and proves that it comes back as it is.

    Where every layer has the same widths and the configuration has a number for each, that number is changed and
    `type(small).from_pretrained(folder)` loads it. Where not, or where `centred`, `numbered` or `routed` left what the
    stock class has no place for, `from_pretrained` of this module does; the stock class finds no weights there, and
    raises. The configuration then names the widths of the dense network, and those of the
    single layers under `per_layer_config`, where they can be said so. Number type, tied weights and generation settings
    are kept. Tokenizers and processors are yours to save.

    The folder is read again before this returns: every tensor must be the same, and so must the outputs, bit for bit in
    the network's own type or else to 1e-12 in float64. Nothing appears in `folder` before that.

    Args:
        small: what `compact(gated)` or `budget.finish()` returned, for a `PreTrainedModel`. It is left as it is.
        folder: where to; it is made if it is not there, and must hold no network yet.
        example_inputs: what to compare outputs on, as for `attach`; drawn with the look of the example that `attach`
            had if `None`, or the model's `dummy_inputs` where that is not known.

    Returns:
        Whether the stock class loads it.

    Raises:
        TypeError: `small` is no `PreTrainedModel`, or has gates still.
        ValueError: `folder` holds a network, or `small` does not run on the inputs.
        RuntimeError: what was written does not come back the same; it is removed.
    """
    if isinstance(small, Gated):
        raise TypeError("`small` has gates still; compact it first: `save_pretrained(compact(gated), folder)`")
    if not isinstance(small, PreTrainedModel):
        raise TypeError(f"`small` must be a `PreTrainedModel`, got {type(small).__name__}; `l0.save` takes any module")
    target = Path(folder)
    if taken := sorted({path.name for pattern in _TAKEN for path in target.glob(pattern)}):
        raise ValueError(f"`folder` must hold no network yet, got {str(target)!r} with {', '.join(taken)}")
    inputs = _inputs(small, example_inputs)
    with suppress(ValueError):  # shares that are not 1 stay, and no stock class has a place for them
        small = without_shares(small)
    widths = Widths(small)
    config = None if said_of(small) else widths.uniform()
    if config is not None and _place(small, partial(_write_stock, small, config), inputs, target) is None:
        return True
    differs = _place(small, partial(_write_own, small, widths.per_layer()), inputs, target)
    if differs is not None:
        raise RuntimeError(f"what was written does not come back the same, and is removed: {differs}")
    return False


def from_pretrained(folder: str | os.PathLike[str], *, model_class: type[C] | None = None) -> C:
    """The network in a folder that `save_pretrained` wrote, of its own class, in evaluation and on the CPU.

    Args:
        folder: where it is.
        model_class: the network's class; if `None`, the one of Transformers that the configuration names.

    Returns:
        The small network, in the type that it was saved in.

    Raises:
        FileNotFoundError: `folder` holds no network.
        ValueError: its class is none of Transformers and not given, or the weights are damaged or of another network.
    """
    source = Path(folder)
    if not (source / "config.json").exists():
        raise FileNotFoundError(f"`folder` must be one that `save_pretrained` wrote, got {str(source)!r}")
    about = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = next(iter(about.get("architectures") or []), "")
    kind = model_class or getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"`model_class` must be given for a network that is not of Transformers, got a `{name}`")
    if not (source / WEIGHTS).exists():
        return kind.from_pretrained(source)  # type: ignore[no-any-return]
    about.pop("per_layer_config", None)
    said = about.pop("ellzero", {})
    with no_init_weights():
        model = kind(kind.config_class.from_dict(about))
    prepare(model, said)
    if (experts := said.get("experts_implementation")) is not None:
        model.set_experts_implementation(experts)
    load(model, source / WEIGHTS)
    if model.can_generate() and (source / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model.eval()  # type: ignore[no-any-return]


def _place(small: PreTrainedModel, write: Callable[[Path], None], inputs: Inputs, target: Path) -> str | None:
    """Lets something be written, and puts it into a folder if it comes back the same; in words how it does not."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as unfinished:
            here = Path(unfinished)
            write(here)
            try:
                differs = _difference(small, from_pretrained(here, model_class=type(small)), inputs)
            except Exception as error:
                differs = f"{type(error).__name__}: {error}"
            if differs is None:
                target.mkdir(exist_ok=True)
                for path in sorted(here.iterdir(), key=lambda path: path.name == "config.json"):  # which comes last
                    if path.name != "README.md" or not (target / path.name).exists():
                        os.replace(path, target / path.name)
            return differs


def _write_stock(small: PreTrainedModel, config: Any, folder: Path) -> None:
    stock = copy.copy(small)  # with the same tensors, and a configuration of its own
    stock.config = config
    stock.save_pretrained(folder)


def _write_own(small: PreTrainedModel, layers: dict[str, dict[str, int]], folder: Path) -> None:
    """Writes what `from_pretrained` of this file reads, and the stock class does not."""
    config = copy.deepcopy(small.config)
    config.architectures, config.dtype = [type(small).__name__], str(small.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    ours: dict[str, Any] = dict(said_of(small))
    if getattr(small.config, "_experts_implementation", None) == "batched_mm":  # others take no widths but some
        ours["experts_implementation"] = "batched_mm"
    more = {key: value for key, value in (("per_layer_config", layers), ("ellzero", ours)) if value}
    if more:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_text(folder / "config.json", json.dumps({**said, **more}, indent=2) + "\n")
    if small.can_generate():
        small.generation_config.save_pretrained(folder)
    save(small, folder / WEIGHTS)
    write_text(folder / "README.md", _README.format(kind=type(small).__name__, weights=WEIGHTS))


def _inputs(small: PreTrainedModel, given: Any) -> Inputs:
    """What to compare outputs on."""
    made = as_inputs(given) if given is not None else fingerprint.example(small)
    inputs = made or ((), {name: value.to(small.device) for name, value in small.dummy_inputs.items()})
    try:
        with mode(small, False):
            outputs(small, inputs)
    except Exception as error:
        raise ValueError(
            f"`example_inputs` must be what `small` runs on, got {type(error).__name__}: {error}"
        ) from error
    return inputs


def _difference(small: PreTrainedModel, again: PreTrainedModel, inputs: Inputs) -> str | None:
    """How what came back differs, if it does. It is for this alone."""
    mine, theirs = members_of(small), members_of(again.to(small.device))
    kept = small.state_dict().keys()
    for name in {**mine, **theirs}:
        ours, its = mine.get(name), theirs.get(name)
        if ours is None or its is None:
            return f"`{name}` is in one of them only"
        if name not in kept:  # a class makes such buffers by itself, in a type of its own
            its.data = its.to(ours.dtype)
        if ours.dtype != its.dtype or not torch.equal(ours, its):
            return f"`{name}` is another"
    if again.config._attn_implementation != small.config._attn_implementation:  # which is chosen, and not saved
        again.set_attn_implementation(small.config._attn_implementation)
    if (experts := getattr(small.config, "_experts_implementation", None)) is not None:  # as that of attention
        again.set_experts_implementation(experts)
    with mode(small, False):
        if agree(outputs(small, inputs), outputs(again, inputs), 0.0):
            return None
        # The same numbers may have been added up in another order.
        wide: Any = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
        one, other = (outputs(duplicate(network).double(), wide) for network in (small, again))
        return None if agree(one, other, TOLERANCE) else "its outputs are others"
