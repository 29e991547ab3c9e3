"""Reads a YAML file strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: Path) -> Any:
    """What the file holds; None if nothing.

    Raises:
        ValueError: it cannot be read, is no UTF-8 or no YAML, or a key stands twice in one place.
    """
    try:
        return yaml.load(path.read_text("utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's, which would take the last of two lines for one key and ignore the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)
