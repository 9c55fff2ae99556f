from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fasttrain.config.yaml_file import YamlFile, read_yaml
from fasttrain.model.errors import FasttrainError

Refused = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def refused() -> Refused:
    """Check that a block ends in the error of a slug, whose text holds the given words."""

    @contextmanager
    def check(slug: str, *words: str, code: int = 78) -> Iterator[None]:
        with pytest.raises(FasttrainError) as caught:
            yield
        error = caught.value
        assert (error.slug, int(error.exit_code)) == (slug, code), str(error)
        assert [word for word in words if word not in str(error)] == [], str(error)

    return check


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str | bytes], YamlFile]:
    """Read a configuration file of the given content, called fasttrain.yaml."""

    def read(content: str | bytes) -> YamlFile:
        path = tmp_path / "fasttrain.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_yaml(path, name="fasttrain.yaml")

    return read
