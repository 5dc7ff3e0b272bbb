"""YAML as PyYAML reads it safely, but for a key that stands twice in one mapping, which is a mistake."""

from typing import Any

import yaml


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; PyYAML itself lets the last one win without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # As it is composed, before `<<` lays other mappings into it, whose keys it may well have too.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                places = f"line {line}" if first == line else f"lines {first} and {line}"
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice in one mapping, in {places}, where one of them would "
                    "have no effect; join them, or remove one",
                    problem_mark=key.start_mark,
                )
            lines[key.tag, key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """Read a YAML document as plain types.

    Raises:
        yaml.YAMLError: no YAML, or a key that stands twice in one mapping.

    >>> load_yaml("{a: 1, b: [2]}")
    {'a': 1, 'b': [2]}
    """
    return yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader
