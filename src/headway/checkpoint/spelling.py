"""The base model's own spelling of settings, kept beside that of the installed transformers.

`save_pretrained` writes what the installed transformers reads. Another version reads other keys: transformers 5 moves
`rope_theta` into `rope_parameters`, where transformers 4 does not look for it. The base's files had both the keys and
the readers that their users have, so a folder made of a base says again what the base said and training did not change.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from headway.hub import cached_folder
from headway.log.jsonl import as_object

_TOKENIZER_CONFIG, _TOKENIZER = "tokenizer_config.json", "tokenizer.json"
_SPECIAL_TOKENS, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
_ADDED, _NAMED, _EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
# No run changes the vocabulary beneath the added tokens.
_VOCABULARIES = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Keys of transformers 5's one file, by the file that each was before.
_PROCESSOR = "processor_config.json"
_PARTS = {
    "preprocessor_config.json": ("image_processor", "feature_extractor"),
    "video_preprocessor_config.json": ("video_processor",),
}
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_OF_LOADING = ("is_local", "local_files_only")  # transformers 5 writes how it was called
_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def keep_spelling(folder: Path, base: str, config: PreTrainedConfig) -> None:
    """Put the base's own spelling into the files that `save_pretrained` has written.

    Args:
        folder: with the files of the installed transformers; no weights.
        base: the model that training began from: its folder, its config.json or its name on the Hub.
        config: of the model, by whose class a configuration is read.

    Raises:
        OSError: a file cannot be written.
    """
    path = Path(base).expanduser()
    source = path if path.is_dir() else path.parent if path.is_file() else cached_folder(base)
    if source is None:
        return
    respell_config(folder / CONFIG_NAME, path if path.is_file() else source / CONFIG_NAME, type(config))
    _merge(folder / GENERATION_CONFIG_NAME, source / GENERATION_CONFIG_NAME, _read_generation)
    if (folder / _TOKENIZER_CONFIG).is_file() and (source / _TOKENIZER_CONFIG).is_file():
        _keep_tokenizer(folder, source)
    _keep_parts(folder, source)


def respell_config(path: Path, base: Path, kind: type[PreTrainedConfig]) -> None:
    """Add the keys of another configuration, if it is there, that the installed transformers has moved or dropped.

    A key is added only if the installed transformers reads the same with it, so nothing that training changed comes
    back: a quantisation that is gone, say.
    """
    _merge(path, base, lambda raw: kind.from_dict(raw).to_dict())


def _read_generation(raw: dict[str, Any]) -> Any:
    return GenerationConfig.from_dict(raw).to_dict()


def _merge(path: Path, base: Path, reader: Callable[[dict[str, Any]], Any]) -> None:
    written, before = _object(path), _object(base)
    if not written or not before:
        return
    missing = list(_missing(before, written))
    aim, merged = _reading(reader, written), _with(written, missing)
    if _reading(reader, merged) != aim:
        # one after the other, and again those that are read only with another, as a scaling with its theta
        merged, pending, tried = written, missing, -1
        while len(pending) != tried:
            tried, refused = len(pending), []
            for addition in pending:
                with_it = _with(merged, [addition])
                if _reading(reader, with_it) == aim:
                    merged = with_it
                else:
                    refused.append(addition)
            pending = refused
    _write(path, merged)


_Addition = tuple[tuple[str, ...], Any]  # the place of a key, from the outermost in, and its value


def _missing(before: Mapping[str, Any], written: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[_Addition]:
    """Yield what one mapping has and the other lacks, at the places where it had it.

    A configuration that was flat has a section of its own for text since: its keys are also missing there.
    """
    sections = [
        name
        for name, section in written.items()
        if isinstance(section, dict) and name not in before and name.endswith("_config")
    ]
    for key, value in before.items():
        if key.startswith("_"):  # a state of Python's object, not of the model
            continue
        if key in written:
            if isinstance(value, dict) and isinstance(written[key], dict):
                yield from _missing(value, written[key], (*place, key))
            continue
        if key == "torch_dtype":  # the dtype of the weights beside it, which a run may have changed
            value = written.get("dtype", value)  # noqa: PLW2901 - the same key
        yield (*place, key), value
        for section in sections:
            if key not in written[section]:
                yield (*place, section, key), value


def _with(written: Mapping[str, Any], additions: list[_Addition]) -> dict[str, Any]:
    merged: dict[str, Any] = json.loads(json.dumps(written))
    for place, value in additions:
        section = merged
        for name in place[:-1]:
            section = section[name]
        section[place[-1]] = value
    return merged


def _reading(reader: Callable[[dict[str, Any]], Any], raw: Mapping[str, Any]) -> str | None:
    try:
        return json.dumps(reader(json.loads(json.dumps(raw))), sort_keys=True, default=str)
    except Exception:  # noqa: BLE001 - whatever a class raises on a key that it does not expect
        return None


def _keep_tokenizer(folder: Path, source: Path) -> None:
    written, before = _object(folder / _TOKENIZER_CONFIG), _object(source / _TOKENIZER_CONFIG)
    added = [token for token in _object(folder / _TOKENIZER).get("added_tokens", ()) if isinstance(token, dict)]
    for name in _OF_LOADING:
        if name not in before:
            written.pop(name, None)
    # transformers 4 takes a mapping of names here, and the list under the older name
    if isinstance(written.get(_NAMED), list) and not isinstance(before.get(_NAMED), list):
        written[_EXTRA] = written.pop(_NAMED)
    missing = {key: value for key, value in before.items() if key not in written and key != "chat_template"}
    template = folder / "chat_template.jinja"
    if template.is_file() and before.get("chat_template") == template.read_text(encoding="utf-8"):
        missing["chat_template"] = before["chat_template"]
    if _ADDED in missing:  # with the tokens that training has added
        missing[_ADDED] = {str(token["id"]): {name: token.get(name) for name in _TOKEN_FIELDS} for token in added}
    written |= missing
    written["tokenizer_class"] = before.get("tokenizer_class", written.get("tokenizer_class"))
    _write(folder / _TOKENIZER_CONFIG, written)
    if special := _object(source / _SPECIAL_TOKENS):
        now = {key: written.get(key, value) for key, value in special.items()}
        _write(folder / _SPECIAL_TOKENS, {key: value for key, value in now.items() if value is not None})
    if numbers := _object(source / _ADDED_TOKENS):
        numbered = {token["content"]: token["id"] for token in added if token["id"] >= min(numbers.values())}
        _write(folder / _ADDED_TOKENS, numbers | numbered)
    for name in _VOCABULARIES:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)


def _keep_parts(folder: Path, source: Path) -> None:
    """Write the parts of a processor into the files that the base has for them, with what the run has changed."""
    sections = _object(folder / _PROCESSOR)
    for name, parts in _PARTS.items():
        before = _object(source / name)
        now: dict[str, Any] = next((sections[part] for part in parts if part in sections), {})
        if before and not (folder / name).exists():
            edges = now.get("size") or {}
            _write(folder / name, {k: now.get(k, edges.get(_EDGES.get(k), v)) for k, v in before.items()})


def _object(path: Path) -> dict[str, Any]:
    return (as_object(path.read_bytes()) if path.is_file() else None) or {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
