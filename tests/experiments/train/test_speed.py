"""What makes a step faster, as far as it can be seen without a GPU."""

from __future__ import annotations

import warnings

import pytest

from ellzero.experiments.train.stepping.faster import meant_in_float32

ADVICE = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. "
    "Consider setting `torch.set_float32_matmul_precision('high')` for better performance."
)


def test_the_advice_to_round_is_silenced_and_nothing_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with meant_in_float32():
            warnings.warn(ADVICE, UserWarning, stacklevel=1)
            with pytest.raises(UserWarning, match="something else"):
                warnings.warn("something else about TensorFloat32", UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="TensorFloat32"):
            warnings.warn(ADVICE, UserWarning, stacklevel=1)
