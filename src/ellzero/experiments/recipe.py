"""Recipes: everything that decides how a run comes out, as one value.

A `Recipe` is plain data (strings, numbers, dictionaries of numbers): it can be read from a TOML file, overridden field
by field, stored beside a result and compared. Names as strings end with it: `training` turns them into objects. This
file knows which values make sense, alone and together; it knows nothing of modules, gates or devices.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, final


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run: network, data, objective, optimizer, end. Seeds to repeat it with, device and paths are not part of it.

    The loss is CE + λ·l0_norm with λ = c/N (Louizos et al., eq. 9), or CE + Σ_g λ_g·(cost_g/dense_g − ε_g) with
    multipliers that rise while the constraint is violated (Gallego-Posada et al., eqs. 5–7), or CE alone without gates.

    Args:
        name: what the run is called; letters, digits, ".", "_" and "-".
        network: "lenet300", "lenet5" or "wrn-DEPTH-WIDTH".
        data: "mnist", "mnist5k", "cifar10" or "cifar100".
        init: how weights are drawn: `zoo.initialize_2018` or `zoo.initialize_2021`.
        dropout: rate on the hidden layer of every block of a WRN.
        placement: where gates go: "shrinkable", "per_layer", or "blocks" for the hidden layer of every block of a WRN,
            each gate counting what makes its map; None for the dense network, trained by the same loop.
        drop_rates: p by the pattern of the gates' names, the first match counting; a gate begins at log α ≈ logit(1−p).
        rule: the gate at test time: "noiseless" (Louizos et al., eq. 13) or "median".
        penalty: c of λ = c/N on "l0_norm", where N is the number of training images; or {pattern: c}. None without one.
        cost: what the constraint bounds: "l0_norm", "params" or "macs".
        at_most: ε, a fraction of the dense cost; or {pattern: ε}, a constraint each. None without one.
        on: whether the multipliers follow the "expected" or the "kept" cost.
        dual: how they do: "auto" (`objectives.ExponentiatedAscent`, as fast as run and gates allow, see `lagrangian`),
            "ascent", "nupi" or "extrapolation".
        dual_lr: their step, the integral gain of "nupi"; 1e-4 if absent. Must be absent with "auto".
        restarts: with "ascent", whether a multiplier is set to zero where its constraint holds.
        kp: the proportional gain of "nupi".
        nu: the smoothing of "nupi".
        target_warmup: over which fraction of the epochs with gates that learn the target comes down from 1; 0 for at
            once.
        optimizer: "adam" or "sgd", for weights and gates.
        lr: learning rate of the weights.
        gate_lr: learning rate of the gates; None for that of the weights.
        momentum: of "sgd".
        nesterov: whether it is Nesterov's.
        milestones: epochs after which learning rates are multiplied by `decay`; those beyond the last never come.
        decay: the factor.
        decay_gates: whether the gates' learning rate decays too.
        l2: of ½·l2·‖w‖², which is eq. 17 of Louizos et al. for gated weights; "weight decay" of SGD.
        l2_gated_factor: `l2` is multiplied by it for gated weights.
        detach_l2: whether the gates feel nothing of eq. 17.
        batch: images in a batch.
        epochs: with gates that learn.
        ema: decay of the averaged parameters (bias-corrected), which evaluation uses then; None without averaging.
            Where gates settle, what comes after that is averaged.
        scaling: "unit" for pixels in [0, 1], "standard" for mean 0 and deviation 1.
        augment: whether images are padded by 4, cropped at random and mirrored.
        samples: L of eq. 9, draws of the gates for each batch.
        extra_gradient: whether every step is taken with the gradient at a look-ahead (Korpelevich, 1976), of weights,
            gates and multipliers; at two gradients a step.
        shrink_at: epochs after which units that have been closed for long are taken out for good; those after `epochs`
            never come.
        shrink_checks: at how many ends of an epoch in a row the test-time gate must have been zero for that.
        shrink_multiple: widths are rounded up to a multiple of it, the most probable of these units staying; None for
            32 on a GPU, where other widths are slower, and 1 elsewhere.
        shrink_gain: an event that takes out a smaller share of the present MACs is skipped; so is one after which too
            few steps come to save what compiling takes.
        settle_at: epoch after which the gates settle: units are closed, or opened, until the kept cost is just within
            `at_most`; what is closed is taken out for good, the other gates are folded into the weights, which train
            on alone. None, or an epoch after `epochs`, for gates that learn to the end.
        finalize: whether units are closed at the end until the kept cost is within `at_most`.
        finetune_epochs: further epochs after `epochs`, and after `finalize`, with fixed gates and learning rates that
            fall to zero on a line.
        recalibrate: whether batch-norm statistics are gathered anew for evaluation, with the parameters that it uses
            and the gates as they are at test time.
        precision: "float32", or "bfloat16" for autocast.
        compile: whether `torch.compile` is used; None where it pays.
        channels_last: whether images and convolutions have their channels last in memory.
        seed: of everything random.

    Raises:
        ValueError: a value is not what it must be, or two do not go together.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> recipe = get("gallego-mlp").override(at_most=0.2, epochs=100)
        >>> recipe.at_most, recipe.lr, recipe.drop_rate("fc1")
        (0.2, 0.0007, 0.2)
        >>> recipe.override(epoch=100)
        Traceback (most recent call last):
        ...
        ValueError: `epoch` is not a field of a recipe; did you mean `epochs`?
    """

    name: str
    # what is trained
    network: str
    data: Literal["mnist", "mnist5k", "cifar10", "cifar100"]
    init: Literal["2018", "2021"] = "2018"
    dropout: float = 0.0
    # gates
    placement: Literal["shrinkable", "per_layer", "blocks"] | None = "shrinkable"
    drop_rates: dict[str, float] = field(default_factory=lambda: {"*": 0.5})
    rule: Literal["noiseless", "median"] = "noiseless"
    # objective
    penalty: float | dict[str, float] | None = None
    cost: Literal["l0_norm", "params", "macs"] = "l0_norm"
    at_most: float | dict[str, float] | None = None
    on: Literal["expected", "kept"] = "expected"
    dual: Literal["auto", "ascent", "nupi", "extrapolation"] = "auto"
    dual_lr: float | None = None
    restarts: bool = True
    kp: float = 0.0
    nu: float = 0.0
    target_warmup: float = 0.0
    # optimization
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    gate_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    milestones: tuple[int, ...] = ()
    decay: float = 1.0
    decay_gates: bool = True
    l2: float = 0.0
    l2_gated_factor: float = 1.0
    detach_l2: bool = False
    batch: int = 100
    epochs: int = 200
    ema: float | None = None
    scaling: Literal["unit", "standard"] = "standard"
    augment: bool = False
    samples: int = 1
    extra_gradient: bool = False
    # smaller on the way
    shrink_at: tuple[int, ...] = ()
    shrink_checks: int = 3
    shrink_multiple: int | None = None
    shrink_gain: float = 0.1
    settle_at: int | None = None
    # the end
    finalize: bool = False
    finetune_epochs: int = 0
    recalibrate: bool = False
    # how it is run
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool | None = None
    channels_last: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():  # they return the value in its own type: 1 becomes 1.0, a list a tuple
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for problem in _contradictions(self):
            raise ValueError(problem)

    # ---- changes ----------------------------------------------------------------------------------------------------

    def override(self, **changes: Any) -> Self:
        """The recipe with some fields changed.

        Raises:
            ValueError: there is no such field, or the result is no recipe.
        """
        refuse_unknown(changes)
        return replace(self, **changes)

    # ---- what it says -----------------------------------------------------------------------------------------------

    def drop_rate(self, gate: str) -> float:
        """p of the gates with this name.

        Raises:
            ValueError: no pattern matches.

        Example:
            >>> from ellzero.experiments.papers import get
            >>> get("louizos-mlp").drop_rate("fc3")
            0.5
        """
        for pattern, p in self.drop_rates.items():
            if fnmatchcase(gate, pattern):
                return p
        raise ValueError(f"`drop_rates` must have a pattern for `{gate}`, got {', '.join(map(repr, self.drop_rates))}")

    @property
    def projects(self) -> bool:
        """Whether units are closed, at the end or on the way, until the kept cost is within its target."""
        return self.finalize or self.settles

    @property
    def settles(self) -> bool:
        """Whether the gates settle on the way."""
        return self.settle_at is not None and self.settle_at <= self.epochs

    @property
    def gate_epochs(self) -> int:
        """Epochs with gates that learn: all, or those until they settle."""
        return self.epochs if self.settle_at is None else min(self.settle_at, self.epochs)

    # ---- as plain data ----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields as what JSON knows; the dictionary is a copy."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The recipe that `to_dict` made this of. Fields that are missing have their defaults.

        Raises:
            ValueError: there is no such field, one without a default is missing, or the values are no recipe.

        Example:
            >>> from ellzero.experiments.papers import get
        >>> demo = get("demo")
            >>> Recipe.from_dict(json.loads(json.dumps(demo.to_dict()))) == demo
            True
        """
        refuse_unknown(values)
        missing = [f"`{name}`" for name in _REQUIRED if name not in values]
        if missing:
            raise ValueError(f"a recipe must have {', '.join(missing)}, got {', '.join(values) or 'nothing'}")
        return cls(**values)

    def to_toml(self) -> str:
        """All fields as a TOML file, which `load_toml` reads; TOML knows no null, so an absent value is "none".

        Example:
            >>> from ellzero.experiments.papers import get
            >>> print(get("demo").to_toml().splitlines()[1])
            network = "lenet5"
        """
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.to_dict().items())

    def digest(self) -> str:
        """A hash of all that changes the result: every field but the name. The order of patterns counts.

        Example:
            >>> from ellzero.experiments.papers import get
        >>> demo = get("demo")
            >>> demo.digest() == demo.override(name="mine").digest() != demo.override(seed=1).digest()
            True
        """
        values = [(name, _pairs(value)) for name, value in sorted(self.to_dict().items()) if name != "name"]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# ---------------------------------------------------------------- from text


def from_strings(texts: Mapping[str, str]) -> dict[str, Any]:
    """Values for `Recipe.override` from what was typed: TOML, where quotes around a word may be left out.

    Args:
        texts: text by the name of the field; "-" may stand for "_".

    Returns:
        Values by the name of the field. What is no TOML is left as it is, for the recipe to accept or refuse.

    Raises:
        ValueError: there is no such field.

    Example:
        >>> from_strings({"gate-lr": "3e-4", "dual": "nupi", "penalty": "none", "at_most": '{"fc1" = 0.2}'})
        {'gate_lr': 0.0003, 'dual': 'nupi', 'penalty': None, 'at_most': {'fc1': 0.2}}
    """
    named = {name.replace("-", "_"): text for name, text in texts.items()}
    refuse_unknown(named)
    return {name: absent(name, _parse(name, text)) for name, text in named.items()}


def refuse_idle(recipe: Recipe, names: Iterable[str]) -> None:
    """Refuses fields that somebody has set on purpose, and that change nothing in this recipe.

    Raises:
        ValueError: there is one that differs from its default; the message says what it waits for.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> refuse_idle(get("louizos-mlp").override(on="kept"), ["on"])
        Traceback (most recent call last):
        ...
        ValueError: `on` changes nothing without `at_most`
    """
    r, defaults = recipe, {f.name: f.default for f in fields(Recipe)}
    gates, constrained = r.placement is not None, r.at_most is not None
    acts = {
        **dict.fromkeys(("cost", "on", "dual", "dual_lr"), (constrained, "without `at_most`")),
        "restarts": (constrained and r.dual == "ascent", 'but with `dual` "ascent"'),
        **dict.fromkeys(("drop_rates", "rule", "gate_lr", "samples"), (gates, "without gates (`placement`)")),
        "momentum": (r.optimizer == "sgd", 'but with `optimizer` "sgd"'),
        "decay": (bool(r.milestones), "without `milestones`"),
        "decay_gates": (gates and bool(r.milestones), "without gates and `milestones`"),
        **dict.fromkeys(("l2_gated_factor", "detach_l2"), (gates and r.l2 > 0, "without gates and `l2`")),
        **dict.fromkeys(("shrink_checks", "shrink_gain"), (bool(r.shrink_at), "without `shrink_at`")),
        "shrink_at": (max(r.shrink_at, default=0) <= r.epochs, f"after the last of {r.epochs} epochs"),
        "settle_at": (r.settle_at is None or r.settles, f"after the last of {r.epochs} epochs"),
        "shrink_multiple": (bool(r.shrink_at) or r.settles, "without `shrink_at` or `settle_at`"),
        "recalibrate": (r.network.startswith("wrn"), f"for {r.network!r}, which has no batch norm"),
    }
    for name in names:
        does, why = acts.get(name, (True, ""))
        if not does and getattr(r, name) != defaults[name]:
            raise ValueError(f"`{name}` changes nothing {why}")


def _parse(name: str, text: str) -> Any:
    text = text.strip()
    if name in _WORDS and not text.startswith(("'", '"')):
        return text  # "2018" is a word there
    if text.lower() in ("true", "false"):
        text = text.lower()
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        try:
            return float(text)  # ".5" and "1." are no TOML
        except ValueError:
            return text
    return values["value"] if values.keys() == {"value"} else text  # more keys: a line break was in it


def absent(name: str, value: Any) -> Any:
    """None for the word "none" in a field that may be absent."""
    return None if name in _NULLABLE and isinstance(value, str) and value.lower() == "none" else value


def refuse_unknown(values: Iterable[str], also: tuple[str, ...] = ()) -> None:
    """Refuses a name that is no field."""
    for name in values:
        if name not in _NAMES:
            raise ValueError(f"`{name}` is not a field of a recipe; {nearest(name, (*_NAMES, *also))}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """What was meant, or all there are."""
    found = difflib.get_close_matches(name.lower(), valid, n=1)
    return f"did you mean `{found[0]}`?" if found else f"there are {', '.join(valid)}"


def _toml(value: Any) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


# ---------------------------------------------------------------- what a value must be

_Check = Callable[[str, Any], Any]
_LARGEST = sys.float_info.max


def _refusal(name: str, must: str, value: object) -> ValueError:
    return ValueError(f"`{name}` must be {must}, got {value!r}")


def _word(must: str, accepts: Callable[[str], bool]) -> _Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not accepts(value):
            raise _refusal(name, must, value)
        return value

    return check


def _choice(*options: str) -> _Check:
    return _word(" or ".join(f'"{option}"' for option in options), lambda word: word in options)


def _real(must: str, accepts: Callable[[float], bool]) -> _Check:
    def check(name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -_LARGEST <= value <= _LARGEST or not accepts(value):  # nan is in no interval
            raise _refusal(name, must, value)
        return float(value)

    return check


def _whole(least: int) -> _Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _refusal(name, f"an integer of at least {least}", value)
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, "true or false", value)
    return value


def _optional(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _by_pattern(check: _Check) -> _Check:
    def check_all(name: str, value: Any) -> dict[str, float]:
        if not isinstance(value, Mapping) or not value:
            raise _refusal(name, "a number for each pattern", value)
        for pattern in value:
            if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
                raise ValueError(f"`{name}` must have patterns as keys, got {pattern!r}")
        return {pattern: check(f'{name}["{pattern}"]', number) for pattern, number in value.items()}

    return check_all


def _one_or_many(check: _Check) -> _Check:
    many = _by_pattern(check)
    return lambda name, value: many(name, value) if isinstance(value, Mapping) else check(name, value)


def _epochs(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _refusal(name, "a list of epochs such as [10]", value)
    epochs = tuple(_whole(1)(name, epoch) for epoch in value)
    if list(epochs) != sorted(set(epochs)):
        raise _refusal(name, "a list of rising epochs", value)
    return epochs


def _is_network(word: str) -> bool:
    wide = re.fullmatch(r"wrn-([1-9]\d*)-([1-9]\d*)", word)
    return word in ("lenet300", "lenet5") or (wide is not None and int(wide[1]) >= 10 and int(wide[1]) % 6 == 4)


_RATE = _real("a number in [0, 1)", lambda x: 0 <= x < 1)
_POSITIVE = _real("a positive number", lambda x: x > 0)
_NOT_NEGATIVE = _real("a number of at least 0", lambda x: x >= 0)
_CHECKS: dict[str, _Check] = {
    "name": _word(
        'letters, digits, ".", "_" and "-", and begin with one of the first two',
        lambda word: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", word) is not None,
    ),
    "network": _word('"lenet300", "lenet5" or "wrn-DEPTH-WIDTH" with depth 10, 16, 22, 28, ...', _is_network),
    "data": _choice("mnist", "mnist5k", "cifar10", "cifar100"),
    "init": _choice("2018", "2021"),
    "dropout": _RATE,
    "placement": _optional(_choice("shrinkable", "per_layer", "blocks")),
    "drop_rates": _by_pattern(_real("a number in (0, 1)", lambda x: 0 < x < 1)),
    "rule": _choice("noiseless", "median"),
    "penalty": _optional(_one_or_many(_NOT_NEGATIVE)),
    "cost": _choice("l0_norm", "params", "macs"),
    "at_most": _optional(_one_or_many(_real("a fraction of the dense cost in (0, 1]", lambda x: 0 < x <= 1))),
    "on": _choice("expected", "kept"),
    "dual": _choice("auto", "ascent", "nupi", "extrapolation"),
    "dual_lr": _optional(_POSITIVE),
    "restarts": _flag,
    "kp": _NOT_NEGATIVE,
    "nu": _real("a number in (-1, 1)", lambda x: -1 < x < 1),
    "target_warmup": _real("a fraction of the epochs in [0, 1]", lambda x: 0 <= x <= 1),
    "optimizer": _choice("adam", "sgd"),
    "lr": _POSITIVE,
    "gate_lr": _optional(_POSITIVE),
    "momentum": _RATE,
    "nesterov": _flag,
    "milestones": _epochs,
    "decay": _real("a factor in (0, 1]", lambda x: 0 < x <= 1),
    "decay_gates": _flag,
    "l2": _NOT_NEGATIVE,
    "l2_gated_factor": _NOT_NEGATIVE,
    "detach_l2": _flag,
    "batch": _whole(1),
    "epochs": _whole(1),
    "ema": _optional(_real("a number in (0, 1)", lambda x: 0 < x < 1)),
    "scaling": _choice("unit", "standard"),
    "augment": _flag,
    "samples": _whole(1),
    "extra_gradient": _flag,
    "shrink_at": _epochs,
    "shrink_checks": _whole(1),
    "shrink_multiple": _optional(_whole(1)),
    "shrink_gain": _RATE,
    "settle_at": _optional(_whole(1)),
    "finalize": _flag,
    "finetune_epochs": _whole(0),
    "recalibrate": _flag,
    "precision": _choice("float32", "bfloat16"),
    "compile": _optional(_flag),
    "channels_last": _flag,
    "seed": _whole(0),
}
_NAMES = tuple(f.name for f in fields(Recipe))
_REQUIRED = tuple(f.name for f in fields(Recipe) if f.default is MISSING and f.default_factory is MISSING)
_NULLABLE = frozenset(f.name for f in fields(Recipe) if "None" in str(f.type))
_WORDS = frozenset(f.name for f in fields(Recipe) if str(f.type).startswith(("str", "Literal")))


def _contradictions(recipe: Recipe) -> Iterable[str]:
    """What does not go together, field by field valid."""
    r = recipe
    if r.data.startswith("mnist") != r.network.startswith("lenet"):
        yield f"`data` must be MNIST for a LeNet and CIFAR for a WRN, got {r.data!r} for {r.network!r}"
    if r.dropout and r.network.startswith("lenet"):
        yield f"`dropout` must be 0 for {r.network!r}, which has none, got {r.dropout}"
    if r.penalty is not None and r.at_most is not None:
        yield f'`at_most` and `penalty` exclude each other, got {r.at_most} and {r.penalty}; set one to "none"'
    gates = r.placement is not None
    if gates and r.penalty is None and r.at_most is None:
        yield '`at_most` or `penalty` must be given, got neither; `placement = "none"` trains the dense network'
    for name in ("penalty", "at_most"):
        if not gates and getattr(r, name) is not None:
            yield f"`{name}` must be absent without gates (`placement`), got {getattr(r, name)}"
    if r.penalty is not None and r.cost != "l0_norm":
        yield f'`cost` must be "l0_norm" with `penalty`, which weighs no other, got "{r.cost}"'
    if r.milestones and r.decay == 1:
        yield f"`decay` must be less than 1 with `milestones`, after which it acts, got {r.decay}"
    if r.placement == "blocks" and not r.network.startswith("wrn"):
        yield f'`placement` must be "shrinkable" or "per_layer" for {r.network!r}, which has no blocks, got "blocks"'
    if r.shrink_at and r.shrink_at[0] < r.shrink_checks:
        yield (
            f"`shrink_at` must begin at epoch {r.shrink_checks} or later, after `shrink_checks` checks, "
            f"got {list(r.shrink_at)}"
        )
    if r.settle_at is not None and r.settle_at <= max(r.shrink_at, default=0):
        yield f"`settle_at` must come after `shrink_at`, got {r.settle_at} and {list(r.shrink_at)}"
    if r.settle_at is not None and r.finetune_epochs:
        alone = "after which the weights train alone"
        yield f"`finetune_epochs` must be 0 with `settle_at`, {alone}, got {r.finetune_epochs}"
    constrained = r.at_most is not None
    for name, allowed, why in (
        ("finalize", constrained, "without `at_most`, its target"),
        ("target_warmup", constrained, "without `at_most`, the target that would come down"),
        ("shrink_at", gates, "without gates (`placement`), which say what can be taken out"),
        ("settle_at", gates, "without gates (`placement`), which could settle"),
        ("finetune_epochs", gates, "without gates (`placement`): they are epochs with fixed gates"),
        ("dual_lr", r.dual != "auto", "with `dual` 'auto', which finds its own"),
        ("kp", r.dual == "nupi", f"with `dual` {r.dual!r}: it is a gain of 'nupi'"),
        ("nu", r.dual == "nupi", f"with `dual` {r.dual!r}: it belongs to 'nupi'"),
        ("nesterov", r.optimizer == "sgd" and r.momentum > 0, "without SGD and its `momentum`"),
    ):
        if getattr(r, name) and not allowed:
            value = r.to_dict()[name]
            must = "absent" if name in _NULLABLE else type(value)()
            yield f"`{name}` must be {must} {why}, got {value}"
