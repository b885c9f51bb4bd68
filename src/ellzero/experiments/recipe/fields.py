"""The fields of a recipe, each written once: type, range, default, sentence, and what it has to do with others.

Checks, refusals, the help of the command line and TOML follow from here; what can be done with a recipe is not known.
The check is our own: msgspec and pydantic say in their words what a value must be, and know no relations of fields.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, final, get_args, get_origin

from ellzero.experiments import networks
from ellzero.experiments.data import KNOWN
from ellzero.experiments.data.importing import is_code
from ellzero.experiments.data.own import WORDS, is_own


@final
@dataclass(frozen=True)
class Range:
    """Which values a field takes."""

    words: str  # follow "must be"
    accepts: Callable[[Any], bool]


@final
@dataclass(frozen=True)
class Rule:
    """What must hold between a field and others."""

    holds: Callable[[Any], bool]  # of a recipe
    words: str  # follow the field's name in the refusal; fields in braces are replaced by their values


@final
@dataclass(frozen=True)
class Needs:
    """Where a field acts; elsewhere it has its default."""

    acts: Callable[[Any], bool]
    words: str  # why it does not, as those of a `Rule`
    strict: bool = False  # refuses every recipe with another value, and not only one that was set on purpose


Positive = Annotated[float, Range("a positive number", lambda x: x > 0)]
NotNegative = Annotated[float, Range("a number of at least 0", lambda x: x >= 0)]
Rate = Annotated[float, Range("a number in [0, 1)", lambda x: 0 <= x < 1)]
Inside = Annotated[float, Range("a number in (0, 1)", lambda x: 0 < x < 1)]
Share = Annotated[float, Range("a fraction of the dense cost in (0, 1]", lambda x: 0 < x <= 1)]
Count = Annotated[int, Range("an integer of at least 1", lambda n: n >= 1)]
CountOrZero = Annotated[int, Range("an integer of at least 0", lambda n: n >= 0)]
Epochs = tuple[Count, ...]
Code = Annotated[str, Range("a function of your own, MODULE:FUNCTION", is_code)]
_LARGEST = 1e30


@final
class Described:
    """A field of type `Annotated[kind, ...]` with its sentence, and with `Range`, `Rule`s and `Needs` if any."""

    def __init__(self, field: Field[Any]) -> None:
        self.name, self.hint = field.name, field.type
        kind, *told = get_args(field.type)
        members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        self.sentence = next(t for t in told if isinstance(t, str))
        self.rules = [t for t in told if isinstance(t, Rule)]
        self.needs = [t for t in told if isinstance(t, Needs)]
        self.nullable = NoneType in members
        self.is_word = members[0] is str or get_origin(members[0]) is Literal
        self.required = field.default is MISSING and field.default_factory is MISSING
        self.default = field.default if field.default_factory is MISSING else field.default_factory()


def checked(hint: Any, name: str, value: Any) -> Any:
    """The value in the type that the hint says, if it is what it must be: 1 becomes 1.0, a list a tuple."""
    kind, parts, span = get_origin(hint) or hint, get_args(hint), Range("true or false", lambda _: True)
    if kind is Annotated:
        span = next((part for part in parts if isinstance(part, Range)), span)
        hint = parts[0]
        kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):  # one value, or one by pattern, or none
        many = next((part for part in parts if get_origin(part) is dict), parts[0])
        as_it_is = (value is None and NoneType in parts) or any(value in get_args(p) for p in parts if _is_literal(p))
        return value if as_it_is else checked(many if isinstance(value, Mapping) else parts[0], name, value)
    if kind is dict:
        return _by_pattern(parts[1], name, value)
    if kind is tuple:
        return _rising(parts[0], name, value)
    if kind is Literal:
        kind, span = str, Range(" or ".join(f'"{option}"' for option in parts), parts.__contains__)
    right = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if kind is float:
        right = right and abs(value) <= sys.float_info.max  # nan is not
        if right and abs(value) > _LARGEST:
            raise _refusal(name, f"at most {_LARGEST:g}, which single precision can multiply", value)
    if not right or not span.accepts(value):
        raise _refusal(name, span.words, value)
    return float(value) if kind is float else value


def _is_literal(hint: Any) -> bool:
    return get_origin(hint) is Literal


def _by_pattern(hint: Any, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise _refusal(name, "a number for each pattern", value)
    for pattern in value:
        if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
            raise ValueError(f"`{name}` must have patterns as keys, got {pattern!r}")
    return {pattern: checked(hint, f'{name}["{pattern}"]', number) for pattern, number in value.items()}


def _rising(hint: Any, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _refusal(name, "a list of epochs such as [10]", value)
    epochs = tuple(checked(hint, name, epoch) for epoch in value)
    if list(epochs) != sorted(set(epochs)):
        raise _refusal(name, "a list of rising epochs", value)
    return epochs


def _refusal(name: str, must: str, value: object) -> ValueError:
    return ValueError(f"`{name}` must be {must}, got {value!r}")


# ---------------------------------------------------------------- the table

_NAME = Range(
    'letters, digits, ".", "_" and "-", and begin with one of the first two',
    lambda word: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", word) is not None,
)
_NETWORK = Range(networks.names(), lambda word: networks.lookup(word) is not None)
_OFFERED = ", ".join(f'"{name}"' for name in KNOWN)
_DATA = Range(f"{_OFFERED}, {WORDS}", lambda word: word in KNOWN or is_own(word))

# What several fields need, to act or (`strict`) to make sense. In all rules `r` is the recipe.
_GATES = Needs(lambda r: r.placement is not None, "without gates (`placement`)", strict=True)
_TARGET = Needs(lambda r: r.at_most is not None, "without `at_most`, its target", strict=True)
_NUPI = Needs(lambda r: r.dual == "nupi", "with `dual` {dual!r}: it belongs to 'nupi'", strict=True)
_ON_GATES = Needs(_GATES.acts, _GATES.words)
_ON_TARGET = Needs(_TARGET.acts, "without `at_most`")
_ON_GATED_L2 = Needs(lambda r: r.placement is not None and r.l2 > 0, "without gates and `l2`")
_BY_EQ_17 = Needs(lambda r: r.expects, "with `gate` {gate!r}: its weights have plain decay")
_AT_EVENTS = Needs(lambda r: bool(r.shrink_at), "without `shrink_at`")
_TOO_LATE = "after the last of {epochs} epochs"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a `Recipe` has, in the order in which it is shown and stored."""

    name: Annotated[str, _NAME, 'what the run is called; letters, digits, ".", "_" and "-".']
    # what is trained
    network: Annotated[str, _NETWORK, f"{_NETWORK.words}."]
    data: Annotated[
        str,
        _DATA,
        f"{_DATA.words}.",
        Rule(
            lambda r: r.data not in KNOWN or r.facts.images in (None, KNOWN[r.data].shape),
            "must be {fitting} for {network!r}, got {data!r}",
        ),
    ]
    loss: Annotated[
        Code | None,
        "of the task, MODULE:FUNCTION of (output, target); none for the cross-entropy of classes.",
    ] = None
    metric: Annotated[
        Code | None,
        "what is noted as the error, MODULE:FUNCTION of (all outputs, all targets) of the test set; lower is better. "
        "None for the percentage of wrong classes, or the loss where that is your own.",
    ] = None
    init: Annotated[
        Literal["2018", "2021", "own"],
        'how weights are drawn: as the paper of that year does, or "own" for as the network\'s own code does.',
        Rule(
            lambda r: r.init == "own" or not r.facts.own,
            'must be "own" for {network!r}, whose code draws or loads its weights, got "{init}"',
        ),
    ] = "2018"
    dropout: Annotated[
        Rate,
        "rate on the hidden layer of every block of a WRN.",
        Needs(lambda r: r.facts.has_dropout, "for {network!r}, which has none", strict=True),
    ] = 0.0
    # gates
    placement: Annotated[
        Literal["shrinkable", "per_layer", "blocks"] | None,
        'where gates go: "shrinkable", "per_layer", or "blocks" for the hidden layer of every block of a WRN, each '
        "gate counting what makes its map; none for the dense network, trained by the same loop.",
        Rule(
            lambda r: r.placement != "blocks" or r.facts.blocks is not None,
            'must be "shrinkable" or "per_layer" for {network!r}, which has no blocks, got "blocks"',
        ),
    ] = "shrinkable"
    gate: Annotated[
        Literal["hard_concrete", "stg", "bernoulli", "generalized_dropout", "sbp", "vib", "gnj"],
        'the family of the gates: "hard_concrete", "stg", "bernoulli" (straight-through), "generalized_dropout", '
        '"sbp", "vib" or "gnj"; `penalty` weighs what the last four charge; the last three take no `at_most`.',
        _ON_GATES,
    ] = "hard_concrete"
    drop_rates: Annotated[
        dict[str, Inside],
        "p by the pattern of the gates' names, the first match counting; a gate begins at log α ≈ logit(1−p).",
        _ON_GATES,
    ] = field(default_factory=lambda: {"*": 0.5})
    rule: Annotated[
        Literal["noiseless", "median"],
        'the gate at test time: "noiseless" (Louizos et al., eq. 13) or "median".',
        _ON_GATES,
        Needs(lambda r: r.gate == "hard_concrete", "with `gate` {gate!r}, which has a rule of its own", strict=True),
    ] = "noiseless"
    # objective
    penalty: Annotated[
        NotNegative | dict[str, NotNegative] | None,
        'c of λ = c/N on "l0_norm", or on the KL of families that have one, where N is the number of training images; '
        "or {pattern = c}. None without one.",
        _GATES,
    ] = None
    cost: Annotated[
        Literal["l0_norm", "params", "macs"],
        'what the constraint bounds: "l0_norm", "params" or "macs".',
        Needs(lambda r: r.penalty is None, "with `penalty`, which weighs no other", strict=True),
        _ON_TARGET,
    ] = "l0_norm"
    at_most: Annotated[
        Share | dict[str, Share] | None,
        "ε, a fraction of the dense cost; or {pattern = ε}, a constraint each. None without one.",
        _GATES,
        Rule(
            lambda r: r.at_most is None or r.expects,
            "must be absent with `gate` {gate!r}, which has no expected cost to press on: give it a `penalty`",
        ),
        Rule(
            lambda r: r.at_most is None or r.penalty is None,
            'and `penalty` exclude each other, got {at_most} and {penalty}; set one to "none"',
        ),
        Rule(
            lambda r: r.placement is None or r.at_most is not None or r.penalty is not None,
            'or `penalty` must be given, got neither; `placement = "none"` trains the dense network',
        ),
    ] = None
    on: Annotated[
        Literal["expected", "kept"], 'whether the multipliers follow the "expected" or the "kept" cost.', _ON_TARGET
    ] = "expected"
    dual: Annotated[
        Literal["auto", "ascent", "nupi", "extrapolation"],
        'how they do: "auto" (as fast as run and gates allow), "ascent", "nupi" or "extrapolation".',
        _ON_TARGET,
    ] = "auto"
    dual_lr: Annotated[
        Positive | None,
        'their step, the integral gain of "nupi"; 1e-4 if absent. Must be absent with "auto".',
        Needs(lambda r: r.dual != "auto", "with `dual` 'auto', which finds its own", strict=True),
        _ON_TARGET,
    ] = None
    restarts: Annotated[
        bool,
        'with "ascent", whether a multiplier is set to zero where its constraint holds.',
        Needs(lambda r: r.at_most is not None and r.dual == "ascent", 'but with `dual` "ascent"'),
    ] = True
    kp: Annotated[NotNegative, 'the proportional gain of "nupi".', _NUPI] = 0.0
    nu: Annotated[float, Range("a number in (-1, 1)", lambda x: -1 < x < 1), 'the smoothing of "nupi".', _NUPI] = 0.0
    target_warmup: Annotated[
        float,
        Range("a fraction of the epochs in [0, 1]", lambda x: 0 <= x <= 1),
        "over which fraction of the epochs with gates that learn the target comes down from 1; 0 for at once.",
        _TARGET,
    ] = 0.0
    # optimization
    optimizer: Annotated[Literal["adam", "sgd"], '"adam" or "sgd", for weights and gates.'] = "adam"
    lr: Annotated[Positive, "learning rate of the weights."] = 1e-3
    gate_lr: Annotated[
        Positive | Literal["auto"] | None,
        'learning rate of the gates; none for that of the weights, "auto" for one that fits the steps.',
        _ON_GATES,
    ] = None
    momentum: Annotated[Rate, 'of "sgd".', Needs(lambda r: r.optimizer == "sgd", 'but with `optimizer` "sgd"')] = 0.9
    nesterov: Annotated[
        bool,
        "whether it is Nesterov's.",
        Needs(lambda r: r.optimizer == "sgd" and r.momentum > 0, "without SGD and its `momentum`", strict=True),
    ] = False
    milestones: Annotated[
        Epochs, "epochs after which learning rates are multiplied by `decay`; those beyond the last never come."
    ] = ()
    decay: Annotated[
        float,
        Range("a factor in (0, 1]", lambda x: 0 < x <= 1),
        "the factor.",
        Needs(lambda r: bool(r.milestones), "without `milestones`"),
        Rule(
            lambda r: r.decay < 1 or not r.milestones,
            "must be less than 1 with `milestones`, after which it acts, got {decay}",
        ),
    ] = 1.0
    cosine: Annotated[
        bool,
        "whether learning rates fall to zero on a cosine over the epochs.",
        Needs(lambda r: r.finetune_epochs == 0, "with `finetune_epochs`, in which they fall anew", strict=True),
    ] = False
    decay_gates: Annotated[
        bool,
        "whether the gates' learning rate decays too.",
        Needs(
            lambda r: r.placement is not None and (r.cosine or bool(r.milestones)),
            "without gates, and `milestones` or `cosine`",
        ),
    ] = True
    l2: Annotated[
        NotNegative, 'of ½·l2·‖w‖², which is eq. 17 of Louizos et al. for gated weights; "weight decay" of SGD.'
    ] = 0.0
    l2_gated_factor: Annotated[NotNegative, "`l2` times it is for gated weights.", _ON_GATED_L2, _BY_EQ_17] = 1.0
    detach_l2: Annotated[bool, "whether the gates feel nothing of eq. 17.", _ON_GATED_L2, _BY_EQ_17] = False
    batch: Annotated[Count, "images in a batch."] = 100
    epochs: Annotated[Count, "with gates that learn."] = 200
    ema: Annotated[
        Inside | None,
        "decay of averaged parameters (bias-corrected) for evaluation, none without; begins anew where gates settle.",
    ] = None
    scaling: Annotated[
        Literal["unit", "standard"], '"unit" for pixels in [0, 1], "standard" for mean 0 and deviation 1.'
    ] = "standard"
    augment: Annotated[bool, "whether images are padded by 4, cropped at random and mirrored."] = False
    samples: Annotated[Count, "L of eq. 9, draws of the gates for each batch.", _ON_GATES] = 1
    extra_gradient: Annotated[
        bool,
        "whether a step has the gradient at a look-ahead (Korpelevich, 1976), which doubles the gradients to take.",
    ] = False
    # smaller on the way
    shrink_at: Annotated[
        Epochs,
        "epochs after which units that have been closed for long are taken out for good; none come after `epochs`.",
        _GATES,
        Needs(lambda r: max(r.shrink_at, default=0) <= r.epochs, _TOO_LATE),
        Rule(
            lambda r: min(r.shrink_at, default=r.shrink_checks) >= r.shrink_checks,
            "must begin at epoch {shrink_checks} or later, after `shrink_checks` checks, got {shrink_at}",
        ),
    ] = ()
    shrink_checks: Annotated[
        Count, "at how many ends of an epoch in a row the test-time gate must have been zero for that.", _AT_EVENTS
    ] = 3
    shrink_multiple: Annotated[
        Count | None,
        "widths are rounded up to a multiple of it by the most probable units; none for 32 on a GPU, 1 elsewhere.",
        Needs(lambda r: bool(r.shrink_at) or r.settles, "without `shrink_at` or `settle_at`"),
    ] = None
    shrink_gain: Annotated[
        Rate,
        "an event is skipped that takes out a smaller share of the MACs, or comes too late to pay for compiling anew.",
        _AT_EVENTS,
    ] = 0.1
    settle_at: Annotated[
        Count | None,
        "epoch after which the gates settle: units are closed, or opened, until the kept cost is just within "
        "`at_most`; what is closed is taken out for good, the other gates are folded into the weights, which train on "
        "alone. None, or an epoch after `epochs`, for gates that learn to the end.",
        _GATES,
        Needs(lambda r: r.settles, _TOO_LATE),
        Rule(
            lambda r: r.settle_at is None or r.settle_at > max(r.shrink_at, default=0),
            "must come after `shrink_at`, got {settle_at} and {shrink_at}",
        ),
    ] = None
    # the end
    finalize: Annotated[
        bool, "whether units are closed at the end until the kept cost is within `at_most`.", _TARGET
    ] = False
    finetune_epochs: Annotated[
        CountOrZero,
        "further epochs, after `finalize`, with fixed gates and learning rates that fall to zero on a line.",
        _GATES,
        Needs(lambda r: r.settle_at is None, "with `settle_at`, after which the weights train alone", strict=True),
    ] = 0
    recalibrate: Annotated[
        bool,
        "whether batch-norm statistics are gathered anew for evaluation, with its parameters and test-time gates.",
        Needs(lambda r: r.facts.has_batch_norm, "for {network!r}, which has no batch norm"),
    ] = False
    # how it is run
    precision: Annotated[Literal["float32", "bfloat16"], '"float32", or "bfloat16" for autocast.'] = "float32"
    compile: Annotated[bool | None, "whether `torch.compile` is used; none where it pays."] = None
    channels_last: Annotated[bool, "whether images and convolutions have their channels last in memory."] = False
    seed: Annotated[CountOrZero, "of everything random."] = 0
