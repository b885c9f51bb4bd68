"""Whether what an operation makes is zero at units that nothing writes.

Units that a norm looks at together are closed where they are written: their rows in weights, and the parameters that
are added to them, are zero. Then so must be all that is read of them. This file says of each operation whether zeros
stay zeros. One that is not named here may make anything of them.
"""

from __future__ import annotations

from typing import Any

from ellzero.graph.axes import Numbers
from ellzero.graph.rules.call import Call, tensors
from ellzero.graph.values import Value, Zero, carries

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
_WEIGHT = dict.fromkeys(("linear", "matmul", "mm", *_CONVOLUTIONS), 1) | {"embedding": 0, "addmm": 2}  # its place
_BIAS = dict.fromkeys(("linear", *_CONVOLUTIONS), 2) | {"addmm": 0}
_TERMS = dict.fromkeys(("add", "sub", "rsub", "subtract"), 2) | dict.fromkeys(("cat", "concat", "concatenate"), 1)
_DIVIDES = ("div", "divide", "true_divide")
_REPEATS = ("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave")
_MOVES = ("clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "view", "reshape", "flatten")
_NAMES = """relu relu6 gelu silu tanh hardswish leaky_relu elu selu celu mish hardshrink softshrink expm1 log1p sqrt
square abs neg sin tan asin atan sinh erf sign sgn floor ceil round trunc frac positive zeros_like dropout
feature_dropout rrelu prelu glu rms_norm mean sum amax amin var std norm linalg_vector_norm cumsum
clone contiguous detach alias to _to_copy type_as lift_fresh_copy
view reshape flatten unflatten _unsafe_view view_as reshape_as _reshape_alias squeeze unsqueeze permute transpose t
numpy_T mT swapaxes swapdims movedim moveaxis slice narrow select split split_with_sizes tensor_split unsafe_split
chunk unsafe_chunk unbind expand expand_as broadcast_to repeat tile repeat_interleave index index_select roll flip
pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"""
KEEPS = frozenset(_NAMES.split())  # zeros, of its first argument


def zero(call: Call, args: list[Any], made: Value) -> Zero:
    """Whether `made`, which the operation made of `args`, is zero at units that nothing writes."""
    given = tensors(args)
    if not made.carried or not given:
        return "no"
    if call.op == "with_shares":
        call.ties.shares.extend(args[1].carried.values())
        return "low"
    if given[0].zero in ("low", "share"):
        shares = given[0].zero == "low" and call.op in ("softmax", "_softmax")
        return "share" if shares else given[0].zero if call.op in _MOVES else "no"
    if call.op == "response_norm":
        return _summed(call, [], [args[0], args[2]], made)
    if call.op == "scaled_dot_product_attention":
        return _contracted(call, None, args[2], made)
    if call.op in ("matmul", "bmm") and (args[1].source is None or args[1].ndim > 2):
        return _contracted(call, args[0], args[1], made)
    if call.op in _WEIGHT:
        return _written(call, args, made)
    if call.op in _TERMS:
        return _summed(call, args, given, made)
    if call.op in ("mul", "multiply", *_DIVIDES) and len(given) > 1:
        return _multiplied(call, given[:1] if call.op in _DIVIDES else given, made)
    if call.op in _REPEATS and given[0].zero != "no":  # the same for each new entry, also for one that is closed
        for group in [g for g in made.carried if not carries(given[0], g, made)]:
            _expose(call, made.carried[group])
    keeps = call.op in KEEPS
    if call.op in ("mul", "multiply", *_DIVIDES):
        keeps = isinstance(args[0], Value)
    elif call.op == "pow":
        keeps = isinstance(args[1], int | float) and args[1] > 0
    elif call.op in ("masked_fill", "constant_pad_nd"):
        keeps = args[2] == 0
    elif call.op == "pad":
        keeps = not args[3]  # what it puts beside them: zeros if it is not told
    return given[0].zero if keeps else "no"


def _written(call: Call, args: list[Any], made: Value) -> Zero:
    """What a layer writes is, with its rows and its bias. What its input carries elsewhere gets the bias."""
    weight, bias = args[_WEIGHT[call.op]], args[_BIAS[call.op]] if call.op in _BIAS else None
    matrix = call.op in _CONVOLUTIONS or weight.ndim == 2  # one of more dimensions lies along units and writes none
    numbers = args[3:] if call.op in _CONVOLUTIONS else []
    groups = [a for a in numbers if isinstance(a, int) and not isinstance(a, bool)]
    if weight.source is None or not matrix or (groups and groups[-1] > 1) or (bias is not None and bias.zero != "own"):
        return "no"
    if bias is not None:
        call.ties.added.extend(bias.carried.values())
    written = made.ndim - 1 - (weight.ndim - 2 if call.op in _CONVOLUTIONS else 0)
    for group, atoms in made.carried.items():
        if group != (written,):
            _expose(call, atoms)
    return "yes"


def _summed(call: Call, args: list[Any], given: list[Value], made: Value) -> Zero:
    """Zeros are added up to zeros, if all terms have them; a parameter among the terms is closed too."""
    terms = args[: _TERMS.get(call.op)]
    if any(v.zero == "no" for v in given) or any(isinstance(a, int | float) and a for a in terms):
        return "no"
    for value in given:
        if value.zero == "own":
            call.ties.added.extend(value.carried.values())
        for group, atoms in made.carried.items():
            if not carries(value, group, made):
                _expose(call, atoms)
    return "yes"


def _multiplied(call: Call, given: list[Value], made: Value) -> Zero:
    """One factor that is zero is enough."""
    zeros = [v for v in given if v.zero == "yes"]
    for group, atoms in made.carried.items() if zeros else ():
        if not any(carries(v, group, made) for v in zeros):
            _expose(call, atoms)
    return "yes" if zeros else "no"


def _contracted(call: Call, a: Value | None, b: Value, made: Value) -> Zero:
    """A product of activations, such as heads of weights and values: zero along what both have if one of them is. A
    parameter is zero along what it writes.
    """
    given = [v for v in (a, b) if v is not None]
    alone = len([v for v in given if v.source]) == 1
    zeros = [v for v in given if v.zero == "yes" or (v.source and alone)]
    rows, columns = made.ndim - 2, made.ndim - 1
    for group, atoms in made.carried.items() if zeros else ():
        inside = {rows, columns} & {*group}
        may = [v for v in zeros if (columns if v is b else rows) in group or not (inside or v.source)]
        if not any(carries(v, group, made) for v in may):
            _expose(call, atoms)
    return "yes" if zeros else "no"


def _expose(call: Call, atoms: Numbers) -> None:
    call.ties.expose(atoms, f"{call.where} gives something that is not zero where a unit is closed for a norm")
