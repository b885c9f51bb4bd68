"""Recipes: the papers' rows hold the published settings, text becomes values, and what makes no sense is refused."""

import json
import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ellzero.experiments import networks
from ellzero.experiments.papers import RECIPES, get, load_toml
from ellzero.experiments.recipe import FIELDS, Recipe, differences, from_strings, in_words
from ellzero.experiments.recipe.checking import checked
from ellzero.experiments.train.building import where
from ellzero.graph.tracing import trace

# ---------------------------------------------------------------- the papers' rows


# The settings table of both papers: what all rows of one share.
PENALISED = {"lr": 1e-3, "batch": 100, "ema": 0.999, "scaling": "unit", "rule": "noiseless", "init": "2018"}
CONSTRAINED = {"lr": 7e-4, "batch": 128, "ema": None, "scaling": "standard", "rule": "median", "init": "2021"}
CONSTRAINED |= {"dual": "ascent", "dual_lr": 1e-4, "restarts": True, "on": "expected", "cost": "l0_norm"}
BOTH = {"data": "mnist", "epochs": 200, "optimizer": "adam", "gate_lr": None, "placement": "per_layer", "samples": 1}
BOTH |= {"l2": 0.0, "milestones": (), "target_warmup": 0.0, "finalize": False, "finetune_epochs": 0, "augment": False}
ROWS: dict[str, tuple[str, float | dict[str, float]]] = {  # network, and λ·N or ε, as printed in the two Tables 1
    "louizos-mlp": ("lenet300", 0.1),
    "louizos-lenet5": ("lenet5", 0.1),
    "louizos-lenet5-sep": ("lenet5", {"conv1": 10, "conv2": 0.5, "fc1": 0.1, "fc2": 10}),
    "gallego-mlp": ("lenet300", 0.33),
    "gallego-mlp-layers": ("lenet300", {"fc1": 0.3, "fc2": 0.3, "fc3": 0.3}),
    "gallego-lenet5": ("lenet5", 0.1),
    "gallego-lenet5-layers": ("lenet5", {"conv1": 0.5, "conv2": 0.3, "fc1": 0.7, "fc2": 0.1}),
}


@pytest.mark.parametrize("name", [*ROWS, "louizos-mlp-sep"])
def test_rows_of_table_1_are_as_published(name: str) -> None:
    recipe = get(name)
    protocol = PENALISED if name.startswith("louizos") else CONSTRAINED
    for field, value in (BOTH | protocol).items():
        assert getattr(recipe, field) == value, field
    if name in ROWS:  # the λs of the MLP's "sep." row are not published
        network, strength = ROWS[name]
        assert recipe.network == network
        assert (recipe.penalty, recipe.at_most) == ((strength, None) if protocol is PENALISED else (None, strength))


FOUND: dict[tuple[str, str | None], dict[str, int]] = {}


def gates(recipe: Recipe) -> dict[str, int]:
    """Names and numbers of the gates that a recipe asks for, on a narrow network of its kind."""
    key = recipe.network.replace("-28-10", "-28-1"), recipe.placement
    if key not in FOUND:
        facts = networks.find(key[0])
        graph = trace(facts.make(10), (torch.zeros(2, *facts.images),))
        FOUND[key] = {placement.name: placement.shape[0] for placement in where(recipe)(graph)}
    return FOUND[key]


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("louizos-mlp-sep", {"fc1": 0.2, "fc2": 0.5, "fc3": 0.5}),
        ("gallego-mlp-layers", {"fc1": 0.2, "fc2": 0.5, "fc3": 0.5}),
        ("louizos-lenet5-sep", {"conv1": 0.5, "conv2": 0.5, "fc1": 0.5, "fc2": 0.5}),
        ("gallego-lenet5-layers", {"conv1": 0.5, "conv2": 0.5, "fc1": 0.5, "fc2": 0.5}),
        pytest.param("gallego-wrn-35-cifar10", {f"blocks.{i}.conv1": 0.3 for i in range(12)}, marks=pytest.mark.slow),
    ],
)
def test_patterns_name_each_gate_of_the_network_once(name: str, rates: dict[str, float]) -> None:
    recipe = get(name)
    found = gates(recipe)
    assert {gate: recipe.drop_rate(gate) for gate in found} == rates
    strength = recipe.penalty if recipe.at_most is None else recipe.at_most
    assert isinstance(strength, dict)
    assert strength.keys() == found.keys()


@pytest.mark.slow
def test_gates_are_as_many_as_in_the_papers() -> None:
    assert list(gates(get("louizos-mlp")).values()) == [784, 300, 100]
    assert list(gates(get("gallego-lenet5")).values()) == [20, 50, 800, 500]
    assert sum(gates(get("louizos-wrn-0.001-cifar10")).values()) == 448  # 4,480 at width 10


def test_wide_networks_are_trained_as_published() -> None:
    for name, recipe in RECIPES.items():
        if recipe.network == "wrn-28-10":
            assert (recipe.optimizer, recipe.lr, recipe.momentum, recipe.nesterov) == ("sgd", 0.1, 0.9, True), name
            ours = name.startswith(("shrink-", "streams-"))
            drops = (60,) if ours else (60, 120, 160)  # ours average in place of the later ones
            assert (recipe.milestones, recipe.decay, recipe.batch, recipe.epochs) == (drops, 0.2, 128, 200), name
            assert (recipe.l2, recipe.augment, recipe.scaling) == (5e-4, True, "standard"), name
    dense, dropout = get("wrn-cifar10"), get("wrn-dropout-cifar100")
    assert (dense.placement, dense.dropout, dropout.dropout, dropout.data) == (None, 0.0, 0.3, "cifar100")
    penalised = get("louizos-wrn-0.002-cifar100")
    assert (penalised.penalty, penalised.ema, penalised.rule) == (0.002, 0.99, "noiseless")
    assert penalised.l2 * penalised.l2_gated_factor == pytest.approx(5e-4 / 0.7)
    assert penalised.gate_lr == 60 * penalised.lr  # always: it falls with that of the weights
    assert penalised.decay_gates
    alive = get("alive-wrn-0.002-cifar100")
    assert alive.gate_lr == 20 * alive.lr
    assert alive.override(name=penalised.name, shrink_at=(), gate_lr=penalised.gate_lr) == penalised
    deep, half = get("preresnet-cifar10"), get("preresnet-50-cifar10")  # He et al., Identity Mappings
    assert (deep.network, deep.lr, deep.l2, deep.decay, deep.batch) == ("preresnet-110", 0.1, 1e-4, 0.1, 128)
    assert (half.network, half.cost, half.at_most, half.settle_at) == ("preresnet-110", "macs", 0.5, 20)
    for percent in (80, 70, 50, 35, 20):
        r = get(f"gallego-wrn-{percent}-cifar10")
        assert isinstance(r.at_most, dict)
        assert set(r.at_most.values()) == {percent / 100}
        assert (r.gate_lr, r.decay_gates, r.dual_lr, r.detach_l2, r.ema) == (6.0, False, 7e-4, True, None)


def test_the_demo_needs_no_download_and_guarantees_its_target() -> None:
    r = get("demo")
    assert (r.data, r.cost, r.at_most, r.on, r.finalize) == ("mnist5k", "macs", 0.2, "kept", True)
    assert (r.on, r.dual, r.dual_lr) == ("kept", "auto", None)


# ---------------------------------------------------------------- text


def test_every_field_has_a_sentence_and_a_default_that_it_takes() -> None:
    assert list(FIELDS) == [f.name for f in fields(Recipe)]
    for name, known in FIELDS.items():
        assert known.sentence.endswith("."), name
        if not known.required:
            default = checked(known.hint, name, known.default)
            assert (default, type(default)) == (known.default, type(known.default)), name


def test_words_of_all_relations_name_fields_that_there_are() -> None:
    for name, known in FIELDS.items():
        for relation in (*known.rules, *known.needs):
            assert "{" not in get("demo")._said(relation.words), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_survives_toml_json_and_strings(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    read = [load_toml(file), Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))]
    read.append(get("demo").override(**from_strings(dict(l.split(" = ", 1) for l in recipe.to_toml().splitlines()))))  # noqa: E741
    for other in read:
        assert other == recipe
        assert list(other.drop_rates) == list(recipe.drop_rates)
        assert other.digest() == recipe.digest()


patterns = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).filter(str.isprintable),  # all of UTF-8
    st.floats(0, 1, exclude_min=True, exclude_max=True),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(rates=patterns, at_most=patterns, lr=st.floats(0, 1e30, exclude_min=True))
def test_any_pattern_and_number_survive_toml(rates: Any, at_most: Any, lr: float) -> None:
    recipe = get("gallego-mlp").override(drop_rates=rates, at_most=at_most, lr=lr)
    values = tomllib.loads(recipe.to_toml())
    assert (values["drop_rates"], values["at_most"], values["lr"]) == (rates, at_most, lr)
    assert list(values["drop_rates"]) == list(rates)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("lr", "3e-4", 3e-4),
        ("lr", ".5", 0.5),
        ("lr", "1", 1.0),
        ("epochs", "1_000", 1000),
        ("network", "lenet5", "lenet5"),
        ("init", "2021", "2021"),
        ("init", '"2021"', "2021"),
        ("at_most", "{'fc1' = 0.2, fc2 = 0.3}", {"fc1": 0.2, "fc2": 0.3}),
        ("shrink_at", "[3, 4]", (3, 4)),
        ("nesterov", "False", False),
        ("compile", "none", None),
        ("compile", "true", True),
        ("ema", "None", None),
        ("finetune-epochs", "3", 3),
    ],
)
def test_what_is_typed_is_toml_with_fewer_quotes(field: str, text: str, value: object) -> None:
    changed = get("gallego-mlp").override(**from_strings({field: text}))
    got = getattr(changed, field.replace("-", "_"))
    assert got == value
    assert type(got) is type(value)


def test_a_line_break_smuggles_nothing_in() -> None:
    with pytest.raises(ValueError, match=r"`epochs` must be an integer"):
        get("demo").override(**from_strings({"epochs": "1\nlr = 2"}))


# ---------------------------------------------------------------- files


def test_a_file_starts_from_a_base_and_may_take_values_away(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "louizos-mlp"\npenalty = "none"\n[at_most]\nfc1 = 0.5\n')
    assert load_toml(file) == get("louizos-mlp").override(name="mine", penalty=None, at_most={"fc1": 0.5})
    file.write_text('network = "lenet5"\ndata = "mnist"\npenalty = 1')
    assert load_toml(file) == Recipe(name="mine", network="lenet5", data="mnist", penalty=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("network =", "mine.toml: Invalid value"),
        ('base = "louizos-mpl"', "mine.toml: `louizos-mpl` is not the name of a recipe; did you mean `louizos-mlp`?"),
        ("base = 3", "mine.toml: `3` is not the name of a recipe; there are budget-mlp, budget-lenet5, demo, "),
        ('bass = "demo"', "mine.toml: `bass` is not a field of a recipe; did you mean `base`?"),
        ('network = "lenet5"', "mine.toml: a recipe must have `data`, got name, network"),
        ('base = "demo"\nlr = "fast"', "mine.toml: `lr` must be a positive number, got 'fast'"),
        ('base = "demo"\nlr = "none"', "mine.toml: `lr` must be a positive number, got 'none'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=r".") as caught:
        load_toml(tmp_path / "mine.toml")
    assert str(caught.value).startswith(message)
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        load_toml(tmp_path / "absent.toml")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("name", "a/b", 'must be letters, digits, ".", "_" and "-", and begin with one of the first two'),
        ("name", "", "must be letters"),
        ("network", "resnet", 'must be "gpt-LAYERS-HEADS-WIDTH"'),
        ("network", "wrn-27-10", 'must be "gpt'),
        ("network", "wrn-4-1", 'must be "gpt'),
        ("data", "imagenet", 'must be "mnist", "mnist-split", "mnist5k", "cifar10", "cifar10-split", "cifar100"'),
        ("init", 2018, 'must be "2017" or "2018" or "2021"'),
        (
            "placement",
            "weights",
            'must be "shrinkable" or "streams" or "inputs" or "whole" or "everything" or "per_layer" or "blocks"',
        ),
        ("drop_rates", {}, "must be a number for each pattern"),
        ("drop_rates", 0.5, "must be a number for each pattern"),
        ("at_most", 40, "must be a fraction of the dense cost in (0, 1]"),
        ("at_most", True, "must be a fraction"),
        ("penalty", -1, "must be a number of at least 0"),
        ("lr", 0, "must be a positive number"),
        ("lr", float("nan"), "must be a positive number"),
        ("lr", 3.4e38, "must be at most 1e+30"),
        ("lr", float("inf"), "must be a positive number"),
        ("lr", 10**310, "must be a positive number"),
        ("lr", "1e-3", "must be a positive number"),
        ("lr", None, "must be a positive number"),
        ("momentum", 1.0, "must be a number in [0, 1)"),
        ("nu", -1.0, "must be a number in (-1, 1)"),
        ("ema", 1.0, "must be a number in (0, 1)"),
        ("batch", 0, "must be an integer of at least 1"),
        ("batch", 1.0, "must be an integer of at least 1"),
        ("epochs", True, "must be an integer of at least 1"),
        ("seed", -1, "must be an integer of at least 0"),
        ("milestones", 60, "must be a list of epochs"),
        ("milestones", (60, 60), "must be a list of rising epochs"),
        ("nesterov", 1, "must be true or false"),
        ("compile", "yes", "must be true or false"),
        ("target_warmup", 1.5, "must be a fraction of the epochs in [0, 1]"),
    ],
)
def test_a_wrong_value_is_refused_with_the_field_and_the_value(field: str, value: object, must: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        get("gallego-mlp").override(**{field: value})
    assert str(caught.value).startswith(f"`{field}` {must}")
    assert str(caught.value).endswith(f", got {value!r}")


def test_a_wrong_value_under_a_pattern_names_the_pattern() -> None:
    with pytest.raises(ValueError, match=r"^`at_most\[\"fc1\"\]` must be a fraction .* got 30$"):
        get("gallego-mlp").override(at_most={"fc1": 30})
    with pytest.raises(ValueError, match=r"^`drop_rates` must have patterns as keys, got 1$"):
        get("gallego-mlp").override(drop_rates={1: 0.3})


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("gallego-mlp", {"penalty": 0.1}, "`at_most` and `penalty` exclude each other, got 0.33 and 0.1"),
        ("gallego-mlp", {"at_most": None}, "`at_most` or `penalty` must be given, got neither"),
        ("gallego-mlp", {"placement": None}, "`at_most` must be absent without gates (`placement`), got 0.33"),
        ("louizos-mlp", {"placement": None}, "`penalty` must be absent without gates (`placement`), got 0.1"),
        ("gallego-mlp", {"data": "cifar10"}, '`data` must be "mnist" or "mnist-split" or "mnist5k" for \'lenet300\''),
        (
            "wrn-cifar10",
            {"data": "mnist5k"},
            '`data` must be "cifar10" or "cifar10-split" or "cifar100" for \'wrn-28-10\', got \'mnist5k\'',
        ),
        ("gallego-mlp", {"dropout": 0.3}, "`dropout` must be 0.0 for 'lenet300', which has none, got 0.3"),
        ("louizos-mlp", {"finalize": True}, "`finalize` must be false without `at_most`, its target, got true"),
        ("louizos-mlp", {"target_warmup": 0.5}, "`target_warmup` must be 0.0 without `at_most`"),
        ("wrn-cifar10", {"finetune_epochs": 1}, "`finetune_epochs` must be 0 without gates"),
        ("gallego-mlp", {"kp": 1.0}, "`kp` must be 0.0 with `dual` 'ascent': it belongs to 'nupi', got 1.0"),
        ("gallego-mlp", {"nu": 0.5}, "`nu` must be 0.0 with `dual` 'ascent'"),
        ("gallego-mlp", {"nesterov": True}, "`nesterov` must be false without SGD"),
        (
            "gallego-mlp",
            {"dual": "auto"},
            "`dual_lr` must be absent with `dual` 'auto', which finds its own, got 0.0001",
        ),
        ("louizos-mlp", {"cost": "macs"}, '`cost` must be "l0_norm" with `penalty`, which weighs no other, got "macs"'),
        ("gallego-mlp", {"milestones": (60,)}, "`decay` must be less than 1 with `milestones`"),
        ("demo", {"dual_lr": 0.1}, "`dual_lr` must be absent with `dual` 'auto'"),
        ("demo", {"kp": 0.1}, "`kp` must be 0.0 with `dual` 'auto': it belongs to 'nupi', got 0.1"),
    ],
)
def test_values_that_do_not_go_together_are_refused(base: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        get(base).override(**changes)
    assert str(caught.value).startswith(message)


def test_a_penalised_recipe_becomes_a_constrained_one_in_one_step() -> None:
    assert get("louizos-mlp").override(**from_strings({"penalty": "none", "at_most": "0.2"})).at_most == 0.2


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lerning_rate", "there are name, network, data"), ("gatelr", "did you mean `gate_lr`?"), ("LR", "`lr`?")],
)
def test_an_unknown_field_is_refused_with_the_nearest(name: str, hint: str) -> None:
    for attempt in (
        lambda: get("demo").override(**{name: 1}),
        lambda: from_strings({name: "1"}),
        lambda: Recipe.from_dict({**get("demo").to_dict(), name: 1}),
    ):
        with pytest.raises(ValueError, match=rf"^`{name}` is not a field of a recipe; ") as caught:
            attempt()
        assert hint in str(caught.value)


def test_a_gate_without_a_rate_is_refused() -> None:
    recipe = get("louizos-mlp").override(drop_rates={"fc1": 0.2, "fc*": 0.3})
    assert (recipe.drop_rate("fc1"), recipe.drop_rate("fc2")) == (0.2, 0.3)  # the first match counts
    with pytest.raises(ValueError, match=r"^`drop_rates` must have a pattern for `conv1`, got 'fc1', 'fc\*'$"):
        recipe.drop_rate("conv1")


# ---------------------------------------------------------------- a value


def test_a_recipe_does_not_change_behind_its_back() -> None:
    rates = {"*": 0.5}
    recipe = get("demo").override(drop_rates=rates)
    rates["*"] = 0.1
    recipe.to_dict()["drop_rates"]["*"] = 0.2
    assert recipe.drop_rates == {"*": 0.5}
    with pytest.raises(FrozenInstanceError):
        recipe.lr = 1.0  # type: ignore[misc]


def test_the_digest_changes_with_every_field_but_the_name() -> None:
    base = Recipe(name="a", network="lenet5", data="mnist", at_most=0.5, dual="nupi", optimizer="sgd", decay=0.1)
    others: dict[str, Any] = {"network": "lenet300", "data": "mnist5k", "init": "2021", "placement": "per_layer"}
    others |= {"drop_rates": {"*": 0.4}, "rule": "median", "cost": "macs", "at_most": 0.4, "on": "kept"}
    others |= {"dual": "ascent", "restarts": False, "optimizer": "adam", "ema": 0.9, "scaling": "unit"}
    others |= {"milestones": (1,), "decay": 0.5, "precision": "bfloat16", "compile": False, "nesterov": True}
    others |= {"shrink_at": (3,), "shrink_multiple": 4, "settle_at": 7, "loss": "a:b", "metric": "a:c", "gate": "stg"}
    alone = {"penalty", "dropout", "name"}  # the first two need another network or another objective beside them
    for name in sorted({f.name for f in fields(Recipe)} - alone - others.keys()):
        value = getattr(base, name)
        others[name] = not value if isinstance(value, bool) else 7 if isinstance(value, int) else 0.125
    weighed = base.override(at_most=None, penalty=1.0, dual="auto")
    noisy = weighed.override(gate="bc_gnj", per_example=True)
    taught = base.override(teacher="lenet5")
    others |= {"estimator": "arm", "most_noise": {"*": 0.5}, "teacher": "lenet300"}
    bases = {"penalty_after": weighed, "penalty_warmup": weighed, "weights_first": weighed, "most_noise": noisy}
    bases |= {"teacher_epochs": taught, "temperature": taught}
    bases |= {
        "threshold": noisy,
        "start": weighed.override(gate="stg"),
        "estimator": weighed.override(gate="bernoulli"),
    }
    digests = {bases.get(name, base).override(**{name: value}).digest() for name, value in others.items()}
    known = {each.digest() for each in (base, *bases.values())}
    assert len(digests | known) == len(others) + len(known)
    assert base.override(name="b").digest() == base.digest()
    assert base.override(at_most=None, penalty=1).digest() != base.override(at_most=None, penalty=2).digest()
    # The first match counts, so the order does.
    a, b = ({"fc1": 0.2, "*": 0.5}, {"*": 0.5, "fc1": 0.2})
    assert base.override(drop_rates=a).digest() != base.override(drop_rates=b).digest()
    # 1 and 1.0, a list and a tuple are the same.
    assert base.override(lr=1).digest() == base.override(lr=1.0).digest()
    assert base.override(milestones=[1, 2]).digest() == base.override(milestones=(1, 2)).digest()


def test_digests_are_the_same_in_every_process() -> None:
    """A changed field or default makes older checkpoints foreign: this number then changes, and knowingly."""
    assert get("louizos-mlp").digest()[:16] == "bd75a7b4ea25c7df"


def test_values_in_words() -> None:
    assert [in_words(v) for v in ({"fc1": 0.2}, None, [60, 120], True)] == ["{fc1: 0.2}", "none", "[60, 120]", "true"]
    assert [in_words(v) for v in (1e-5, "lenet5", (3,), ())] == ["1e-05", "lenet5", "[3]", "[]"]


def test_the_order_of_patterns_is_a_difference() -> None:
    assert differences({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 2}}) == []
    assert differences({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}) == [
        "`a` is {x: 1, y: 2} there and {y: 2, x: 1} here"
    ]
