"""Sizes that layers store, and how they follow from their tensors once these were sliced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ellzero.graph.standins.heads import FewerHeads

RESIZERS: dict[type[nn.Module], Callable[[Any], None]] = {}


def resizes(*types: type[nn.Module]) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers how a module's attributes follow from the shapes of its tensors."""

    def register(fix: Callable[[Any], None]) -> Callable[[Any], None]:
        RESIZERS.update(dict.fromkeys(types, fix))
        return fix

    return register


def resize(module: nn.Module) -> None:
    """Brings a module's attributes in line with its sliced tensors; a type without a resizer has none that matter."""
    fix = resizer(module)
    if fix is not None:
        fix(module)


def resizer(module: nn.Module) -> Callable[[Any], None] | None:
    """What brings the attributes of a module of this type in line."""
    for kind in type(module).__mro__:
        if f"{kind.__module__}.{kind.__qualname__}" == _CONV1D:
            return _transposed
        if kind in RESIZERS:
            return RESIZERS[kind]
    return None


@resizes(nn.Linear)
def _linear(m: nn.Linear) -> None:
    m.out_features, m.in_features = m.weight.shape


@resizes(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(m: nn.Conv2d) -> None:
    if m.groups > 1 and m.groups == m.in_channels:
        m.groups = m.weight.shape[0] // (m.out_channels // m.in_channels)
    m.out_channels, m.in_channels = m.weight.shape[0], m.weight.shape[1] * m.groups


@resizes(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _conv_transpose(m: nn.ConvTranspose2d) -> None:
    if m.groups > 1 and m.groups == m.in_channels:
        m.groups = m.weight.shape[0]
    m.in_channels, m.out_channels = m.weight.shape[0], m.weight.shape[1] * m.groups


@resizes(_NormBase)  # every batch and instance norm
def _norm(m: nn.BatchNorm2d) -> None:
    m.num_features = next((t.shape[0] for t in (m.weight, m.running_mean) if t is not None), m.num_features)


@resizes(nn.GroupNorm)
def _group_norm(m: nn.GroupNorm) -> None:
    """Whole groups come and go. Without a weight nothing tells: then its numbers are sizes that are stored."""
    if m.weight is not None:
        m.num_groups = m.weight.shape[0] // (m.num_channels // m.num_groups)
        m.num_channels = m.weight.shape[0]


@resizes(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(m: nn.LayerNorm) -> None:
    if m.weight is not None:
        m.normalized_shape = tuple(m.weight.shape)


@resizes(nn.Embedding, nn.EmbeddingBag)
def _embedding(m: nn.Embedding) -> None:
    m.num_embeddings, m.embedding_dim = m.weight.shape


@resizes(nn.MultiheadAttention)
def _heads(m: nn.MultiheadAttention) -> None:
    """Heads that are not as wide as the input together are nothing that torch's own forward takes."""
    packed: Any = m.in_proj_weight
    inner = m.out_proj.weight.shape[1]
    m.num_heads = inner // m.head_dim
    m.embed_dim = (m.q_proj_weight if packed is None else packed).shape[1]
    m.kdim = (m.k_proj_weight if packed is None else packed).shape[1]
    m.vdim = (m.v_proj_weight if packed is None else packed).shape[1]
    m.out_proj.out_features, m.out_proj.in_features = m.out_proj.weight.shape
    if type(m) in (nn.MultiheadAttention, FewerHeads) and m.bias_k is None and not m.add_zero_attn:
        whole = inner == m.embed_dim
        m.__class__ = nn.MultiheadAttention if whole else FewerHeads
        m._qkv_same_embed_dim = packed is not None and whole  # without it, no layer takes a fast path past the forward


@resizes(nn.PReLU)
def _prelu(m: nn.PReLU) -> None:
    m.num_parameters = m.weight.shape[0]


_CONV1D = "transformers.pytorch_utils.Conv1D"  # by its name: not everyone has the package


def _transposed(m: Any) -> None:
    m.nx, m.nf = m.weight.shape


def in_place_of(old: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """A parameter of these numbers, with what others have noted on the old one; no tensors, of its shape perhaps."""
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    vars(new).update((k, v) for k, v in vars(old).items() if k not in vars(new) and not isinstance(v, Tensor))
    return new
