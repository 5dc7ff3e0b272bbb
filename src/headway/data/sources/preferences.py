"""Rows of preferences: which columns hold the answers, which answer is the best, and the chat row that each makes.

Such a row is read as several rows of chats, one for each answer, that begin alike. So media, system prompts, tools and
histories are read as chats have them, and a new layout is a row of `LAYOUTS`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from headway.data.samples import Chat, MediaPart, Message, Preference, TextPart, unlearnt
from headway.data.sources.json_rows import shortened, words_of
from headway.data.sources.messages import rounds_as_turns, speaks_as, turns_of
from headway.data.sources.ranked import Row, columns_of_marks, is_ranked, num_left_out, number_of, ranked_answers
from headway.data.sources.references import KINDS
from headway.errors import DataError

_TURNS = ("messages", "conversations")  # columns of turns
_PROMPTS = {"prompt": "completion", "question": "answer", "instruction": "output"}
"""Columns of a prompt in words, and the columns of its answer in rows of chats."""
_OTHER_PROMPTS = {
    "query": "question", "input": "question", "conversation": "conversations", "context": "prompt", "history": "prompt",
}  # fmt: skip
_PATHS = {"img_path": "image"}  # VLFeedback's
_REJECTED = "rejected_"
_SCORES = ("score_chosen", "score_rejected")
_MARKS = {
    "preference": (1, 2),
    "better_response_id": (0, 1),
    "overall_preference": (-1, 1),
    "labels": (1, 0),
    "winner": ("model_a", "model_b"),
}
"""Columns that say which of two answers is better: what the first is marked by, and what the second."""
_BY_SIGN = ("overall_preference",)  # how far the answers differ is no part of any loss

_LAST_SPACE = re.compile(r"\s\S*\Z")
_SPEECH = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


@dataclass(frozen=True)
class Layout:
    """One way to lay out preferences.

    Attributes:
        schema: its name among the schemas.
        columns: those that a row must have.
        rows: makes the rows of chats, the best answer's first, of a row's columns and the names above.
        fits: whether the columns hold what the layout says, where their names are those of other data as well.
    """

    schema: str
    columns: tuple[str, ...]
    rows: Callable[[Row, tuple[str, ...]], list[Row]]
    fits: Callable[[Mapping[str, Any], str], bool] = lambda _fields, _column: True

    def is_of(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row is laid out so."""
        present = all(fields.get(column) not in (None, [], {}) for column in self.columns)
        return present and self.fits(fields, self.columns[0])


def _pair(fields: Row, columns: tuple[str, ...]) -> list[Row]:
    """A chosen and a rejected answer."""
    scores = [number_of(fields.get(name)) for name in _SCORES]
    if None not in scores and scores[0] < scores[1]:  # type: ignore[operator]
        raise DataError(
            f'the row contradicts itself: "score_chosen" is {scores[0]:g} and "score_rejected" is {scores[1]:g}. '
            "Leave it out, or swap the answers."
        )
    return _rows(_without(fields, *columns), [fields[column] for column in columns])


def _pair_in_text(fields: Row, columns: tuple[str, ...]) -> list[Row]:
    """Question, chosen and rejected answer within the column of words."""
    content = _in_text(fields, columns[0])
    return _pair(_without(fields, *columns) | content, ("chosen", "rejected"))


def _in_text(fields: Mapping[str, Any], column: str) -> Row:
    words = fields[column]
    if isinstance(words, str):
        if '"rejected"' not in words or not words.lstrip().startswith("{"):
            return {}
        try:
            words = json.loads(words)
        except (ValueError, RecursionError):
            return {}
    is_pair = isinstance(words, dict) and {"question", "chosen", "rejected"} <= words.keys()
    return {name: words[name] for name in ("question", "chosen", "rejected")} if is_pair else {}


def _numbered(fields: Row, columns: tuple[str, ...]) -> list[Row]:
    """Two answers side by side and a mark of the better one; an answer that ends the turns before is replaced."""
    first, second, column = columns
    marks, mark = _MARKS[column], fields[column]
    if not isinstance(marks[0], str):
        mark = number_of(mark)
    if column in _BY_SIGN and mark is not None:
        mark = (mark > 0) - (mark < 0)
    if mark not in marks:
        names = "its sign names" if column in _BY_SIGN else "it names"
        raise DataError(
            f'"{column}" is {shortened(fields[column])}, but {names} the better answer: {marks[0]} for {first}, '
            f"{marks[1]} for {second}. Leave rows out that prefer none."
        )
    answers = [_own_words(fields[name]) for name in (first, second)]
    best_first = answers if mark == marks[0] else answers[::-1]
    return _rows(_without(fields, *columns), best_first, replaces=True)


def _rejected(fields: Row, _columns: tuple[str, ...]) -> list[Row]:
    """A row of a chat, and beside it what is other in the rejected one: its answer, all its turns, or its media.

    Source: ms-swift 4.3, `TemplateInputs.from_dict`: what is not given is the chosen chat's, and an answer takes the
    place of all behind the last turn of the user.
    """
    chosen = {name: value for name, value in fields.items() if not name.startswith(_REJECTED)}
    others = {name.removeprefix(_REJECTED): value for name, value in fields.items() if name.startswith(_REJECTED)}
    if others.get("tools", chosen.get("tools")) != chosen.get("tools"):
        raise DataError(
            '"rejected_tools" are others than "tools", but both answers are of one prompt. Give both the same.'
        )
    # Of a chat the better answer is what stands behind the last question.
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


def _ranked(fields: Row, columns: tuple[str, ...]) -> list[Row]:
    """A list of answers with ranks or ratings."""
    answers = ranked_answers(fields, columns[0])
    base = _without(fields, *columns, *columns_of_marks(fields))
    for name, own in _PATHS.items():
        if name in base and own not in base:
            base[own] = base.pop(name)
    return _rows(base, answers)


LAYOUTS = (
    Layout("pair", ("chosen", "rejected"), _pair),  # TRL, LLaMA-Factory, axolotl, RLAIF-V, HH-RLHF, UltraFeedback
    Layout("pair", ("chosen_response", "rejected_response"), _pair),  # axolotl's Argilla
    Layout("pair", ("response_j", "response_k"), _pair),  # stack-exchange-paired
    Layout("pair", ("text",), _pair_in_text, lambda fields, column: bool(_in_text(fields, column))),  # RLHF-V
    Layout("rejected", ("rejected_response",), _rejected),  # ms-swift
    Layout("rejected", ("rejected_messages",), _rejected),
    *(Layout("rejected", (f"{_REJECTED}{kind}s",), _rejected) for kind in KINDS),
    Layout("numbered", ("output_1", "output_2", "preference"), _numbered),  # LLaVA-RLHF, AlpacaFarm
    Layout("numbered", ("response_0", "response_1", "better_response_id"), _numbered),  # PKU-SafeRLHF
    Layout("numbered", ("response1", "response2", "overall_preference"), _numbered),  # HelpSteer3
    Layout("numbered", ("human_ref_A", "human_ref_B", "labels"), _numbered),  # SHP
    Layout("numbered", ("conversation_a", "conversation_b", "winner"), _numbered),  # Chatbot Arena
    Layout("numbered", ("response_a", "response_b", "winner"), _numbered),
    Layout("ranked", ("completions",), _ranked, is_ranked),  # VLFeedback, UltraFeedback
    Layout("ranked", ("answers",), _ranked, is_ranked),  # Nectar
    Layout("ranked", ("responses",), _ranked, is_ranked),
)
"""Layouts of preferences, in the order in which they are tried.

Source: TRL 1.16, dataset_formats; LLaMA-Factory at ff6d4d12e, data/README.md and data/converter.py; ms-swift at
3602360a5, Custom-dataset.md; axolotl at 067b021c8, rlhf.qmd and prompt_strategies; LLaVA-RLHF at 830a083,
data_utils_rm.py; RLHF-V's, RLAIF-V's, VLFeedback's, Nectar's, HelpSteer3's, SHP's and Chatbot Arena's dataset cards;
TRL's example stack_llama, which prefers `response_j`; VLFeedback at de0bff3, run_dpo.py, which takes the mean of an
answer's ratings and leaves ties out, as here.
"""

SCHEMAS = {layout.schema: layout.columns for layout in reversed(LAYOUTS)}
"""Names of the layouts, and the columns that each is known by."""

COLUMNS = tuple(dict.fromkeys(column for layout in LAYOUTS for column in layout.columns if column != "text"))
"""Columns that hold answers and say which is better."""


def is_preference(fields: Mapping[str, Any]) -> bool:
    """Whether a row is laid out as one of preferences."""
    return _layout_of(fields) is not None


def read_columns(fields: Mapping[str, Any]) -> set[str]:
    """Columns that are read of a row of preferences; none of another row."""
    layout = _layout_of(fields)
    if layout is None:
        return set()
    names = {*layout.columns, *_SCORES, *(name for name in fields if name.startswith(_REJECTED))}
    if prompt := _other_prompt(_without(fields, *layout.columns)):
        names.add(prompt)
    if layout.schema == "ranked":
        names |= {*_PATHS, *columns_of_marks(fields)}
    return names


def num_ties(fields: Mapping[str, Any]) -> int:
    """How many answers of a row are left out, since they are no worse than the best or not rated."""
    layout = _layout_of(fields)
    return num_left_out(fields, layout.columns[0]) if layout is not None and layout.schema == "ranked" else 0


def _layout_of(fields: Mapping[str, Any]) -> Layout | None:
    return next((layout for layout in LAYOUTS if layout.is_of(fields)), None)


def _other_prompt(fields: Mapping[str, Any]) -> str | None:
    """The column that holds the prompt under another name, where none has its own."""
    return next((name for name in _OTHER_PROMPTS if name in fields and not {*_TURNS, *_PROMPTS} & fields.keys()), None)


def _without(fields: Mapping[str, Any], *names: str) -> Row:
    return {name: value for name, value in fields.items() if name not in names}


def _rows(base: Row, answers: Sequence[Any], *, replaces: bool = False) -> list[Row]:
    """A chat's row for each answer.

    Args:
        base: the row's other columns, the prompt among them.
        answers: words, a turn, turns, or a whole chat each.
        replaces: whether an answer takes the place of one that ends the turns before it.
    """
    if column := _other_prompt(base):
        base = _without(base, column) | {_OTHER_PROMPTS[column]: base[column]}
    prompt = next((name for name in (*_TURNS, *_PROMPTS) if name in base), None)
    contents = [_parsed(answer) for answer in answers]
    if prompt is None and all(isinstance(content, str) for content in contents):
        contents = [_dialogue(content) or content for content in contents]
    # Whole chats: their common beginning is the prompt, whatever other columns repeat of it.
    are_chats = [
        isinstance(content, list) and bool(content) and speaks_as(content[0]) != "assistant" for content in contents
    ]
    if all(are_chats):
        _check_beginning(base.get("prompt"), contents)
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


def _check_beginning(prompt: Any, chats: Sequence[list[Any]]) -> None:
    """Refuse whole chats that do not begin with the turns that are their prompt."""
    turns = _parsed(prompt)
    if isinstance(turns, list) and any(chat[: len(turns)] != turns for chat in chats):
        raise DataError(
            f'an answer begins with a turn of its own that is not of "prompt", {shortened(prompt)}. Begin answers with '
            "the assistant's turn, or leave the prompt out."
        )


def _cut(answers: Sequence[Any]) -> list[Row]:
    """Prompt and answers of texts that begin alike, cut at the last space of what they share, as TRL cuts them."""
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError(
            f"the answers are {shortened(answers[0])} and the like, and the row has no prompt: none of the columns "
            f"{', '.join((*_TURNS, *_PROMPTS))}. Name the one that it is with columns, such as {{prompt: Frage}}."
        )
    shared = min(_num_shared(answers[0], answer) for answer in answers[1:])
    last_space = _LAST_SPACE.search(answers[0][:shared])
    space = last_space.start() if last_space else 0
    if not answers[0][:space].strip():
        raise DataError(
            f"the answers {shortened(answers[0])} and {shortened(answers[1])} do not begin alike, and the row has no "
            "prompt. Give it in a column of its own."
        )
    return [{"prompt": answer[:space], "completion": answer[space:]} for answer in answers]


def _num_shared(first: str, second: str) -> int:
    """How many characters two texts begin with alike; halved, as a loop over characters would take seconds."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
        try:
            content = json.loads(value)
        except (ValueError, RecursionError):
            return value
        turns = content if isinstance(content, list) else [content]
        is_turns = bool(turns) and all(isinstance(turn, dict) and speaks_as(turn) is not None for turn in turns)
        return content if is_turns else value
    return words_of(value) if words_of(value) is not None else value


def _turns(fields: Mapping[str, Any], column: str) -> list[Any]:
    value = fields[column]
    if isinstance(value, str) and not value.lstrip().startswith("["):  # axolotl: a question alone
        return [{"role": "user", "content": value}]
    turns = rounds_as_turns(turns_of(value, column))
    return turns[0] if len(turns) == 1 and isinstance(turns[0], list) else turns  # LLaVA-RLHF: a list in a list


def _own_words(answer: Any) -> Any:
    """Words of an answer whose speaker is a model's name, as LLaVA-RLHF has it; any other as it is."""
    return answer["value"] if isinstance(answer, dict) and "value" in answer else answer


def _said(answer: Any) -> str | None:
    """Words of an answer that is words or a single turn of them; None of any other."""
    turn = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    return words_of(turn.get("content", turn.get("value")) if isinstance(turn, dict) else turn)


def _styled(answer: Any, prompt: Any) -> Any:
    """An answer's turns with the keys that the prompt's turns have."""
    first = prompt[0] if isinstance(prompt, list) and prompt else {}
    if not isinstance(answer, list):
        if not isinstance(prompt, list):
            return answer
        answer = [{"role": "assistant", "content": answer}]
    names = {"role": "from", "content": "value"} if "from" in first else {"from": "role", "value": "content"}
    return [
        {names.get(key, key): value for key, value in turn.items()} if isinstance(turn, dict) else turn
        for turn in answer
    ]


def beginning_as(chat: Chat, others: Sequence[Chat]) -> Chat:
    """A chat whose first turns are those of another, where they are equal: a long prompt is held once."""
    first = others[0].messages if others else ()
    shared = takewhile(lambda turns: turns[0] == turns[1], zip(first, chat.messages, strict=False))
    turns = tuple(turn for turn, _ in shared)
    return replace(chat, messages=turns + chat.messages[len(turns) :])


def preference_of(chats: Sequence[Chat], *, is_explicit: bool) -> Preference:
    """Join the chats of a row's answers, the best first, which must begin alike.

    Args:
        chats: one for each answer.
        is_explicit: whether turns that are not learnt are the prompt, and all behind is the answer.

    Raises:
        DataError: they do not share a prompt, two are the same, or an answer is empty.
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
    # Where what the answers were shown differs in its media alone, each is a whole chat.
    if any(chat.messages[begin].role != "assistant" for chat in chats):
        questions = (chat.messages[: _behind_question(chat.messages)] for chat in chats)
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


def only_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Turns of a chat, of which only those behind the last one of the user are learnt."""
    question_end = _behind_question(messages)
    return unlearnt(messages[:question_end]) + tuple(messages[question_end:])


def _behind_question(messages: Sequence[Message]) -> int:
    return max((place for place, turn in enumerate(messages, 1) if turn.role == "user"), default=0)


def _words(turn: Message) -> tuple[str, str]:
    return turn.role, turn.text.strip()


def _key(turn: Message) -> tuple[Any, ...]:
    """A turn as it is compared with another: spaces around its words do not count, nor does whether it is learnt."""
    parts = tuple(part for part in turn.parts if isinstance(part, MediaPart))
    return turn.role, turn.text.strip(), parts, turn.tool_calls, turn.name, turn.reasoning


def _is_said(turn: Message) -> bool:
    parts = any(not isinstance(part, TextPart) or part.text.strip() for part in turn.parts)
    return bool(parts or turn.tool_calls or turn.reasoning)
