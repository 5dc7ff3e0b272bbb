"""Columns as people and other tools name them: other letters, paths of media, contexts, OpenAI's pairs."""

from collections.abc import Collection, Mapping
from typing import Any

from headway.data.sources.preferences import is_preference
from headway.data.sources.references import KINDS, kind_of

MEDIA_PATHS = (
    *(f"{kind}_{part}" for kind in KINDS for part in ("path", "file", "name", "url")),
    *(f"img{part}" for part in ("", "_path", "_file", "_name")),
)
"""Columns that name a file of pictures, videos or sounds, where a row has no column of media."""
FILE_NAMES = ("file_name", "filename", "file_path", "filepath", "file", "path")
"""Columns that do so where nothing else could be learnt of; elsewhere they are notes on where words are from."""
_MEDIA = {*KINDS, *(f"{kind}s" for kind in KINDS)}
_TURNS = ("messages", "conversations", "conversation", "texts")
_PROMPTS = ("question", "query", "instruction", "prompt")
_ASKS = {"instruction": ("output", "response", "completion"), "question": ("answer", "response")}


def with_known_letters(fields: Mapping[str, Any], columns: Collection[str], *, is_readable: bool) -> Mapping[str, Any]:
    """A row's columns, renamed to the names that schemas read where only capitals or spaces differ.

    Args:
        fields: the row's columns.
        columns: names that schemas read.
        is_readable: whether the row has a schema as it is; then columns of media alone are taken up.

    >>> with_known_letters({"Question": "1 + 1?", "Answer ": "2"}, ("question", "answer"), is_readable=False)
    {'question': '1 + 1?', 'answer': '2'}
    """
    names: dict[str, str] = {}
    for name in fields:
        plain = name.strip().lower().replace(" ", "_")
        is_there = plain in fields or plain in names.values()
        if plain != name and plain in columns and not is_there and (plain in _MEDIA or not is_readable):
            names[name] = plain
    return {names.get(name, name): value for name, value in fields.items()} if names else fields


def with_media_column(fields: Mapping[str, Any], *, names_files: bool) -> Mapping[str, Any]:
    """A row's columns, the one that names a file of media under its kind.

    Args:
        fields: the row's columns.
        names_files: whether a column of `FILE_NAMES` may be it too.

    >>> with_media_column({"filename": "pets/1.png", "label": "cat"}, names_files=True)
    {'image': 'pets/1.png', 'label': 'cat'}
    """
    if _MEDIA & fields.keys():
        return fields
    for column in (*MEDIA_PATHS, *(FILE_NAMES if names_files else ())):
        path = fields.get(column)
        if isinstance(path, str) and "://" not in path and (kind := kind_of(path)) is not None:
            return {kind if name == column else name: value for name, value in fields.items()}
    return fields


def with_context(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row's columns, a context in words before its question or behind its instruction, and its system prompt.

    Source: databricks-dolly-15k's instruction, context and response; SQuAD's context and question; OpenOrca's
    system_prompt.

    >>> with_context({"instruction": "When?", "context": "Since 2000.", "response": "2000"})
    {'instruction': 'When?', 'input': 'Since 2000.', 'output': '2000'}
    """
    if any(column in fields for column in _TURNS):
        return fields
    others = dict(fields)
    has_prompt = any(column in fields for column in _PROMPTS)
    if has_prompt and "system" not in fields and isinstance(fields.get("system_prompt"), str):
        others["system"] = others.pop("system_prompt")
    context = fields.get("context")
    if not isinstance(context, str) or fields.get("input") is not None:
        return others
    for asks, answers in _ASKS.items():
        answer = next((column for column in answers if fields.get(column) is not None), None)
        if fields.get(asks) is not None and (answer is not None or is_preference(fields)):
            del others["context"]
            if not context.strip():
                return others
            question = others.pop(asks)
            shown = (question, context) if asks == "instruction" else (context, question)
            output = {} if answer is None else {"output": others.pop(answer)}
            return others | {"instruction": shown[0], "input": shown[1]} | output
    return others


def with_own_pair(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row's columns, OpenAI's pair of outputs as a chosen and a rejected answer.

    Source: OpenAI's guide on direct preference optimization: input.messages, preferred_output, non_preferred_output.
    """
    shown = fields.get("input")
    if not {"preferred_output", "non_preferred_output"} <= fields.keys() or not isinstance(shown, Mapping):
        return fields
    pair = {
        "prompt": shown.get("messages"),
        "chosen": fields["preferred_output"],
        "rejected": fields["non_preferred_output"],
    }
    tools = {"tools": shown["tools"]} if shown.get("tools") else {}
    replaced = ("input", "preferred_output", "non_preferred_output")
    return {name: value for name, value in fields.items() if name not in replaced} | pair | tools
