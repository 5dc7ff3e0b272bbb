"""`headway chat` and `headway generate`: a model's answers, in a conversation or for prompts."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from headway.cli import opened
from headway.cli.options import ChatTemplateOption, JsonOption, spread
from headway.cli.output import needs_extra, print_result, say
from headway.errors import ConfigError, DataError, UsageError
from headway.files import is_taken, open_output, read_text
from headway.log.working import working
from headway.report import printable

if TYPE_CHECKING:
    from headway.answer.generate import AnswerGenerator, Completion, Decoding
    from headway.data import Chat, Message
    from headway.data.samples import Prompt


HELP = (
    "/image FILE, /video FILE, /audio FILE  show the file with the next question\n"
    "/system TEXT                           set the system message, and start anew\n"
    "/new                                   forget the conversation\n"
    "/quit, Ctrl-D                          end; Ctrl-C stops an answer"
)


@spread()
def chat(
    model: opened.ModelArgument,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A picture shown with the first question. Repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_new_tokens: opened.MaxNewTokensOption = 512,
    temperature: opened.TemperatureOption = 0.0,
    top_p: opened.TopPOption = None,
    top_k: opened.TopKOption = None,
    seed: opened.SeedOption = 0,
    chat_template: ChatTemplateOption = None,
    *,
    opening: opened.OpenOptions,
) -> None:
    """Talk to a model: an export, adapters, a checkpoint, or a run.

    Answers appear as they are made. /image FILE shows a picture with the next question, and /new forgets the
    conversation. Ctrl-C stops an answer, and Ctrl-D ends the program. If stdin is a pipe, every line is a question, and
    only answers go to stdout.

    Example: headway chat runs/mine
    """
    with needs_extra("chatting"):
        from headway.answer.generate import Decoding

    decoding = Decoding(max_new_tokens, temperature, top_p, top_k, seed)
    is_watched = sys.stdin.isatty()
    generator = opened.open_generator(model, opening, chat_template=chat_template)
    if is_watched:
        say(f"{model}: type a question; /help shows what else there is.", on_stderr=True)
    talk = _Talk(generator, decoding, system, is_watched=is_watched)
    for path in image or ():
        talk.show("image", str(path))
    while (line := _asked(is_watched)) is not None:
        try:
            if line.startswith("/"):
                if talk.obey(line):
                    break
            elif line.strip():
                talk.say(line)
        except (DataError, ConfigError) as error:
            if not is_watched:
                raise
            say(f"Error: {error}", on_stderr=True)


def _asked(is_watched: bool) -> str | None:
    """The next line; None at the end of the input, or where Ctrl-C ends a conversation."""
    try:
        if is_watched:
            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)  # the shell's prompt starts on a line of its own
        return None


class _Talk:
    """A conversation so far, and media that wait for its next question."""

    def __init__(
        self, generator: "AnswerGenerator", decoding: "Decoding", system: str | None, *, is_watched: bool
    ) -> None:
        self._generator, self._decoding, self._is_watched = generator, decoding, is_watched
        self._system = system
        self._messages: list[Message] = []
        self._waiting: list[tuple[str, str]] = []

    def obey(self, line: str) -> bool:
        """Follow a command; whether it ends the conversation."""
        command, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        if command in ("quit", "exit", "bye"):
            return True
        if command in ("image", "video", "audio"):
            self.show(command, argument)
        elif command in ("new", "system"):
            self._system = argument or None if command == "system" else self._system
            self._messages, self._waiting = [], []
        elif command == "help":
            print(HELP, file=sys.stderr)
        else:
            raise DataError(f"There is no command /{command}. Known are /image, /video, /audio, /system, /new, /quit.")
        return False

    def show(self, kind: str, path: str) -> None:
        """Let a file wait for the next question."""
        path = path.strip("'\"")  # quotes that a file manager puts around a dropped file
        if not Path(path).expanduser().is_file():
            raise DataError(f"There is no {kind} {path!r}. Give the path of a file.")
        self._waiting.append((kind, str(Path(path).expanduser())))

    def say(self, text: str) -> None:
        """Ask, print the answer as it comes, and keep both; a question that fails or is stopped is forgotten."""
        from headway.data import Media, Message, TextPart
        from headway.data.samples import PARTS

        shown = tuple(PARTS[kind](Media(path)) for kind, path in self._waiting)
        question = Message("user", (*shown, TextPart(text)))
        self._waiting = []
        chat = self._sample([*self._messages, question])
        streamer = _streamer(self._generator.tokenizer) if self._is_watched else None
        try:
            (answer,) = self._generator.answer([chat], self._decoding, streamer=streamer)
        except KeyboardInterrupt:
            print("\n(stopped, and the question is forgotten)", file=sys.stderr)
            return
        if streamer is None:
            print(answer.text, flush=True)
        if not answer.is_whole:
            say(f"(cut after {answer.tokens} tokens. --max-new-tokens allows more)", on_stderr=True)
        self._messages += [question, Message("assistant", (TextPart(answer.text),))]

    def _sample(self, messages: "list[Message]") -> "Prompt":
        """The conversation as the model sees it; without a chat template, the last words alone."""
        from headway.data import Chat, Document, Message, Origin, TextPart

        origin = Origin("chat", "the conversation", len(messages), f"turn {len(messages)}")
        if self._generator.has_template:
            head = [Message("system", (TextPart(self._system),))] if self._system else []
            return Chat((*head, *messages), origin)
        chat: Chat = Chat((messages[-1],), origin)
        if self._system or chat.kinds:
            raise ConfigError(
                "The model has no chat template, so it only continues text, without media and without a system message."
            )
        return Document(chat.messages[0].text, origin)


def _streamer(tokenizer: Any) -> Any:
    """Print words as they are made, with what a terminal would obey shown by its number."""
    from transformers import TextStreamer

    class _Printed(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text), end="\n" if stream_end else "", flush=True)

    return _Printed(tokenizer, skip_prompt=True, skip_special_tokens=True)


Asked = tuple["Prompt", str | None]
"""A prompt, and the answer that the data give to it, if any."""


@spread()
def generate(
    model: opened.ModelArgument,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One question. Give --prompt or --input.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A picture shown with --prompt. Repeatable.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message for conversations without one."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help=(
                "Prompts: a .txt file with one prompt per line, or a dataset as for training, whose last answers are "
                "gold."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of JSON lines, one for each answer. Default: stdout.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue the text itself, without the model's chat template.")
    ] = False,
    max_new_tokens: opened.MaxNewTokensOption = 256,
    temperature: opened.TemperatureOption = 0.0,
    top_p: opened.TopPOption = None,
    top_k: opened.TopKOption = None,
    seed: opened.SeedOption = 0,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Number of prompts that are answered together.")] = 8,
    chat_template: ChatTemplateOption = None,
    *,
    opening: opened.OpenOptions,
    as_json: JsonOption = False,
) -> None:
    """Let a model answer one prompt, or every prompt of a file, with transformers' own generation.

    The answer to --prompt goes to stdout as text. Answers to --input are JSON lines with the prompt, the answer, its
    number of tokens, whether the model ended the answer, and the gold answer if the data have one. A model without a
    chat template continues the text. With --image alone, the picture is the question, as in folders of classes.

    Example: headway generate runs/mine --prompt "What is this?" --image photo.jpg
    """
    if prompt is None and source is None and image:
        prompt = ""  # a model of classes was shown pictures and no words
    if (prompt is None) == (source is None):
        raise UsageError(
            'Give either --prompt TEXT or --input FILE to say what the model is asked, such as --prompt "Hi".'
        )
    if source is not None and (image or as_json):
        option = "--image" if image else "--json"
        raise UsageError(
            f"{option} goes with --prompt, because rows of --input name their own images, and their answers are "
            "JSON lines."
        )
    with needs_extra("generating"):
        if source is not None and Path(source).suffix != ".txt":
            from headway.data.sources import open_source

            open_source(source)  # a typo is told before torch is imported
        from headway.answer.generate import Decoding

    decoding = Decoding(max_new_tokens, temperature, top_p, top_k, seed)
    prompts = [(_prompt(prompt, image or ()), None)] if prompt is not None else read_prompts(source or "")
    if output is not None and is_taken(output):
        raise UsageError(f"--output {output} exists already. Give another file, or delete this one first.")
    if plain and chat_template is not None:
        raise UsageError(
            "--chat-template cannot take effect with --plain, because --plain uses no template. Leave one of them out."
        )
    generator = opened.open_generator(model, opening, chat_template=chat_template)
    if plain or not generator.has_template:
        prompts = [(_as_document(sample, model), gold) for sample, gold in prompts]
    elif system is not None:
        prompts = [(_with_system(sample, system), gold) for sample, gold in prompts]
    with working(f"answering {len(prompts):,} prompts"):
        answers = generator.answer([sample for sample, _ in prompts], decoding, batch=batch)
    if prompt is not None and output is None:
        (answer,) = answers
        record = {"model": model, **_record(*prompts[0], answer, generator)}
        print_result(lambda: record, lambda: answer.text, as_json=as_json)
        return
    with _lines(output) as file:
        for (sample, gold), answer in zip(prompts, answers, strict=True):
            file.write(json.dumps(_record(sample, gold, answer, generator)) + "\n")
            file.flush()
    if output is not None:
        say(f"{output}: {len(prompts)} answers", on_stderr=True)


def read_prompts(source: str) -> "list[Asked]":
    """The prompts of a file, each with the answer that the data give, if they give one.

    Raises:
        DataError: the file is missing or empty, or a row cannot be used.
    """
    from headway.answer.generate import question_of
    from headway.data import Chat, read_samples
    from headway.data.samples import best_answered
    from headway.errors import DataError

    path = Path(source)
    if path.suffix == ".txt":
        try:
            lines = read_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"The prompts in {path} cannot be read: {error}. Give a UTF-8 text file.") from error
        prompts: list[Asked] = [
            (chat_of(line, file=str(path), place=f"line {number}"), None)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not prompts:
            raise DataError(f"{path} holds no prompt. Write one prompt on each line.")
        return prompts
    samples = read_samples(source)
    if not samples:
        raise DataError(f"{source} holds no rows, so there is nothing to answer.")
    texts = map(best_answered, samples)  # the best of several answers is the gold answer
    return [question_of(sample) if isinstance(sample, Chat) else (sample, None) for sample in texts]


def chat_of(text: str, *, file: str = "--prompt", place: str = "as given") -> "Chat":
    """A conversation of one question."""
    from headway.data import Chat, Message, Origin, TextPart

    return Chat((Message("user", (TextPart(text),)),), Origin("prompts", file, 0, place))


def _prompt(text: str, images: "tuple[Path, ...] | list[Path]") -> "Chat":
    from headway.data import Chat, ImagePart, Media, Message, TextPart

    for path in images:
        if not path.is_file():
            raise UsageError(f"There is no image {str(path)!r}. Give the path of a file.")
    pictures = tuple(ImagePart(Media(str(path))) for path in images)
    return Chat((Message("user", (*pictures, TextPart(text))),), chat_of(text).origin)


def _with_system(sample: "Prompt", text: str) -> "Prompt":
    from headway.data import Chat, Message, TextPart

    if not isinstance(sample, Chat) or sample.messages[0].role == "system":
        return sample
    return replace(sample, messages=(Message("system", (TextPart(text),)), *sample.messages))


def _as_document(sample: "Prompt", model: str) -> "Prompt":
    from headway.data import Chat, Document

    if not isinstance(sample, Chat):
        return sample
    if len(sample.messages) > 1 or sample.kinds:
        raise ConfigError(
            f"{sample.where}: a conversation of several turns, or with media, needs a chat template. But the "
            f"tokenizer of {model} has none, or --plain was given. Put a chat_template.jinja into the model's folder."
        )
    return Document(sample.messages[0].text, sample.origin)


def _record(sample: "Prompt", gold: str | None, answer: "Completion", generator: "AnswerGenerator") -> dict[str, Any]:
    from headway.data import Chat

    if isinstance(sample, Chat):
        words = "\n".join(message.text for message in sample.messages)
    else:
        words = sample.content if isinstance(sample.content, str) else generator.tokenizer.decode(sample.content)
    judged = {} if gold is None else {"gold": gold.strip(), "exact": answer.is_whole and answer.text == gold.strip()}
    return {
        "where": sample.where,
        "prompt": words,
        "answer": answer.text,
        **judged,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": answer.tokens,
        "whole": answer.is_whole,
    }


@contextmanager
def _lines(output: Path | None) -> Iterator[TextIO]:
    """The file for JSON lines, or stdout."""
    if output is None:
        yield sys.stdout
        return
    with open_output(output, option="--output") as file:
        yield file
