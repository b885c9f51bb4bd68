"""The fields of a recipe, each written once: type, range, default, sentence, and what it has to do with others.

Checks, refusals, the help of the command line and TOML follow from here; what can be done with a recipe is not known.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ellzero.experiments import networks
from ellzero.experiments.data import KNOWN
from ellzero.experiments.data.own import WORDS, is_own
from ellzero.experiments.recipe.checking import (
    Code,
    Count,
    CountOrZero,
    Epochs,
    Inside,
    Needs,
    NotNegative,
    Positive,
    Range,
    Rate,
    Rule,
    Share,
)

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
_BY_EQ_17 = Needs(
    lambda r: r.expects and r.optimizer != "adamw" and r.gate_lr != "auto",
    "with `gate` {gate!r}, `gate_lr` {gate_lr!r} and `optimizer` {optimizer!r}: its weights have plain decay",
)
_ON_PENALTY = Needs(lambda r: r.penalty is not None, "without `penalty`", strict=True)
_ON_TEACHER = Needs(lambda r: r.teacher is not None, "without a `teacher`", strict=True)
_PART = Range("a fraction of the epochs in [0, 1]", lambda x: 0 <= x <= 1)
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
        Code | Literal["loss"] | None,
        "what is noted as the error, MODULE:FUNCTION of (all outputs, all targets) of the test set; lower is better. "
        '"loss" for the loss of the test set, without smoothing. None for the percentage of wrong classes, or the loss '
        "where that is your own.",
    ] = None
    label_smoothing: Annotated[
        Rate,
        "share of the probability that the loss takes from the right class and gives to all alike.",
        Needs(lambda r: r.loss is None, "with a `loss` of your own", strict=True),
        Needs(lambda r: r.teacher is None, "with a `teacher`, whose probabilities are smooth", strict=True),
    ] = 0.0
    init: Annotated[
        Literal["2017", "2018", "2021", "own"],
        'how weights are drawn: as the paper of that year does ("2017" is that of Sparse VD, N(0, 0.01²)), or "own" '
        "for as the network's own code does.",
        Rule(
            lambda r: r.init == "own" or not r.facts.own,
            'must be "own" for {network!r}, whose code draws or loads its weights, got "{init}"',
        ),
    ] = "2018"
    dropout: Annotated[
        Rate,
        "rate on the hidden layer of every block of a WRN; of a GPT on the embedding, the attention's weights and what "
        "is added to the stream; of a ViT on the attention's weights and, the more the later, whole branches.",
        Needs(lambda r: r.facts.has_dropout, "for {network!r}, which has none", strict=True),
    ] = 0.0
    # gates
    placement: Annotated[
        Literal["shrinkable", "streams", "inputs", "whole", "everything", "per_layer", "blocks"] | None,
        'where gates go: "shrinkable" (units, and what linear layers read of the data that have more inputs than '
        'outputs), "streams" for residual streams too (LayerNorms of a transformer then subtract no mean: '
        '`l0.centred`), "inputs" for what any linear layer reads of the data, "whole" for whole branches too, '
        '"everything" for streams and branches, "per_layer", or "blocks" for '
        "the hidden layer of every block of a WRN, each gate counting what makes its map; none for the dense network, "
        "trained by the same loop.",
        Rule(
            lambda r: r.placement != "blocks" or r.facts.blocks is not None,
            'must be "shrinkable" or "per_layer" for {network!r}, which has no blocks, got "blocks"',
        ),
    ] = "shrinkable"
    gate: Annotated[
        Literal[
            "hard_concrete", "stg", "bernoulli", "generalized_dropout", "dropout",
            "sbp", "vib", "gnj", "bc_gnj", "bc_ghs", "sparse_vd", "group_lasso",
        ],
        'the family of the gates: "hard_concrete", "stg", "bernoulli", "generalized_dropout", "dropout", "sbp", "vib", '
        '"gnj", "bc_gnj" or "bc_ghs" (noise on weights too), "sparse_vd" (noise on weights alone) or "group_lasso"; '
        "`penalty` weighs what the family charges, but P(open) of the first three; those from \"sbp\" on take no "
        "`at_most`.",
        _ON_GATES,
        Rule(
            lambda r: r.gate not in ("bc_gnj", "bc_ghs", "sparse_vd") or r.per_example or r.placement is None,
            "{gate!r} must have `per_example` true: its noise on weights is drawn for each example",
        ),
        Rule(
            lambda r: r.gate != "group_lasso" or r.optimizer == "sgd" or r.placement is None,
            "'group_lasso' must have `optimizer` 'sgd', whose steps have one length for all weights, got {optimizer!r}",
        ),
    ] = "hard_concrete"  # fmt: skip
    estimator: Annotated[
        Literal["straight_through", "score", "ar", "arm"],
        'how gates of "bernoulli" and "generalized_dropout", which are 0 or 1, learn: "straight_through", or from the '
        'value of the loss by "score", "ar" or "arm".',
        Needs(lambda r: r.is_binary, "with `gate` {gate!r}, which has a path for gradients", strict=True),
        Needs(
            lambda r: not (r.per_example or r.extra_gradient or r.samples > 1),
            "with `per_example`, `samples` or `extra_gradient`: they learn from the loss of one draw",
            strict=True,
        ),
    ] = "straight_through"
    threshold: Annotated[
        float | dict[str, float] | None,
        'what the family compares with at test time, or {pattern = number}: log α at most ("vib", "gnj", '
        '"bc_gnj", "sparse_vd"), −log of the mode at most ("bc_ghs"), the signal-to-noise ratio at least ("sbp"), '
        'P(open) at least ("bernoulli", "generalized_dropout", one number). None for the family\'s own.',
        _ON_GATES,
        Needs(lambda r: r.has_threshold, "with `gate` {gate!r}, which has none", strict=True),
        Rule(
            lambda r: not (r.is_binary and isinstance(r.threshold, dict)),
            "must be one number with `gate` {gate!r}, got {threshold}",
        ),
    ] = None
    start: Annotated[
        float | None,
        'where gates begin: μ of "stg", log σ² of "sparse_vd". None for the family\'s own.',
        _ON_GATES,
        Needs(lambda r: r.gate in ("stg", "sparse_vd"), "with `gate` {gate!r}, which has its own", strict=True),
    ] = None
    most_noise: Annotated[
        dict[str, Positive] | None,
        'σ of the noise on weights at most, by the pattern of their names, of "bc_gnj" and "bc_ghs".',
        _ON_GATES,
        Needs(lambda r: r.gate in ("bc_gnj", "bc_ghs"), "with `gate` {gate!r}", strict=True),
    ] = None
    per_example: Annotated[
        bool,
        "whether noise is drawn for each image, that on weights by local reparametrisation, and not once for a batch.",
        _ON_GATES,
        Needs(lambda r: r.placement is None or not r.compile, "with `compile`, which does not know it", strict=True),
    ] = False
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
    penalty_after: Annotated[
        float, _PART, "over which fraction of the epochs, from the first, the penalty is zero.", _ON_PENALTY
    ] = 0.0
    penalty_warmup: Annotated[
        float,
        _PART,
        "over which fraction of the epochs it rises then, on a line; 0 for at once.",
        _ON_PENALTY,
    ] = 0.0
    cost: Annotated[
        Literal["l0_norm", "params", "macs", "latency"],
        'what the constraint bounds: "l0_norm", "params", "macs", or "latency", the time of a batch of the training\'s '
        "size on the device that trains, which is measured first.",
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
        _PART,
        "over which fraction of the epochs with gates that learn the target comes down from 1; 0 for at once.",
        _TARGET,
    ] = 0.0
    # optimization
    optimizer: Annotated[
        Literal["adam", "adamw", "sgd"],
        '"adam", "adamw" (each step takes `lr` × `l2` of every weight matrix, gated or not), or "sgd"; for weights and '
        'gates. Adam moves gates whose `gate_lr` is "auto", or under `at_most` with `dual` "auto", as in a `Budget`.',
    ] = "adam"
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
    lr_warmup: Annotated[CountOrZero, "epochs at first over which learning rates rise on a line; 0 for none."] = 0
    linear_after: Annotated[
        Rate | None,
        "after which fraction of the epochs learning rates begin to fall to zero on a line. None for no such fall.",
        Needs(lambda r: r.finetune_epochs == 0, "with `finetune_epochs`, in which they fall anew", strict=True),
        Needs(lambda r: not r.cosine, "with `cosine`, on which they fall", strict=True),
    ] = None
    decay_gates: Annotated[
        bool,
        "whether the gates' learning rate decays too.",
        Needs(
            lambda r: r.placement is not None and r.falls,
            "without gates, and `milestones`, `cosine`, `linear_after` or `lr_warmup`",
        ),
    ] = True
    l2: Annotated[
        NotNegative,
        'of ½·l2·‖w‖², which is eq. 17 of Louizos et al. for gated weights; "weight decay" of SGD. With "adamw", or a '
        '`gate_lr` of "auto", it is plain decay of all weights.',
    ] = 0.0
    l2_gated_factor: Annotated[NotNegative, "`l2` times it is for gated weights.", _ON_GATED_L2, _BY_EQ_17] = 1.0
    detach_l2: Annotated[bool, "whether the gates feel nothing of eq. 17.", _ON_GATED_L2, _BY_EQ_17] = False
    batch: Annotated[Count, "images in a batch."] = 100
    epochs: Annotated[Count, "with gates that learn; those of `finetune_epochs` come after them."] = 200
    weights_first: Annotated[
        Rate,
        "over which fraction of the epochs weights train alone at first, with gates as they begin, without noise.",
        _GATES,
        Rule(
            lambda r: r.weights_first == 0 or r.dense_epochs < r.gate_epochs,
            "must leave epochs for the gates before they settle, got {weights_first} of {epochs} epochs",
        ),
        Needs(lambda r: not r.shrink_at, "with `shrink_at`", strict=True),
    ] = 0.0
    ema: Annotated[
        Inside | None,
        "decay of averaged parameters (bias-corrected) for evaluation, none without; begins anew where gates settle.",
    ] = None
    scaling: Annotated[
        Literal["unit", "signed", "standard"],
        '"unit" for pixels in [0, 1], "signed" for [−1, 1], "standard" for mean 0 and deviation 1.',
    ] = "standard"
    augment: Annotated[
        bool | Literal["auto"],
        'whether images are padded by 4, cropped at random and mirrored; "auto" for AutoAugment\'s policy for CIFAR-10 '
        "before that.",
    ] = False
    distort: Annotated[
        NotNegative,
        "by how many pixels (the standard deviation) points of the training images are moved at random, in each epoch "
        "anew, so that they are shifted, turned, stretched and bent; 0 for images as they are.",
    ] = 0.0
    teacher: Annotated[
        Annotated[str, _NETWORK] | None,
        "the network that is trained first, without gates, on the same images by steps of the same kind, and whose "
        "probabilities stand for the labels from then on (Hinton et al., 2015). None for the labels themselves.",
        Needs(lambda r: r.loss is None, "with a `loss` of your own: it answers with classes", strict=True),
        Rule(
            lambda r: (
                None in (r.teacher, KNOWN.get(r.data)) or networks.find(r.teacher).images in (None, KNOWN[r.data].shape)
            ),
            "must be a network for the images of {data!r}, got {teacher!r}",
        ),
    ] = None
    teacher_epochs: Annotated[Count, "of the teacher, with a learning rate that falls on a cosine.", _ON_TEACHER] = 10
    temperature: Annotated[Positive, "by what the teacher's logits are divided.", _ON_TEACHER] = 1.0
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
