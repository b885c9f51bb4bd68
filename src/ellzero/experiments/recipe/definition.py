"""What a recipe is and says, and how it is read from text and written to it. Which fields there are is in `fields`."""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self, final

from ellzero.experiments import networks
from ellzero.experiments.data import KNOWN
from ellzero.experiments.data.importing import is_code
from ellzero.experiments.recipe.checking import Described, checked
from ellzero.experiments.recipe.fields import Fields
from ellzero.experiments.store.records import plain

FIELDS = {f.name: Described(f) for f in fields(Fields)}
_LATER = (
    "loss", "metric", "cosine", "gate", "estimator", "threshold", "start", "most_noise", "per_example",
    "penalty_after", "penalty_warmup", "linear_after", "weights_first", "distort", "teacher",
    "teacher_epochs", "temperature", "label_smoothing", "lr_warmup",
)  # fmt: skip
# They are no part of a digest where they have their default: runs of before go on.


@final
@dataclass(frozen=True, kw_only=True)
class Recipe(Fields):
    """A run: network, data, objective, optimizer, end. Seeds to repeat it with, device and paths are not part of it.

    The loss is CE + λ·l0_norm with λ = c/N (Louizos et al., eq. 9), or CE + Σ_g λ_g·(cost_g/dense_g − ε_g) with
    multipliers that rise while the constraint is violated (Gallego-Posada et al., eqs. 5–7), or CE alone without gates.

    Raises:
        ValueError: a value is not what it must be, or two do not go together.

    Example:
        >>> from ellzero.experiments.papers import get
        >>> recipe = get("gallego-mlp").override(at_most=0.2, epochs=100)
        >>> recipe.at_most, recipe.lr, recipe.drop_rate("fc1")
        (0.2, 0.0007, 0.2)
    """

    def __post_init__(self) -> None:
        for name, known in FIELDS.items():
            if (value := getattr(self, name)) is not known.default:  # which is as `checked` leaves it
                object.__setattr__(self, name, checked(known.hint, name, value))
        for name, known in FIELDS.items():
            for rule in known.rules:
                if not rule.holds(self):
                    raise ValueError(f"`{name}` {self._said(rule.words)}")
        for name, known in FIELDS.items():
            for words in self._idle(name, strict=True):
                default = "absent" if known.nullable else json.dumps(known.default)
                raise ValueError(f"`{name}` must be {default} {words}, got {json.dumps(getattr(self, name))}")

    def override(self, **changes: Any) -> Self:
        """The recipe with some fields changed."""
        refuse_unknown(changes)
        return replace(self, **changes)

    @property
    def facts(self) -> networks.Network:
        """What is known of its network."""
        return networks.find(self.network)

    @property
    def is_own(self) -> bool:
        """Whether code of the user's takes part in a step: it may do another thing in each, and goes alone."""
        code = (self.data, self.teacher or "")
        return self.facts.own or self.loss is not None or any(map(is_code, code))

    @property
    def error(self) -> str:
        """The name of what is noted as the error: "error" where it is the percentage of wrong classes."""
        return (self.metric or self.loss or "error").rpartition(":")[2]

    @property
    def in_percent(self) -> bool:
        """Whether that is in percent."""
        return self.metric is None and self.loss is None

    def told(self, error: float) -> str:
        """Such an error with its unit, "1.20 %" or "0.0123"."""
        return f"{error:.2f} %" if self.in_percent else f"{error:.5g}"

    def drop_rate(self, gate: str) -> float:
        """p of the gates with this name."""
        for pattern, p in self.drop_rates.items():
            if fnmatchcase(gate, pattern):
                return p
        raise ValueError(f"`drop_rates` must have a pattern for `{gate}`, got {', '.join(map(repr, self.drop_rates))}")

    @property
    def expects(self) -> bool:
        """Whether its gates have P(z ≠ 0), and so an expected cost."""
        return self.gate in ("hard_concrete", "stg", "bernoulli", "generalized_dropout", "dropout")

    @property
    def by_eq_17(self) -> bool:
        """Whether `l2` acts on gated weights by eq. 17 of Louizos et al.; else it is plain decay, as in a `Budget`."""
        return self.l2 > 0 and self.expects and self.optimizer != "adamw" and self.gate_lr != "auto"

    @property
    def moves_apart(self) -> bool:
        """Whether Adam moves the gates beside SGD: their rate is found for it, or `SelfPacedAscent` is paced by it."""
        paced = self.at_most is not None and self.dual == "auto"
        return self.optimizer == "sgd" and (self.gate_lr == "auto" or paced)

    @property
    def centres(self) -> bool:
        """Whether LayerNorms are made to subtract no mean, so that streams can shrink."""
        return self.placement in ("streams", "everything") and self.facts.centres

    @property
    def charges(self) -> bool:
        """Whether `penalty` weighs what the family of the gates charges itself, and not `l0_norm`."""
        return not self.expects or self.gate == "generalized_dropout"

    @property
    def is_binary(self) -> bool:
        """Whether its gates are 0 or 1, and learn by an estimator."""
        return self.gate in ("bernoulli", "generalized_dropout")

    @property
    def has_threshold(self) -> bool:
        """Whether the family of its gates compares with a number at test time."""
        return self.gate not in ("hard_concrete", "stg", "dropout", "group_lasso")

    @property
    def falls(self) -> bool:
        """Whether learning rates change on the way."""
        return self.cosine or bool(self.milestones or self.lr_warmup) or self.linear_after is not None

    @property
    def projects(self) -> bool:
        """Whether units are closed, at the end or on the way, until the kept cost is within its target."""
        return self.finalize or self.settles

    @property
    def settles(self) -> bool:
        """Whether the gates settle on the way."""
        return self.settle_at is not None and self.settle_at <= self.epochs

    @property
    def dense_epochs(self) -> int:
        """The first epochs, in which weights train alone."""
        return round(self.weights_first * self.epochs)

    @property
    def gate_epochs(self) -> int:
        """Epochs with gates that learn: all, or those until they settle."""
        return self.epochs if self.settle_at is None else min(self.settle_at, self.epochs)

    @property
    def taught_by(self) -> Self | None:
        """The recipe of its teacher, if it has one: images and steps as its own, no gates."""
        if self.teacher is None:
            return None
        alike = (
            "data", "init", "optimizer", "lr", "momentum", "nesterov", "l2", "batch", "scaling", "augment", "distort",
            "precision", "compile", "channels_last", "seed",
        )  # fmt: skip
        own: dict[str, Any] = {name: getattr(self, name) for name in alike}
        own |= {"init": "own"} if networks.find(self.teacher).own else {}
        what = {"name": f"{self.name}-teacher", "network": self.teacher, "placement": None}
        return type(self)(**own | what, epochs=self.teacher_epochs, cosine=True)

    def _idle(self, name: str, strict: bool) -> Iterable[str]:
        """Why a field that differs from its default does nothing."""
        if getattr(self, name) != FIELDS[name].default:
            for needs in FIELDS[name].needs:
                if needs.strict == strict and not needs.acts(self):
                    yield self._said(needs.words)

    def _said(self, words: str) -> str:
        fitting = [f'"{name}"' for name, known in KNOWN.items() if known.shape == self.facts.images]
        return words.format(**self.to_dict(), fitting=" or ".join(fitting))

    def to_dict(self) -> dict[str, Any]:
        """All fields as what JSON knows; the dictionary is a copy."""
        return {name: plain(getattr(self, name)) for name in FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The recipe that `to_dict` made this of. Fields that are missing have their defaults."""
        refuse_unknown(values)
        missing = [f"`{name}`" for name, known in FIELDS.items() if known.required and name not in values]
        if missing:
            raise ValueError(f"a recipe must have {', '.join(missing)}, got {', '.join(values) or 'nothing'}")
        return cls(**values)

    def to_toml(self) -> str:
        """All fields as a TOML file, which `load_toml` reads; TOML knows no null, so an absent value is "none"."""
        told = {name: "none" if value is None else value for name, value in self.to_dict().items()}
        # JSON is TOML here, but for the sign between a key and its value.
        dumps = partial(json.dumps, ensure_ascii=False, separators=(", ", " = "))
        return "".join(f"{name} = {dumps(value)}\n" for name, value in told.items())

    def digest(self) -> str:
        """A hash of all that changes the result: every field but the name. The order of patterns counts."""
        values = sorted(self.to_dict().items())
        told = [(n, list(v.items()) if isinstance(v, dict) else v) for n, v in values if n != "name"]
        told = [(n, v) for n, v in told if n not in _LATER or v != FIELDS[n].default]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def in_words(value: Any) -> str:
    """A field's value as short text: `{fc1: 0.2}`, `none`, `[60, 120]`."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False).replace('"', "")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two recipes as plain data, or other settings, in words. The order of patterns counts.

    Example:
        >>> differences({"lr": 0.1, "epochs": 3}, {"lr": 0.2, "epochs": 3, "seed": 1})
        ['`lr` is 0.1 there and 0.2 here', '`seed` is absent there and 1 here']
    """
    out = []
    for name in dict.fromkeys((*there, *here)):
        if name in _LATER and len({json.dumps(side.get(name, FIELDS[name].default)) for side in (there, here)}) == 1:
            continue
        if name not in there or name not in here or json.dumps(there[name]) != json.dumps(here[name]):
            a, b = (in_words(side[name]) if name in side else "absent" for side in (there, here))
            out.append(f"`{name}` is {a} there and {b} here")
    return out


def refuse_idle(recipe: Recipe, names: Iterable[str]) -> None:
    """Refuses fields that somebody has set on purpose, and that change nothing in this recipe."""
    for name in names:
        for words in recipe._idle(name, strict=False):
            raise ValueError(f"`{name}` changes nothing {words}")


def from_strings(texts: Mapping[str, str]) -> dict[str, Any]:
    """Values for `Recipe.override` from what was typed: TOML, where quotes around a word may be left out, and "-" may
    stand for "_" in a field's name. What is no TOML is left as it is, for the recipe to accept or refuse.

    Example:
        >>> from_strings({"gate-lr": "3e-4", "dual": "nupi", "penalty": "none", "at_most": '{"fc1" = 0.2}'})
        {'gate_lr': 0.0003, 'dual': 'nupi', 'penalty': None, 'at_most': {'fc1': 0.2}}
    """
    named = {name.replace("-", "_"): text for name, text in texts.items()}
    refuse_unknown(named)
    return {name: absent(name, _parsed(name, text.strip())) for name, text in named.items()}


def _parsed(name: str, text: str) -> Any:
    if FIELDS[name].is_word and not text.startswith(("'", '"')):
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
    """None for the word "none" in a field that may be absent, the value as it is otherwise."""
    return None if FIELDS[name].nullable and isinstance(value, str) and value.lower() == "none" else value


def refuse_unknown(names: Iterable[str], also: tuple[str, ...] = ()) -> None:
    """Refuses names that are no field, and says which is near."""
    for name in names:
        if name not in FIELDS:
            raise ValueError(f"`{name}` is not a field of a recipe; {nearest(name, (*FIELDS, *also))}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """What may have been meant: the end of a message about a name that is not there."""
    found = difflib.get_close_matches(name.lower(), valid, n=1)
    return f"did you mean `{found[0]}`?" if found else f"there are {', '.join(valid)}"
