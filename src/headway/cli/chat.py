"""`headway chat`: a conversation with a model in a terminal, or with the lines of a pipe."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import opened
from headway.cli.options import ChatTemplateOption, spread
from headway.cli.output import needs_extra, say
from headway.errors import ConfigError, DataError
from headway.report import printable

if TYPE_CHECKING:
    from headway.answer.generate import AnswerGenerator, Decoding
    from headway.data import Message, Sample

HELP = (
    "/image FILE, /video FILE, /audio FILE  show it with the next question\n"
    "/system TEXT                           what the model is told first; starts anew\n"
    "/new                                   forget the conversation\n"
    "/quit, Ctrl-D                          end; Ctrl-C stops an answer"
)


@spread()
def chat(
    model: opened.ModelArgument,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A picture shown with the first question. Repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told first.")] = None,
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

    Answers appear as they are made. /image FILE shows a picture with the next question, /new forgets the conversation,
    Ctrl-C stops an answer, Ctrl-D ends. From a pipe every line is a question, and answers alone go to stdout.

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
        command, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if command in ("quit", "exit", "bye"):
            return True
        if command in ("image", "video", "audio"):
            self.show(command, rest)
        elif command in ("new", "system"):
            self._system = rest or None if command == "system" else self._system
            self._messages, self._waiting = [], []
        elif command == "help":
            print(HELP, file=sys.stderr)
        else:
            raise DataError(f"There is no command /{command}. Known are /image, /video, /audio, /system, /new, /quit.")
        return False

    def show(self, kind: str, path: str) -> None:
        """Let a file wait for the next question."""
        path = path.strip("'\"")  # as a file manager drops it
        if not Path(path).expanduser().is_file():
            raise DataError(f"There is no {kind} {path!r}. Give the path of a file.")
        self._waiting.append((kind, str(Path(path).expanduser())))

    def say(self, text: str) -> None:
        """Ask, print the answer as it comes, and keep both; a question that fails or is stopped is forgotten."""
        from headway.data import AudioPart, ImagePart, Media, Message, TextPart, VideoPart

        parts: dict[str, Any] = {"image": ImagePart, "video": VideoPart, "audio": AudioPart}
        shown = tuple(parts[kind](Media(path)) for kind, path in self._waiting)
        question = Message("user", (*shown, TextPart(text)))
        self._waiting = []
        asked = self._sample([*self._messages, question])
        streamer = _streamer(self._generator.tokenizer) if self._is_watched else None
        try:
            (answer,) = self._generator.answer([asked], self._decoding, streamer=streamer)
        except KeyboardInterrupt:
            print("\n(stopped; the question is forgotten)", file=sys.stderr)
            return
        if streamer is None:
            print(answer.text, flush=True)
        if not answer.is_whole:
            say(f"(cut after {answer.tokens} tokens; --max-new-tokens allows more)", on_stderr=True)
        self._messages += [question, Message("assistant", (TextPart(answer.text),))]

    def _sample(self, messages: "list[Message]") -> "Sample":
        """The conversation as the model sees it; without a chat template, the last words alone."""
        from headway.data import Chat, Document, Message, Origin, TextPart

        origin = Origin("chat", "the conversation", len(messages), f"turn {len(messages)}")
        if self._generator.has_template:
            head = [Message("system", (TextPart(self._system),))] if self._system else []
            return Chat((*head, *messages), origin)
        chat: Chat = Chat((messages[-1],), origin)
        if self._system or chat.images or chat.videos or chat.audio:
            raise ConfigError("The model has no chat template, so it only continues text: no media, no system message.")
        return Document(chat.messages[0].text, origin)


def _streamer(tokenizer: Any) -> Any:
    """Print words as they are made, with what a terminal would obey shown by its number."""
    from transformers import TextStreamer

    class _Printed(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text), end="\n" if stream_end else "", flush=True)

    return _Printed(tokenizer, skip_prompt=True, skip_special_tokens=True)
