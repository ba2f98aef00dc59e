"""How many threads torch uses, for as long as a test runs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """For a test that sets the number itself: afterwards it is what it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads: None) -> None:
    torch.set_num_threads(1)
