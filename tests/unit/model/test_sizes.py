from __future__ import annotations

import pytest

from fasttrain.model.errors import size


@pytest.mark.parametrize(
    ("number_bytes", "text"),
    [
        (0, "0 B"),
        (2**26, "64 MiB"),
        (2**30 - 1, "1024 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_sizes(number_bytes: int, text: str) -> None:
    assert size(number_bytes) == text
