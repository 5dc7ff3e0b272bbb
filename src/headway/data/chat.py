"""Chats as text: rendered by the model's own template, with the places that the assistant wrote itself.

A template may render a turn differently once others follow: many leave out what the assistant thought before earlier
answers. A chat then has several views, one for each way in which its beginning is shown to the model, and every answer
is learnt in the view that the model has when it is asked for that answer.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from headway.data.chat_settings import TEMPLATE_FILE, rendering_arguments
from headway.data.samples import Chat, Message, Origin, Part, TextPart, unusable
from headway.data.stops import SpecialTokens, Stops, find_stops
from headway.data.template_bounds import MAX_SOURCE, Rendering, TemplateFailure, render_template
from headway.data.template_prefixes import Beginnings, render_beginnings
from headway.errors import CheckpointError, ConfigError

Span = tuple[int, int]
"""First and one past the last character."""

_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MOST_TURNS = 1_000_000  # turns that are rendered for one chat, in all runs of the template together: 10 s
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys by which templates read a model's reasoning
_Turns = list[dict[str, Any]]
_Rendered = Callable[[int, bool], Rendering]  # a chat's beginning, by its messages and whether an answer is opened


class View(NamedTuple):
    """A chat as the model sees it when it is asked for one or more of its answers.

    Attributes:
        messages: how many of the chat's messages it shows.
        text: these messages as the template renders them.
        spans: what the assistant wrote and learns here, each answer up to the token that ends it [characters].
    """

    messages: int
    text: str
    spans: list[Span]


class ChatTemplate:
    """A model's chat template.

    A model without one can still learn documents; it is chats that are then refused.

    Args:
        processor: the model's processor or tokenizer.
        as_parts: whether messages are handed over as parts, media among them, or as strings.
        processed: gives a prompt with what the model's processor adds to it; None where that is nothing.

    Attributes:
        sources: the template's text by its name: "default", and "tool_use" where chats with tools have their own.
    """

    def __init__(
        self,
        processor: Any,
        as_parts: bool,
        *,
        processed: Callable[[str], str] | None = None,
    ) -> None:
        self._as_parts, self._processed = as_parts, processed
        tokenizer = getattr(processor, "tokenizer", processor)
        template = getattr(processor, "chat_template", None) or tokenizer.chat_template or {}
        self.sources: dict[str, str] = template if isinstance(template, dict) else {"default": template}
        self._tokenizer_name = str(tokenizer.name_or_path)
        longest = max(map(len, self.sources.values()), default=0)
        if longest > MAX_SOURCE:
            raise CheckpointError(
                f"The chat template in {self._tokenizer_name} has {longest:,} characters; at most {MAX_SOURCE:,} are "
                f"allowed. Give another with {TEMPLATE_FILE}."
            )
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self._special = SpecialTokens.of(tokenizer)
        self._stops: dict[str, Stops] = {}

    def prompt(self, sample: Chat) -> str:
        """A chat as text, opened for the assistant to answer, as the template writes it.

        Raises:
            ConfigError: there is no chat template.
            DataError: the template refuses the chat.
        """
        return self._render(self._turns(sample.messages), sample, opened=True)

    def processed_prompt(self, sample: Chat) -> str:
        """A chat opened for an answer as `prompt`, with the words that the model's processor adds to it."""
        prompt = self.prompt(sample)
        return prompt if self._processed is None else self._processed(prompt)

    def views(self, sample: Chat) -> list[View]:
        """The texts in which the chat's answers are learnt, and where the assistant's own words stand in them.

        Each answer is taken from the chat up to it, as the model would have been asked for it. Where a longer view
        begins with the same text, the answer is learnt there, so that most templates give a single view. Turns that
        are marked as not to be learnt are shown in it. What follows the last answer that is learnt is left out.

        Raises:
            ConfigError: there is no chat template, or no token ends an answer.
            DataError: the template refuses the chat, or leaves words, thoughts or tool calls out.
        """
        turns = self._turns(sample.messages)
        views: list[View] = []
        rendered = self._beginnings(turns, sample)
        # Each answer is rendered with all turns before it.
        for number in reversed(sample.answers):
            text, spans = self._answer(turns, number, sample, rendered)
            if views and views[-1].text.startswith(text[: spans[-1][1]]):
                views[-1].spans[:0] = spans
                continue
            _check_nothing_is_left_out(text, sample.messages[: number + 1], sample)
            views.append(View(number + 1, text, spans))
        return views[::-1]

    def stops(self, has_tools: bool = False) -> Stops:
        """The tokens that end an answer, as the template writes them.

        Args:
            has_tools: whether of chats that offer tools, which may have a template of their own.

        Raises:
            ConfigError: there is no chat template.
        """
        name = self._name(has_tools)
        if name not in self._stops:
            self._stops[name] = find_stops(self._trial, self._special, has_tools or len(self.sources) == 1)
        return self._stops[name]

    def stop_ids(self) -> set[int]:
        """Ids of all tokens that end an answer; none without a template."""
        by_template = [self.stops(has_tools) for has_tools in (False, True)] if self.sources else []
        return {self._special.ids[token] for stops in by_template for token in stops.tokens}

    def _beginnings(self, turns: _Turns, sample: Chat) -> "_Rendered":
        """Renderings of a chat's beginnings, by their messages and whether an answer is opened behind them.

        One run of the template gives the longest that is asked for, and those before it of which that is proven.
        """
        source, variables = self.sources[self._name(bool(sample.tools))], self._variables(sample)
        lengths = {number + shown for number in sample.answers for shown in (0, 1)}
        beginnings: Beginnings | None = None
        is_followed, num_turns = True, 0

        def rendered(length: int, opened: bool) -> Rendering:
            nonlocal beginnings, is_followed, num_turns
            rendering = beginnings.get(length, opened) if beginnings is not None else None
            num_turns += length if rendering is None else 0
            if num_turns > MOST_TURNS:
                raise unusable(
                    sample,
                    f"the chat has {len(sample.answers):,} answers to learn in {len(turns):,} turns, and the model's "
                    "chat template shows the beginning in other ways to many of them. To render it for each takes more "
                    f"than {MOST_TURNS:,} turns. Split the chat, or mark earlier answers as not to be learnt "
                    "(loss: false).",
                )
            if rendering is None and is_followed and not opened:
                with suppress(TemplateFailure):  # a run of its own says why
                    tools = cast(Any, [*sample.tools] or None)
                    beginnings = render_beginnings(turns[:length], source, lengths, tools=tools, variables=variables)
                    rendering = None if beginnings is None else beginnings.get(length, opened)
                is_followed = rendering is not None
            return rendering or self._rendered(turns[:length], sample, add_generation_prompt=opened)

        return rendered

    def _answer(
        self, turns: _Turns, number: int, sample: Chat, rendered: "_Rendered | None" = None
    ) -> tuple[str, list[Span]]:
        """The chat up to one answer, and where that answer stands; it ends with the token that stops generation."""
        chat = turns[: number + 1]
        rendered = rendered or (
            lambda length, opened: self._rendered(turns[:length], sample, add_generation_prompt=opened)
        )
        message = sample.messages[number]
        marks = bool(_MARKS_GENERATION.search(self.sources[self._name(bool(sample.tools))]))
        # The prompt is the chat before the answer, with the words that open the assistant's turn.
        shown, marked = rendered(number + 1, False)
        prompt = rendered(number, True)[0] if number else self._opening(shown, chat, sample)
        # The answer begins where the whole chat and its prompt part.
        start = _shared(shown, prompt)
        before = rendered(number, False)[0] if number and start < len(prompt) else ""
        if start < len(before.rstrip()):  # the turns before look otherwise once this one follows
            shown, moved = self._as_asked(shown, prompt, before, message, sample, number + 1)
            start = len(prompt)
            marked = [(first + moved, last + moved) for first, last in marked]
        elif start < len(prompt):
            # Behind the words that both share the template opens thoughts that this answer does not have; the answer
            # may begin with the letter with which they do.
            start = self._special.around(shown, start)
            for words in (message.reasoning.strip(), message.text.strip()):
                place = shown.rfind(words, max(0, start - len(words) + 1), start + len(words)) if words else -1
                start = place if place >= 0 else start
        _check_answer(shown[start:], message, sample, number + 1)
        # Characters to learn: all from there on, or what the template marks of it.
        spans = [(start, len(shown.rstrip()))]
        if marks:
            spans = _joined([(int(first), int(last)) for first, last in marked if last > start])
            if not spans:
                raise unusable(
                    sample,
                    f"the model's chat template marks nothing of turn {number + 1} with "
                    "{% generation %}. Mark the assistant's words, or give another template with "
                    f"{TEMPLATE_FILE}.",
                )
        # A processor that rewrites prompts (placeholders, say) moves what comes after by what it adds.
        if self._processed is not None:
            full = self._processed(shown[:start])
            shown, moved = full + shown[start:], len(full) - start
            spans = [(first + moved, last + moved) for first, last in spans]
        return self._ended(shown, spans, sample, bool(chat[-1].get("tool_calls")))

    def _as_asked(
        self, shown: str, prompt: str, before: str, message: Message, sample: Chat, number: int
    ) -> tuple[str, int]:
        """Put an answer as the template shows it behind the prompt that asks for it.

        Templates such as Gemma 4's rewrite earlier turns once another answer follows, so that the shown chat does not
        begin with the prompt. The model is trained on the prompt that it will be given.

        Args:
            shown: the chat up to the answer, the answer with it.
            prompt: the chat before the answer, opened for it.
            before: the chat before the answer, not opened.
            message: the answer.
            sample: the chat.
            number: the answer's turn, from 1.

        Returns:
            The prompt with the answer behind it, and how many characters later than in `shown` the answer stands.

        Raises:
            DataError: the answer cannot be told from the turns before it.
        """
        # The answer begins behind the words that open a turn, the same in `prompt` and in `shown`.
        opening = prompt[_shared(prompt, before) :].strip()
        place = shown.rfind(opening) + len(opening) if opening and opening in shown else len(shown)
        words = message.text.strip() or "".join(str(call["function"]["name"]) for call in message.tool_calls[:1])
        # A template that joins turns of one role opens them once: what stands there then begins with the turn before.
        earlier = sample.messages[number - 2].text.strip() or "\0"
        joins = shown.count(earlier, place) > (message.text + message.reasoning).count(earlier)
        if joins or not words or words not in shown[place:]:
            raise unusable(
                sample,
                f"the model's chat template renders the turns before turn {number} differently "
                "when it asks for that turn and when it shows it, so what the assistant wrote cannot be told apart. "
                f"Give another template with {TEMPLATE_FILE}.",
            )
        # White space at the prompt's end is not written twice.
        place += len(shown[place:]) - len(shown[place:].removeprefix(prompt[len(prompt.rstrip()) :]))
        return prompt + shown[place:], len(prompt) - place

    def _ended(self, shown: str, spans: list[Span], sample: Chat, calls: bool) -> tuple[str, list[Span]]:
        """Make the last span end with a token that stops generation: one that is there, or one that is put there."""
        first, last = spans[-1]
        stops = self.stops(bool(sample.tools))
        if stops.unknown is not None:
            raise ConfigError(
                f"The chat template ends answers with {stops.unknown!r}, which is not a token of the tokenizer of "
                f"{self._tokenizer_name!r}, so a model that learns it would not stop there. Use the tokenizer that the "
                "template is made for, or give a template that ends answers with a special token of this one "
                f"({TEMPLATE_FILE})."
            )
        # White space at the end belongs to the template; a stop that is already learnt ends the last span.
        last = max(first, len(shown[:last].rstrip()))
        begin = spans[0][0]  # the stop may lie between words that a template marks one by one
        end = stops.end_in(shown[begin:last], self._special)
        if end is not None:
            spans = [span for span in spans if span[0] < begin + end]
            first, last = spans[-1][0], begin + end
        else:
            # Without a stop, take that of a call or of words: written behind the span, or put there.
            stop = stops.call if calls and stops.call is not None else stops.plain
            if stop is None:
                raise ConfigError(
                    f"The chat template of {self._tokenizer_name!r} ends answers with no token, and the tokenizer has "
                    "no end-of-text token, so a model could not learn to stop. Give a template that ends answers with "
                    f"a special token ({TEMPLATE_FILE}), or the tokenizer an eos_token."
                )
            remainder = shown[last:]
            written = next((token for token in stops.tokens if remainder.lstrip().startswith(token)), None)
            if written is not None:  # behind the words that the template marks
                last += len(remainder) - len(remainder.lstrip()) + len(written)
            else:
                shown = shown[:last] + stop.before + stop.token
                last = len(shown)
        return shown, [*spans[:-1], (first, last)]

    def _opening(self, text: str, chat: _Turns, sample: Chat) -> str:
        """The template's text before an assistant turn that begins the chat: all up to its generation prompt.

        A template that opens no turn behind an answer shows it up to the answer's words.
        """
        header = self._render(chat[:1], sample, opened=True)[len(text) :]
        if header and header in text:
            return text[: text.find(header) + len(header)]
        words = sample.messages[0].reasoning.strip() or sample.messages[0].text.strip()
        return text[: max(0, text.find(words))] if words else ""

    def _trial(self, turns: Sequence[Message], tools: tuple[dict[str, Any], ...]) -> str:
        return self._render(
            self._turns(turns), Chat(tuple(turns), Origin("", "the chat template", 0, "a trial"), tools)
        )

    def _render(self, chat: _Turns, sample: Chat, opened: bool = False) -> str:
        return self._rendered(chat, sample, add_generation_prompt=opened)[0]

    def _rendered(self, chat: _Turns, sample: Chat, **options: Any) -> tuple[str, Any]:
        """Run the template: the one place where it runs."""
        source, tools = self.sources[self._name(bool(sample.tools))], cast(Any, [*sample.tools] or None)
        try:
            return render_template(chat, source, tools=tools, variables=self._variables(sample), **options)
        except TemplateFailure as error:  # templates raise whatever they like
            if (texts := _with_arguments_as_text(chat)) != chat:  # DeepSeek-V3's puts the arguments' JSON together
                return self._rendered(texts, sample, **options)
            raise unusable(
                sample,
                f"the model's chat template refuses this chat: {error}. Check the order of the "
                "roles, and whether the model takes system messages and tools.",
            ) from error

    def _variables(self, sample: Chat) -> dict[str, Any]:
        """The variables with which the template is run for a chat."""
        if arguments := sorted(rendering_arguments() & sample.template_kwargs.keys()):
            raise unusable(
                sample,
                f'"chat_template_kwargs" sets {", ".join(arguments)}, which rendering itself decides: it is an '
                "argument of apply_chat_template and no variable of the template. Remove it from the row.",
            )
        return {**self._special_tokens, **sample.template_kwargs}

    def _name(self, has_tools: bool) -> str:
        name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ConfigError(
                f"The tokenizer of {self._tokenizer_name!r} has no chat template, so chats cannot become tokens. Use "
                f"the instruction-tuned model's tokenizer, or give a template's file with {TEMPLATE_FILE}."
            )
        return name

    def _turns(self, messages: Sequence[Message]) -> _Turns:
        turns: _Turns = []
        for message in messages:
            content: Any = [_part(part) for part in message.parts] if self._as_parts else message.text
            turn = {"role": message.role, "content": content}
            if message.reasoning:
                turn |= dict.fromkeys(_REASONING_KEYS, message.reasoning)
            if message.tool_calls:
                turn["tool_calls"] = list(message.tool_calls)
            if message.name is not None:
                turn["name"] = message.name
            turns.append(turn)
        return turns


def _shared(text: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    shared, most = 0, min(len(text), len(other))
    # Halving compares whole pieces at once, where a walk along both texts would look at each character.
    while shared < most:
        end = (shared + most + 1) // 2
        shared, most = (end, most) if text.startswith(other[shared:end], shared) else (shared, end - 1)
    return shared


def _joined(spans: list[Span]) -> list[Span]:
    """Spans of which none begins where another one ends."""
    joined: list[Span] = []
    for first, last in spans:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def stop_ids_of(processor: Any) -> set[int]:
    """Ids of the tokens that end an answer, by a model's chat template; none without one."""
    return ChatTemplate(processor, not isinstance(processor, PreTrainedTokenizerBase)).stop_ids()


def _with_arguments_as_text(chat: _Turns) -> _Turns:
    """The chat with the arguments of tool calls as JSON, as some templates read them."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        turn | {"tool_calls": [as_text(call) for call in turn.get("tool_calls", ())]} if "tool_calls" in turn else turn
        for turn in chat
    ]


def _check_answer(answer: str, message: Message, sample: Chat, number: int) -> None:
    """Make sure that an answer is learnt with its thoughts and tool calls, which many templates pass over."""
    within = message.text.rpartition("</think>")[0]
    thoughts = [text.replace("<think>", "").strip().splitlines() for text in (message.reasoning, within)]
    expected = [("what the assistant thinks in", lines[-1].strip()) for lines in thoughts if lines]
    expected += [("a tool call of", str(call["function"]["name"])) for call in message.tool_calls]
    for what, words in expected:
        if words not in answer:
            raise unusable(
                sample,
                f"the model's chat template leaves out {what} turn {number}, {words[:60]!r}. Give a "
                f"template that renders it with {TEMPLATE_FILE} (many models have one for tools), write it into "
                '"content" as the model does, or delete the sample.',
            )


def _check_nothing_is_left_out(text: str, messages: Sequence[Message], sample: Chat) -> None:
    """Refuse a chat whose words the template leaves out: a template passes over parts that it does not know.

    Of what is said the last line is looked for: templates may trim it, and rewrite the thoughts before an answer.
    """
    for number, message in enumerate(messages, start=1):
        texts = [part.text for part in message.parts if isinstance(part, TextPart) and part.text.strip()]
        last = texts[-1].strip().splitlines()[-1] if texts and message.role in ("user", "assistant") else ""
        last = last.rsplit("</think>", 1)[-1].strip()
        if last not in text:
            raise unusable(
                sample,
                f"the model's chat template leaves out words of turn {number}, {last[:60]!r}. Give a "
                f"template that renders them with {TEMPLATE_FILE}, or delete the sample.",
            )
    for tool in sample.tools:
        name = str(tool.get("function", tool).get("name", ""))
        if name not in text:
            raise unusable(
                sample,
                f"the model's chat template leaves out the tool {name!r} that the chat offers. Use a "
                "template that renders tools, or delete the sample.",
            )


def _part(part: Part) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
