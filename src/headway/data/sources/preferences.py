"""Rows of preferences: which answer is the best, and the chat row that each makes.

Such a row is read as several rows of chats, one for each answer, that begin alike. So media, system prompts, tools and
histories are read as chats have them.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from headway.data.samples import Chat, MediaPart, Message, Preference, TextPart, unlearnt
from headway.data.sources.marks import behind_question, only_answer
from headway.data.sources.messages import as_rows, rounds_as_turns, speaks_as, turns_of, words_of
from headway.data.sources.references import KINDS
from headway.data.sources.text_rows import json_or_words, shortened
from headway.errors import DataError
from headway.words import Argument

Row = dict[str, Any]

MOST_ANSWERS = 64
"""Answers of a row at most: each is read with the whole prompt."""

_WORDS = ("response", "answer", "completion", "text", "content")  # keys of an answer in a ranked list
_RANKS = ("rank", "ranking")  # keys of its place, 1 the best
_RATINGS = ("overall_score", "rating", "score", "reward")  # and of its worth, the higher the better
_ASPECTS = "annotations"

_TURNS = ("messages", "conversations")  # columns of turns
_PROMPTS = {"prompt": "completion", "question": "answer", "instruction": "output"}
"""Columns of a prompt in words, and the columns of its answer in rows of chats."""
_REJECTED = "rejected_"
_SCORES = ("score_chosen", "score_rejected")
_LAST_SPACE = re.compile(r"\s\S*\Z")
_SPEECH = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def _pair(fields: Row, _names: Mapping[str, str], _marks: Sequence[Any]) -> list[Row]:
    """A chosen and a rejected answer; question and answers may stand within the column of words."""
    fields = _without(fields, "pair") | pair_of(fields["pair"]) if "pair" in fields else fields  # type: ignore[operator]
    if request := fields.get("request"):  # OpenAI's, with messages and tools
        fields = _without(fields, "request") | {"prompt": request.get("messages")}
        fields |= {"tools": request["tools"]} if request.get("tools") else {}
    scores = [_number_of(fields.get(name)) for name in _SCORES]
    if None not in scores and scores[0] < scores[1]:  # type: ignore[operator]
        raise DataError(
            f'the row contradicts itself: "score_chosen" is {scores[0]:g} and "score_rejected" is {scores[1]:g}. '
            "Leave it out, or swap the answers."
        )
    return _rows(_without(fields, "chosen", "rejected"), [fields["chosen"], fields["rejected"]])


def _numbered(fields: Row, names: Mapping[str, str], marks: Sequence[Any]) -> list[Row]:
    """Two answers side by side and a mark of the better one; an answer that ends the turns before is replaced."""
    best, other, *sign = marks
    mark = fields["mark"] if isinstance(best, str) else _number_of(fields["mark"])
    if sign and mark is not None:  # no loss uses how far the answers differ
        mark = (mark > 0) - (mark < 0)
    if mark not in (best, other):
        raise DataError(
            f'"{names["mark"]}" is {shortened(fields["mark"])}, but {"its sign" if sign else "it"} names the better '
            f"answer: {best} for {names['first']}, {other} for {names['second']}. Leave rows out that prefer none."
        )
    answers = [fields["first"], fields["second"]]
    # LLaVA-RLHF's speaker is a model's name, so that the words alone are the answer.
    answers = [answer.get("value", answer) if isinstance(answer, dict) else answer for answer in answers]
    best_first = answers if mark == best else answers[::-1]
    return _rows(_without(fields, "first", "second", "mark"), best_first, replaces=True)


def _rejected(fields: Row, _names: Mapping[str, str], _marks: Sequence[Any]) -> list[Row]:
    """A row of a chat, and beside it the rejected parts: another answer, all turns of another chat, or other media.

    Source: ms-swift 4.3, `TemplateInputs.from_dict`: what is not given is the chosen chat's, and an answer takes the
    place of all behind the last turn of the user.
    """
    chosen = {name: value for name, value in fields.items() if not name.startswith(_REJECTED)}
    others = {name.removeprefix(_REJECTED): value for name, value in fields.items() if name.startswith(_REJECTED)}
    if others.get("tools", chosen.get("tools")) != chosen.get("tools"):
        raise DataError(
            '"rejected_tools" are others than "tools", but both answers are of one prompt. Give both the same.'
        )
    # The better answer of a chat stands behind its last question.
    turns = next((column for column in _TURNS if column in chosen), None)
    if turns is not None and "response" in others:
        all_turns = _turns(chosen, turns)
        question_end = max((i for i, turn in enumerate(all_turns, 1) if speaks_as(turn) == "user"), default=0)
        chosen = _without(chosen, turns) | {"prompt": all_turns[:question_end], "completion": all_turns[question_end:]}
    # The rejected row is the chosen one with its own media, and its own turns or answer.
    rejected = dict(chosen)
    for kind in KINDS:
        if others.get(f"{kind}s", others.get(kind)):
            rejected = _without(rejected, kind) | {f"{kind}s": others.get(f"{kind}s", others.get(kind))}
    if "messages" in others:
        return [chosen, _without(rejected, *_TURNS, *_PROMPTS, *_PROMPTS.values()) | {"messages": others["messages"]}]
    if "response" in others:
        answer = _parsed(others["response"])
        column = next((own for name, own in _PROMPTS.items() if name in chosen and own in chosen), None)
        if column is None:
            raise DataError(
                f'"rejected_response" is {shortened(others["response"])}, but the row has no other answer that is '
                "better. Give it as messages with the answer at their end, or beside a prompt as chosen and rejected."
            )
        rejected[column] = _styled([answer] if isinstance(answer, dict) else answer, chosen.get("prompt"))
    return [chosen, rejected]


def _ranked(fields: Row, names: Mapping[str, str], _marks: Sequence[Any]) -> list[Row]:
    """A list of answers with ranks or ratings."""
    return _rows(_without(fields, "answers", *_columns_of_marks(fields)), _ranked_answers(fields, names["answers"]))


_ROWS = {"pair": _pair, "rejected": _rejected, "numbered": _numbered, "ranked": _ranked}


def rows_of_answers(fields: Row, schema: str, names: Mapping[str, str], marks: Sequence[Any]) -> list[Row]:
    """Rows of chats, one for each answer, the best first.

    Args:
        fields: the row's columns by their roles, null ones left out.
        schema: of preferences.
        names: the columns' own names, by their roles.
        marks: values of a mark with which the first answer is better, and the second.
    """
    return _ROWS[schema](fields, names, marks)


def _without(fields: Row, *names: str) -> Row:
    return {name: value for name, value in fields.items() if name not in names}


def _rows(base: Row, answers: Sequence[Any], *, replaces: bool = False) -> list[Row]:
    """A chat's row for each answer, which is words, turns or a chat, and may replace one that ends the turns before."""
    prompt = next((name for name in (*_TURNS, *_PROMPTS) if name in base), None)
    contents = [_parsed(answer) for answer in answers]
    if prompt is None and all(isinstance(content, str) for content in contents):
        contents = [_dialogue(content) or content for content in contents]
    # Whole chats: their common beginning is the prompt, whatever other columns repeat of it.
    are_chats = [
        isinstance(content, list) and bool(content) and speaks_as(content[0]) != "assistant" for content in contents
    ]
    if all(are_chats):
        turns = _parsed(base.get("prompt"))
        if isinstance(turns, list) and any(chat[: len(turns)] != turns for chat in contents):
            raise DataError(
                f'an answer begins with a turn of its own that is not of "prompt", {shortened(base["prompt"])}. Begin '
                "answers with the assistant's turn, or leave the prompt out."
            )
        return [_without(base, *_TURNS, *_PROMPTS) | {"messages": content} for content in contents]
    if any(are_chats):
        raise DataError("one answer is a whole chat and another an answer alone. Write them in one form.")
    if prompt is None:
        return [base | row for row in _cut(contents)]
    return [_answered(base, prompt, content, contents, replaces=replaces) for content in contents]


def _answered(base: Row, prompt: str, answer: Any, answers: Sequence[Any], *, replaces: bool) -> Row:
    """The row of a prompt with one of its answers."""
    if prompt in _TURNS or prompt == "prompt":
        turns = _turns(base, prompt) if prompt in _TURNS else _parsed(base[prompt])
        turns = _dialogue(turns) or turns if isinstance(turns, str) else turns
        if isinstance(turns, list) and len(turns) > 1 and speaks_as(turns[-1]) == "assistant" and _said(turns[-1]):
            if not replaces and _said(turns[-1]) not in [_said(other) for other in answers]:
                raise DataError(
                    f'"{prompt}" ends with an answer, {shortened(_said(turns[-1]))}, and chosen and rejected would be '
                    "second ones. End it with the question."
                )
            turns = turns[:-1]
        if isinstance(turns, list) and not turns:
            raise DataError(f'the list "{prompt}" is empty, so the answers have no prompt. Delete the row or fill it.')
        answer = [answer] if isinstance(answer, dict) else answer
        return _without(base, prompt, "completion") | {"prompt": turns, "completion": _styled(answer, turns)}
    words = _said(answer)
    if words is None:
        raise DataError(
            f'beside "{prompt}" an answer is {shortened(answer)}, but it must be words there. Write the question as '
            "prompt, a list of messages."
        )
    return base | {_PROMPTS[prompt]: words}


def _cut(answers: Sequence[Any]) -> list[Row]:
    """Prompt and answers of texts that begin alike, cut at the last space of the shared beginning, as TRL cuts them."""
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError(
            f"the answers are {shortened(answers[0])} and the like, and the row has no prompt: none of the columns "
            f"{', '.join((*_TURNS, *_PROMPTS))}. Name the one that it is, for example with "
            f"{Argument('columns', {'prompt': 'Frage'})}."
        )
    # Halved, as a loop over characters would take seconds.
    shortest = range(min(map(len, answers)))
    shared = bisect_left(
        shortest, True, key=lambda n: any(answer[: n + 1] != answers[0][: n + 1] for answer in answers)
    )
    last_space = _LAST_SPACE.search(answers[0][:shared])
    space = last_space.start() if last_space else 0
    if not answers[0][:space].strip():
        raise DataError(
            f"the answers {shortened(answers[0])} and {shortened(answers[1])} do not begin alike, and the row has no "
            "prompt. Give it in a column of its own."
        )
    return [{"prompt": answer[:space], "completion": answer[space:]} for answer in answers]


def _dialogue(words: str) -> list[Row] | None:
    """Turns of a dialogue in one text; None for other texts. Source: Anthropic's HH-RLHF, by Human: and Assistant:."""
    pieces = _SPEECH.split(words)
    if len(pieces) < 3 or pieces[0].strip() or pieces[1] != "Human":
        return None
    turns = [
        {"role": role.lower(), "content": content.strip()}
        for role, content in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _parsed(value: Any) -> Any:
    """An answer: words as they are, a number as words, turns also of their JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        content = json_or_words(value)
        turns = content if isinstance(content, list) else [content]
        is_turns = bool(turns) and all(isinstance(turn, dict) and speaks_as(turn) is not None for turn in turns)
        return content if is_turns else value
    words = None if isinstance(value, str) else words_of(value)
    return value if words is None else words


def _turns(fields: Row, column: str) -> list[Any]:
    value = fields[column]
    if isinstance(value, str) and not value.lstrip().startswith("["):  # axolotl: a question alone
        return [{"role": "user", "content": value}]
    turns = rounds_as_turns(turns_of(value, column))
    return turns[0] if len(turns) == 1 and isinstance(turns[0], list) else turns  # LLaVA-RLHF: a list in a list


def _said(answer: Any) -> str | None:
    """Words of an answer that is words or a single turn of them; None for other answers."""
    turn = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    words = turn.get("content", turn.get("value")) if isinstance(turn, dict) else turn
    return words if isinstance(words, str) else words_of(words)


def _styled(answer: Any, prompt: Any) -> Any:
    """An answer's turns with the keys that the prompt's turns have."""
    first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else {}
    if not isinstance(answer, list):
        if not isinstance(prompt, list):
            return answer
        answer = [{"role": "assistant", "content": answer}]
    names = {"role": "from", "content": "value"} if "from" in first else {"from": "role", "value": "content"}
    return [
        {names.get(key, key): value for key, value in turn.items()} if isinstance(turn, dict) else turn
        for turn in answer
    ]


def _columns_of_marks(fields: Row) -> list[str]:
    """Columns of ranks and ratings beside a list of answers that are words."""
    names = (f"{name}{plural}" for name in (*_RANKS, *_RATINGS) for plural in ("s", ""))
    return [name for name in names if isinstance(fields.get(name), list)]


def _ranked_answers(fields: Row, name: str) -> list[str]:
    """The answers of a ranked list, best first, without answers that are no worse than the best.

    Left out are answers without a rating, answers that are as good as the best, and a second answer of the same words.
    """
    items = _items(fields, "answers")
    if len(items) > MOST_ANSWERS:
        raise DataError(f'"{name}" holds {len(items):,} answers, but at most {MOST_ANSWERS} are read. Leave some out.')
    ratings = [(rating, item) for item in items if (rating := _rating(item)) is not None]
    ratings.sort(key=lambda pair: -pair[0])
    answers: dict[str, float] = {}
    for rating, item in ratings:
        words = words_of(next((item[key] for key in _WORDS if key in item), None))
        if words is None:
            raise DataError(f'"{name}" holds {shortened(item)}, whose answer is not words.')
        if not answers or rating < next(iter(answers.values())):
            answers.setdefault(words, rating)
    if len(answers) < 2:
        raise DataError(
            f'"{name}" holds {len(items)} answers, {len(ratings)} of them rated, and none is better than another. '
            "Leave such rows out."
        )
    return list(answers)


def num_left_out(fields: Row) -> int:
    """Number of a list's answers that are not compared; 0 if nothing can be learnt from the list.

    >>> num_left_out({"answers": [{"answer": "a", "rank": 2}, {"answer": "b", "rank": 1}, {"answer": "c", "rank": 1}]})
    1
    """
    try:
        return len(_items(fields, "answers")) - len(_ranked_answers(fields, "answers"))
    except DataError:
        return 0


def _items(fields: Row, column: str) -> list[Row]:
    """Each answer of a list with its marks: of objects, of an object of lists as tables have it, or of lists beside."""
    value = fields[column]
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = json_or_words(value)
    value = as_rows(value) if isinstance(value, dict) else value
    if not isinstance(value, list):
        return []
    if all(isinstance(item, dict) for item in value):
        return value
    marks = next(((name, fields[name]) for name in _columns_of_marks(fields) if len(fields[name]) == len(value)), None)
    if marks is None:
        return []
    name, numbers = marks
    return [{"answer": item, name.removesuffix("s"): mark} for item, mark in zip(value, numbers, strict=True)]


def is_ranked(fields: Row, column: str) -> bool:
    """Tell whether a column holds answers with ranks or ratings."""
    first = next(iter(_items(fields, column)), {})
    marks = {*_RANKS, *_RATINGS, _ASPECTS}
    return any(key in first for key in _WORDS) and bool(marks & first.keys())


def pair_of(words: Any) -> Row | None:
    """Question, chosen and rejected answer of an object within a column of words, or of its JSON; None otherwise."""
    if isinstance(words, str):
        if '"rejected"' not in words or not words.lstrip().startswith("{"):
            return None
        words = json_or_words(words)
    names = ("question", "chosen", "rejected")
    return {name: words[name] for name in names} if isinstance(words, dict) and {*names} <= words.keys() else None


def _rating(answer: Row) -> float | None:
    """The worth of an answer, the higher the better; None without one, such as a judge's N/A."""
    for key in (*_RANKS, *_RATINGS):
        if (number := _number_of(answer.get(key))) is not None:
            return -number if key in _RANKS else number
    aspects = answer.get(_ASPECTS)
    marks = [aspect.get("Rating") for aspect in aspects.values() if isinstance(aspect, dict)] if aspects else []
    numbers = [_number_of(mark) for mark in marks]
    return None if not numbers or None in numbers else math.fsum(filter(None, numbers)) / len(numbers)


def _number_of(value: Any) -> float | None:
    """A number, also of its words; None of anything else."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def beginning_as(chat: Chat, others: Sequence[Chat]) -> Chat:
    """A chat that shares its first turns with another chat, where they are equal: a long prompt is held once."""
    first = others[0].messages if others else ()
    shared = takewhile(lambda turns: turns[0] == turns[1], zip(first, chat.messages, strict=False))
    turns = tuple(turn for turn, _ in shared)
    return replace(chat, messages=turns + chat.messages[len(turns) :])


def preference_of(chats: Sequence[Chat], *, is_explicit: bool) -> Preference:
    """Join the chats of a row's answers, the best first, which must begin alike.

    If the answers are explicit, turns that are not learnt are the prompt, and all behind is the answer.
    """
    turns = {id(turn): turn for chat in chats for turn in chat.messages}
    key_of = {number: _key(turn) for number, turn in turns.items()}  # a turn of several chats once
    keys = [[key_of[id(turn)] for turn in chat.messages] for chat in chats]
    # The prompt is what all begin with, or what the row says; behind it each has a turn of the assistant.
    shortest = min(map(len, keys))
    shared = sum(1 for _ in takewhile(lambda turns: all(turn == turns[0] for turn in turns), zip(*keys, strict=False)))
    begin = min(shared, shortest - 1)
    best = chats[0].messages
    if is_explicit:
        begin = min(begin, next((i for i, turn in enumerate(best) if turn.role == "assistant" and turn.learnt), begin))
    while begin and any(chat.messages[begin].role == "tool" for chat in chats):
        begin -= 1  # answers that call the same tool and are told other results
    if best[0].role == "assistant":
        raise DataError(
            "the answers begin with the assistant, so they have no prompt. Give it as messages before them."
        )
    # Two answers of the same words, to the same media, teach nothing.
    for place, key in enumerate(keys):
        if key in keys[:place]:
            raise DataError(
                f"the answers {keys.index(key) + 1} and {place + 1} are the same, so none is better: "
                f"{shortened(chats[place].messages[-1].text)}. Leave the row out."
            )
    # Prompts of the same words may differ in their media; each answer is then its whole chat.
    if any(chat.messages[begin].role != "assistant" for chat in chats):
        questions = (chat.messages[: behind_question(chat.messages)] for chat in chats)
        if len({tuple(map(_words, turns)) for turns in questions}) > 1:
            words = " and ".join(shortened(chat.messages[begin].text) for chat in chats[:2])
            raise DataError(
                f"the answers do not share their prompt: turn {begin + 1} reads {words}. Answers of one prompt can be "
                "compared; leave the row out."
            )
        begin = 0
    answers = tuple(chat.messages[begin:] if begin else only_answer(chat.messages) for chat in chats)
    for answer in answers:
        spoken = [turn for turn in answer if turn.role == "assistant" and turn.learnt]
        if answer[-1].role != "assistant" or not any(_is_said(turn) for turn in spoken):
            raise DataError("an answer is empty, or ends with a turn that is not the assistant's. Leave the row out.")
    first = chats[0]
    return Preference(unlearnt(best[:begin]), answers, first.origin, first.tools, first.template_kwargs, first.sizes)


def _words(turn: Message) -> tuple[str, str]:
    return turn.role, turn.text.strip()


def _key(turn: Message) -> tuple[Any, ...]:
    """A turn as it is compared with another: spaces around its words do not count, nor does whether it is learnt."""
    parts = tuple(part for part in turn.parts if isinstance(part, MediaPart))
    return turn.role, turn.text.strip(), parts, turn.tool_calls, turn.name, turn.reasoning


def _is_said(turn: Message) -> bool:
    parts = any(not isinstance(part, TextPart) or part.text.strip() for part in turn.parts)
    return bool(parts or turn.tool_calls or turn.reasoning)
