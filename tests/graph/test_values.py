"""The algebra of carried against real tensors: unit numbers are put into a tensor, torch moves them, and the carried
must say the same.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ellzero.graph import values
from ellzero.graph.axes import Numbers
from ellzero.graph.ties import Ties, classes
from ellzero.graph.values import Value


def ties(*sizes: int) -> tuple[Ties, list[Numbers]]:
    """An empty record, and atoms for dimensions of these sizes."""
    record = Ties({})
    return record, [record.fresh(size) for size in sizes]


def spread(value: Value, group: values.Dims) -> Tensor:
    """What a group of dimensions carries as a full tensor: the atom at every entry."""
    shape = [value.shape[d] if d in group else 1 for d in range(value.ndim)]
    return torch.tensor(value.carried[group]).reshape(shape).expand(value.shape)


def content(value: Value) -> list[Tensor]:
    return [spread(value, group) for group in value.carried]


def tied(record: Ties) -> Numbers:
    return classes(record.count, record.pairs)


def same_units(record: Ties, a: Tensor, b: Tensor) -> bool:
    root = tied(record)
    return a.shape == b.shape and np.array_equal(root[a.numpy()], root[b.numpy()])


def frozen(record: Ties) -> set[int]:
    root = tied(record)
    return {int(r) for atoms, _ in record.freezes for r in root[atoms]}


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def some_values(draw: st.DrawFn) -> tuple[Ties, Value]:
    """A value that carries units on one random dimension."""
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    record, (atoms,) = ties(shape[dim])
    return record, Value(shape, {(dim,): atoms})


def _reshapes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with as many entries: the factors of all dimensions, cut anew."""
    total = prod(shape)
    factors = [p for p in (2, 2, 2, 2, 3, 3, 3, 3) if total % p == 0]
    cuts = st.lists(st.sampled_from([1, *factors]), max_size=4)
    return cuts.map(lambda parts: _fitted(parts, total))


def _fitted(parts: Sequence[int], total: int) -> tuple[int, ...]:
    out = []
    for p in parts:
        if total % p == 0:
            out.append(p)
            total //= p
    return (*out, total)


@pytest.mark.slow
@given(some_values(), st.data())
def test_reshape_is_what_torch_does(start: tuple[Ties, Value], data: st.DataObject) -> None:
    """Through up to three reshapes and permutations in a row: at each entry the same unit, or the unit is frozen."""
    record, value = start
    (truth,) = content(value)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            shape = data.draw(_reshapes(value.shape))
            value, truth = values.reshape(record, value, shape), truth.reshape(shape)
        else:
            order = data.draw(st.permutations(range(value.ndim)))
            value, truth = values.permute(value, order), truth.permute(order)
        assert value.shape == truth.shape
        found = content(value)
        if found:
            assert len(found) == 1
            assert same_units(record, found[0], truth)
        else:
            assert set(truth.flatten().tolist()) <= frozen(record)
            return


@pytest.mark.parametrize(
    ("shape", "dim", "to", "group"),
    [
        ((2, 5, 3, 3), 1, (2, 45), (1,)),  # flatten: blocks of nine
        ((2, 8, 3), 1, (2, 2, 4, 3), (1, 2)),  # the two halves of a channel shuffle
        ((2, 12, 3), 1, (2, 3, 2, 2, 3), (1, 2, 3)),  # a pixel shuffle
        ((2, 3, 8), 2, (6, 8), (1,)),  # tokens of a batch
        ((6, 8), 1, (2, 3, 8), (2,)),
        ((4, 3, 1, 1), 1, (4, 3), (1,)),
        ((4, 1, 5), 1, (4, 5), (1,)),  # one unit of five entries
        ((1, 3), 1, (3,), (0,)),
    ],
)
def test_reshape_of_common_forms(shape: tuple[int, ...], dim: int, to: tuple[int, ...], group: tuple[int, ...]) -> None:
    record, (atoms,) = ties(shape[dim])
    value = Value(shape, {(dim,): atoms})
    out = values.reshape(record, value, to)
    assert list(out.carried) == [group]
    assert not record.freezes
    assert torch.equal(content(out)[0], content(value)[0].reshape(to))


def test_reshape_that_lays_two_axes_out_together_freezes_the_inner_one() -> None:
    """Of rows, whole ones can go; a column lies in all of them."""
    record, (a, b) = ties(3, 4)
    out = values.reshape(record, Value((3, 4), {(0,): a, (1,): b}), (12,))
    assert out.carried[(0,)].tolist() == np.repeat(a, 4).tolist()
    assert frozen(record) == {*b.tolist()}


def test_reshape_keeps_two_axes_that_stay_apart() -> None:
    record, (a, b) = ties(3, 4)
    out = values.reshape(record, Value((2, 3, 4), {(1,): a, (2,): b}), (2, 3, 2, 2))
    assert set(out.carried) == {(1,), (2, 3)}


def test_reshape_keeps_an_axis_between_the_dimensions_of_joint_units() -> None:
    """Heads and batch are one dimension, time lies between them and what is in a head: as in torch's attention."""
    record, (time, atoms) = ties(5, 4 * 6)
    value = Value((8, 5, 6), {(1,): time, (0, 2): np.tile(atoms.reshape(4, 6), (2, 1))})
    out = values.reshape(record, value, (2, 4, 5, 6))
    assert not record.freezes
    assert set(out.carried) == {(2,), (1, 3)}
    for group, before in {(2,): (1,), (1, 3): (0, 2)}.items():
        assert torch.equal(spread(out, group), spread(value, before).reshape(out.shape))


@given(some_values(), st.data())
def test_take_is_index_select(start: tuple[Ties, Value], data: st.DataObject) -> None:
    _, value = start
    (truth,) = content(value)
    dim = data.draw(st.integers(0, value.ndim - 1))
    index = data.draw(st.lists(st.integers(0, value.shape[dim] - 1), min_size=1, max_size=6))
    out = values.take(value, dim, np.array(index))
    assert torch.equal(content(out)[0], truth.index_select(dim, torch.tensor(index)))


@given(some_values(), st.data())
def test_insert_is_unsqueeze(start: tuple[Ties, Value], data: st.DataObject) -> None:
    _, value = start
    (truth,) = content(value)
    dim = data.draw(st.integers(0, value.ndim))
    assert torch.equal(content(values.insert(value, dim))[0], truth.unsqueeze(dim))


@given(some_values(), st.data())
def test_drop_is_select(start: tuple[Ties, Value], data: st.DataObject) -> None:
    record, value = start
    (truth,) = content(value)
    dim = data.draw(st.integers(0, value.ndim - 1))
    out = values.drop(record, value, dim, "it is picked")
    expected = truth.select(dim, 0)
    assert out.shape == expected.shape
    if out.carried:
        assert torch.equal(content(out)[0], expected)
    else:
        assert set(truth.flatten().tolist()) <= frozen(record)


@pytest.mark.slow
@given(st.data())
def test_elementwise_ties_exactly_what_meets(data: st.DataObject) -> None:
    """Brute force: entry by entry, the units of both operands belong together, and nothing else does."""
    shape = data.draw(shapes)
    operands, record, truths = [], Ties({}), []
    for _ in range(2):
        lead = data.draw(st.integers(0, len(shape) - 1))
        own = tuple(size if data.draw(st.booleans()) else 1 for size in shape[lead:])
        dim = data.draw(st.integers(0, len(own) - 1))
        value = Value(own, {(dim,): record.fresh(own[dim])})
        operands.append(value)
        truths.append(content(value)[0].expand(torch.broadcast_shapes(own, shape)))
    out = values.elementwise(record, operands, shape)
    stopped = frozen(record)
    for group in out.carried:
        for truth, value in zip(truths, operands, strict=True):
            # What the output carries from this operand is where torch puts it.
            ((own,),) = value.carried
            if (own + len(shape) - value.ndim,) == group and value.shape[own] == shape[group[0]]:
                assert same_units(record, spread(out, group), truth)
    root = tied(record)
    for truth in truths:  # carried on, or frozen
        carried = {int(r) for g in out.carried for r in root[out.carried[g]].ravel()}
        assert {int(r) for r in root[truth.numpy()].ravel()} <= carried | stopped


def test_elementwise_over_two_axes_at_right_angles_keeps_both() -> None:
    record, (a, b) = ties(3, 4)
    out = values.elementwise(record, [Value((3, 1), {(0,): a}), Value((4,), {(0,): b})], (3, 4))
    assert set(out.carried) == {(0,), (1,)}


def test_elementwise_with_a_plain_dimension_freezes() -> None:
    record, (a,) = ties(3)
    values.elementwise(record, [Value((2, 3), {(1,): a}), Value((2, 3), why="the model's input")], (2, 3))
    assert record.freezes[0][1] == "it meets the model's input"
    assert frozen(record) == set(a.tolist())


def test_elementwise_with_a_number_for_each_example_does_not() -> None:
    record, (a,) = ties(3)
    out = values.elementwise(record, [Value((2, 3), {(1,): a}), Value((2, 1))], (2, 3))
    assert not record.freezes
    assert torch.equal(content(out)[0], torch.as_tensor(a).expand(2, 3))


def test_joint_units_meet_single_ones() -> None:
    """A pixel-shuffled map and a plain one are added: the four channels behind one output channel become one unit."""
    record, (a, b) = ties(12, 3)
    joint = values.reshape(record, Value((2, 12), {(1,): a}), (2, 3, 4))
    out = values.elementwise(record, [joint, Value((2, 3, 4), {(1,): b})], (2, 3, 4))
    assert list(out.carried) == [(1,)]
    assert same_units(record, torch.as_tensor(a).reshape(3, 4), torch.as_tensor(b)[:, None].expand(3, 4))
    assert len(set(tied(record)[b].tolist())) == 3


def test_joint_units_that_overlap_beside_single_ones_keep_what_lies_along_these() -> None:
    """Units of dimensions 0 and 1, of 1 and 2, and of 0 alone: those of 1 and 2 meet the others askew."""
    record, (a, b, c) = ties(6, 6, 2)
    joint = [Value((2, 3, 1), {(0, 1): a.reshape(2, 3)}), Value((1, 3, 2), {(1, 2): b.reshape(3, 2)})]
    out = values.elementwise(record, [*joint, Value((2, 1, 1), {(0,): c})], (2, 3, 2))
    assert list(out.carried) == [(0,)]
    assert same_units(record, torch.as_tensor(a).reshape(2, 3), torch.as_tensor(c)[:, None].expand(2, 3))
    assert frozen(record) == set(b.tolist())


def test_narrow_ties_what_differs_only_there() -> None:
    record, (a,) = ties(24)
    value = values.reshape(record, Value((24,), {(0,): a}), (2, 3, 4))
    values.narrow(record, value, [1])
    assert list(value.carried) == [(0, 2)]
    root = tied(record)[a].reshape(2, 3, 4)
    assert (root == root[:, :1]).all()
    assert len(np.unique(root)) == 8


def test_without_freezes_only_what_lies_there_alone() -> None:
    record, (a, b) = ties(6, 5)
    value = values.reshape(record, Value((6, 5), {(0,): a, (1,): b}), (2, 3, 5))
    kept = values.without(record, value, [1, 2], "it is mixed")
    assert list(kept) == [(0,)]
    assert frozen(record) == set(b.tolist())


@given(st.data())
def test_concat_is_cat(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    record, atoms = ties(*sizes)
    parts = [Value((*shape[:dim], n, *shape[dim + 1 :]), {(dim,): a}) for n, a in zip(sizes, atoms, strict=True)]
    truth = torch.cat([content(v)[0] for v in parts], dim)
    out = values.concat(record, parts, dim, tuple(truth.shape))
    assert torch.equal(content(out)[0], truth)
    assert not record.freezes


def test_concat_ties_the_other_dimensions_and_freezes_plain_parts() -> None:
    record, (a, b) = ties(3, 3)
    out = values.concat(record, [Value((2, 3), {(1,): a}), Value((4, 3), {(1,): b})], 0, (6, 3))
    assert same_units(record, torch.as_tensor(a), torch.as_tensor(b))
    assert list(out.carried) == [(1,)]
    record, (a,) = ties(3)
    out = values.concat(record, [Value((2, 3), {(1,): a}), Value((2, 2), why="the model's input")], 1, (2, 5))
    assert out.carried[(1,)][:3].tolist() == a.tolist()
    assert frozen(record) == set(out.carried[(1,)][3:].tolist())  # the part that is no unit stays; `a` may go


def test_what_has_no_entries_carries_nothing() -> None:
    ties, empty = Ties({}), Value((2, 3, 0), {(1, 2): np.zeros((3, 0), dtype=np.int64)})
    values.narrow(ties, empty, [2])
    assert empty.carried == {}


def heads(ties: Ties) -> Value:
    """Two heads of four entries each, at the dimensions 1 and 3."""
    return Value((5, 2, 7, 4), {(1, 3): ties.fresh(8).reshape(2, 4)})


def units(ties: Ties, value: Value, dims: tuple[int, ...]) -> list[int]:
    """The units at some dimensions, numbered by their first occurrence."""
    roots = classes(ties.count, ties.pairs)[value.carried[dims]].ravel().tolist()
    return [list(dict.fromkeys(roots)).index(root) for root in roots]


def test_what_is_plain_along_each_head_leaves_whole_heads() -> None:
    ties = Ties({})
    out = values.elementwise(ties, [heads(ties), Value((5, 1, 7, 4))], (5, 2, 7, 4))
    assert units(ties, out, (1,)) == [0, 1]
    assert not ties.freezes


def test_a_weight_along_each_head_leaves_whole_heads_and_is_frozen() -> None:
    ties = Ties({"w": (4,)})
    x, weight = heads(ties), Value((4,), {(0,): ties.atoms("w", 0)}, source="w")
    out = values.elementwise(ties, [x, weight], (5, 2, 7, 4))
    assert list(out.carried) == [(1,)]
    ((frozen, _),) = ties.freezes
    assert frozen.tolist() == [0, 1, 2, 3]


def test_halves_of_each_head_are_put_together_head_by_head() -> None:
    """As rotary embeddings do; a part of which whole heads are left already leaves whole heads."""
    ties = Ties({})
    x = heads(ties)
    parts = [values.take(x, 3, np.arange(2, 4)), values.take(x, 3, np.arange(2))]
    out = values.concat(ties, parts, 3, x.shape)
    assert out.carried[(1, 3)].tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]
    values.narrow(ties, parts[0], [3])
    assert units(ties, values.concat(ties, parts, 3, x.shape), (1,)) == [0, 1]
