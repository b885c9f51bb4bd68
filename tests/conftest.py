"""What all tests share: a fixed seed, torch's global state left as it was, and no verdict that depends on the clock."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The parent is hypothesis' own choice: random examples at home; the same ones every time where CI is set.
settings.register_profile("ellzero", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("ellzero")


@pytest.fixture(autouse=True)
def _same_torch_every_time() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() is torch.float32, "the test left another default dtype behind"
    assert torch.is_grad_enabled(), "the test left gradients switched off"
