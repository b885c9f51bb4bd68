"""Units and axes: connected components against scipy, and what becomes of ties, roles and reasons, on graphs small
enough to see.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ellzero.graph.axes import Graph, Numbers, Site, Step
from ellzero.graph.ties import Ties, classes, unify


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_classes_are_connected_components(count: int, data: st.DataObject) -> None:
    atom = st.integers(0, count - 1)
    edges = data.draw(st.lists(st.tuples(atom, atom), max_size=60))
    cut = data.draw(st.integers(0, len(edges)))
    pairs = [
        (np.array([a for a, _ in part], dtype=np.int64), np.array([b for _, b in part], dtype=np.int64))
        for part in (edges[:cut], edges[cut:])
    ]
    found = classes(count, pairs)
    a, b = (np.concatenate([p[k] for p in pairs]) for k in (0, 1))
    _, expected = connected_components(coo_array((np.ones(len(a)), (a, b)), shape=(count, count)), directed=False)
    smallest = {int(c): int(np.flatnonzero(expected == c)[0]) for c in np.unique(expected)}
    assert found.tolist() == [smallest[int(c)] for c in expected]


@pytest.mark.parametrize("order", ["up", "down", "shuffled"])
def test_classes_of_a_long_chain(order: str) -> None:
    """The worst case for hooking trees: one component that is a path."""
    n = 5000
    names = {"up": np.arange(n), "down": np.arange(n)[::-1], "shuffled": np.random.default_rng(0).permutation(n)}[order]
    assert not classes(n, [(names[:-1], names[1:])]).any()


def two_layers() -> Ties:
    """a: 3 -> 4 with a bias, b: 4 -> 2; b reads what a writes."""
    ties = Ties({"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4)}, ("a.weight", "a.bias", "b.weight"))
    ties.reached |= ties.shapes.keys()
    ties.tie(ties.atoms("a.weight", 0), ties.atoms("a.bias", 0))
    ties.tie(ties.atoms("a.bias", 0), ties.atoms("b.weight", 1))
    ties.use(ties.atoms("a.weight", 0), "writes")
    ties.use(ties.atoms("a.bias", 0), "rides")
    ties.use(ties.atoms("b.weight", 1), "reads")
    ties.use(ties.atoms("a.weight", 1), "reads")
    ties.use(ties.atoms("b.weight", 0), "writes")
    ties.freeze(ties.atoms("a.weight", 1), "it reads the input")
    ties.freeze(ties.atoms("b.weight", 0), "it is the output")
    return ties


def test_units_at_the_same_places_form_an_axis() -> None:
    graph = unify(two_layers())
    assert [(a.name, a.size, a.frozen) for a in graph.axes] == [
        ("a", 4, None),
        ("a.input", 3, "it reads the input"),
        ("b", 2, "it is the output"),
    ]
    sites = {(s.tensor, s.dims): (s.role, s.units.tolist()) for s in graph.axes[0].sites}
    assert sites == {
        ("a.weight", (0,)): ("writes", [0, 1, 2, 3]),
        ("a.bias", (0,)): ("rides", [0, 1, 2, 3]),
        ("b.weight", (1,)): ("reads", [0, 1, 2, 3]),
    }
    assert [s.tensor for s in graph.axes[0].readers] == ["b.weight"]
    assert [s.tensor for s in graph.axes[0].writers] == ["a.weight"]
    assert graph.offsets == [0, 4, 7, 9]
    assert graph.units["b.weight"] == {
        (0,): pytest.approx(np.array([7, 8])),
        (1,): pytest.approx(np.array([0, 1, 2, 3])),
    }
    assert graph.reading == {"a.weight": (1,), "b.weight": (1,)}


def test_one_frozen_unit_freezes_its_axis() -> None:
    ties = two_layers()
    ties.freeze(ties.atoms("a.bias", 0)[2:3], "it is looked at by its number")
    assert unify(ties).axes[0].frozen == "it is looked at by its number"


def test_units_of_several_entries() -> None:
    """A flattened map: each unit lies on two columns of the reader."""
    ties = Ties({"a.weight": (3, 1), "b.weight": (2, 6)}, ("a.weight", "b.weight"))
    ties.reached |= ties.shapes.keys()
    ties.tie(np.repeat(ties.atoms("a.weight", 0), 2), ties.atoms("b.weight", 1))
    ties.use(ties.atoms("a.weight", 0), "writes")
    ties.use(ties.atoms("b.weight", 1), "reads")
    axis = unify(ties).axes[0]
    assert (axis.name, axis.size) == ("a", 3)
    assert axis.readers[0].units.tolist() == [0, 0, 1, 1, 2, 2]


def test_units_that_live_elsewhere_form_another_axis() -> None:
    """A concatenation: the reader's columns belong to two axes, and each site says -1 where the other lives."""
    ties = Ties({"a": (2, 1), "b": (3, 1), "c": (1, 5)}, ("a", "b", "c"))
    ties.reached |= ties.shapes.keys()
    ties.tie(np.concatenate([ties.atoms("a", 0), ties.atoms("b", 0)]), ties.atoms("c", 1))
    for t in ("a", "b"):
        ties.use(ties.atoms(t, 0), "writes")
    ties.use(ties.atoms("c", 1), "reads")
    axes = {a.name: a for a in unify(ties).axes}
    assert axes["a"].readers[0].units.tolist() == [0, 1, -1, -1, -1]
    assert axes["b"].readers[0].units.tolist() == [-1, -1, 0, 1, 2]


def test_a_tensor_that_reads_and_writes_one_axis_freezes_it() -> None:
    ties = Ties({"w": (4, 4)}, ("w",))
    ties.reached.add("w")
    ties.use(ties.atoms("w", 1), "reads")
    ties.use(ties.atoms("w", 1), "writes")
    graph = unify(ties)
    assert next(a for a in graph.axes if a.sites[0].dims == (1,)).frozen == "`w` both reads and writes it"
    assert graph.two_faced == {"w"}


def test_an_axis_that_nothing_reads_is_frozen() -> None:
    ties = Ties({"w": (4,)}, ("w",))
    ties.reached.add("w")
    assert unify(ties).axes[0].frozen == "no weight reads it, so no gate could close it"


def test_balances_with_the_same_units_in_other_groups_are_all_kept() -> None:
    """Two groups of six and three of four, on the same channels."""
    ties = Ties({"w": (12,)}, ("w",))
    ties.reached.add("w")
    atoms = ties.atoms("w", 0)
    for groups in (2, 3, 2):
        ties.balances.append(atoms.reshape(groups, -1))
    assert [b.shape for b in unify(ties).balances] == [(2, 6), (3, 4)]


def test_index_maps_of_a_module_used_twice_are_tied() -> None:
    ties = Ties({"w": (2, 2)}, ("w",))
    ties.table("w", (0, 1), np.array([[0, 1], [2, 3]]), "reads")
    ties.count = 8
    ties.table("w", (0, 1), np.array([[4, 5], [6, 7]]), "reads")
    assert classes(8, ties.pairs).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_path_carries_on() -> None:
    """input -> a -> (b -> c) + a -> output: closing b leaves the sum, closing a leaves nothing."""
    steps = (
        Step((), is_input=True),
        Step((0,), ("a",)),
        Step((1,), ("b",)),
        Step((2,), ("c",)),
        Step((1, 3)),
        Step((4,), is_output=True),
    )
    graph = Graph((), {}, steps=steps)
    assert graph.carries_on([])
    assert graph.carries_on(["b"])
    assert graph.carries_on(["b", "c"])
    assert not graph.carries_on(["a"])


def test_plain_data_can_be_written_by_hand() -> None:
    units: Numbers = np.arange(3)
    site = Site("w", (0,), units, "writes")
    assert site.units is units
