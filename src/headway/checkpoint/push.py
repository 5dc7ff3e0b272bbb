"""Send a model folder to the Hugging Face Hub, by huggingface_hub's own client, its token and its settings.

What can be refused is refused before a model is exported, and what is exported stays where it is, whatever the Hub
says. Only what an export writes is sent, so nothing else that lies in the folder becomes public.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, if not declared

from headway import hub
from headway.errors import HubError, UsageError, first_line
from headway.models.lora import ADAPTER_CONFIG
from headway.words import Argument

_HttpError: type[Exception] = HfHubHTTPError.__bases__[0]  # base of httpx or httpx2, whichever the client is built on
_QUESTION_S, _SENDING_S = 30.0, 600.0  # silence of the Hub after which a question, or a file, is given up [s]
_NUMBERED = r"(-\d{5}-of-\d{5})?"
# Files of an export: the card, weights, settings, tokenizer and processor.
_EXPORTED = re.compile(
    rf"README\.md|(adapter_)?model{_NUMBERED}\.safetensors(\.index\.json)?"
    r"|((generation_|adapter_|processor_|preprocessor_|video_preprocessor_|tokenizer_)?config|tokenizer"
    r"|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|vocab\.txt|merges\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja"
)
_TOKEN = "set HF_TOKEN or run `hf auth login`, with a token from huggingface.co/settings/tokens"


@dataclass(frozen=True)
class HubRepo:
    """A repository for a model, which may be there already.

    Attributes:
        repo_id: OWNER/NAME.
        is_there: whether it is.
    """

    repo_id: str
    is_there: bool


def find_repo(name: str, *, private: bool, update: bool) -> HubRepo:
    """Find out whether a model may be sent to a name, before anything is made or sent.

    Args:
        name: OWNER/NAME, or NAME for the token's own user.
        private: whether a new repository is to be private.
        update: whether one that is there gets another commit.

    Raises:
        UsageError: no such name can be, it is taken, there is none to update, or there is no token.
        HubError: the Hub cannot be reached, or refuses the token.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(
            Argument("push_to_hub", name), f" is no name on the Hub: {error} Write OWNER/NAME, such as me/digits."
        ) from error
    if (obstacle := hub.obstacle_to_hub()) is not None:
        raise HubError(f"the Hub is out of reach: {obstacle}. Nothing was made or sent.")
    if get_token() is None:
        raise UsageError(
            Argument("push_to_hub", name), f" needs a token that may write, but there is no token: {_TOKEN}."
        )
    api = HfApi()
    with _hub_errors(name, "Nothing was made or sent."):
        user: Any = api.whoami()
        if not isinstance(user, dict) or not isinstance(user.get("name"), str):  # a portal's page, or another service
            raise ValueError(f"{hub.endpoint()} answers without an account. HF_ENDPOINT sets the Hub's address")
        if _role(user) == "read":
            raise HubError(f"the token of {user['name']} may only read. Use a token that may write: {_TOKEN}.")
        repo_id = name if "/" in name else f"{user['name']}/{name}"
        is_there = api.repo_exists(repo_id)
    page = f"{hub.endpoint()}/{repo_id}"
    if is_there and not update:
        message = f" is taken: {page} exists already. Give another name, or "
        raise UsageError(
            Argument("push_to_hub", name), message, Argument("update", True), ", which adds a commit to it."
        )
    if not is_there and update:
        raise UsageError(f"there is no repository {repo_id} to update. Leave ", Argument("update", True), " out.")
    if is_there and private:
        advice = f"Leave it out, or change it in the settings of {page}."
        raise UsageError(Argument("private", True), f" has no effect, because {repo_id} exists already. {advice}")
    return HubRepo(repo_id, is_there)


def refuse_local_base(folder: Path) -> None:
    """Refuse adapters whose base model is a folder of this machine, which nobody else has."""
    path = folder / ADAPTER_CONFIG
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") if path.is_file() else None
    if base is not None and (Path(base).exists() or Path(base).is_absolute() or base.count("/") != 1):
        raise UsageError(
            f"the adapters belong to the model {base}, which is a folder of this machine, so others cannot use the "
            "adapters. Merge the adapters into its weights with ",
            Argument("merge_adapters", True),
            ", or set model.path to the base model's name on the Hub and train again.",
        )


def files_to_send(folder: Path) -> tuple[list[str], list[str]]:
    """The files of a model folder that an export writes, and the names of other files, which are not sent.

    Raises:
        UsageError: one of the former is a link, which could lead anywhere, or there are none.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    sent = [name for name in names if _EXPORTED.fullmatch(name)]
    for name in sent:
        if (folder / name).is_symlink() or (folder / name).parent.is_symlink():
            raise UsageError(
                f"{folder} holds a link, {name}, but links are not sent. Replace the link by the file itself."
            )
    if not sent:
        raise UsageError(f"{folder} holds no file of a model.")
    return sent, [name for name in names if name not in sent]


def push(folder: Path, repo: HubRepo, *, private: bool, message: str) -> str:
    """Send the files of a model folder that an export writes, to a repository that is made if it is not there.

    Args:
        folder: of a model or of adapters; it stays.
        repo: from `find_repo`.
        private: whether a new repository is private; else as the Hub's settings of its owner say.
        message: of the commit, or of each where the client sends it in several.

    Returns:
        The page of the repository.

    Raises:
        HubError: the Hub refuses it, or cannot be reached; the message says how to go on.
    """
    api = HfApi()
    sent, _ = files_to_send(folder)
    command = f"headway export {folder} {Argument('push_to_hub', repo.repo_id)}"
    way_on = "The model in {} is complete and stays there. Send the model again with `{}`."
    if not repo.is_there:
        with _hub_errors(repo.repo_id, way_on.format(folder, command)):
            api.create_repo(repo.repo_id, private=True if private else None)
    command = f"{command} {Argument('update', True)}"
    with _hub_errors(repo.repo_id, way_on.format(folder, command), silence_s=_SENDING_S):
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, allow_patterns=sent)
    return f"{hub.endpoint()}/{repo.repo_id}"


def _role(user: dict[str, Any]) -> str:
    token = (user.get("auth") or {}).get("accessToken") or {}
    return str(token.get("role", ""))


@contextmanager
def _hub_errors(name: str, way_on: str, silence_s: float = _QUESTION_S) -> Iterator[None]:
    """Put the client's errors into words, and give up after a silence, because the client never does."""
    session = get_session()
    before, session.timeout = session.timeout, silence_s
    try:
        yield
    except (HfHubHTTPError, _HttpError, OSError, RuntimeError, ValueError) as error:
        cause: BaseException = error  # a client that sends files side by side puts the error of one behind its own
        while not isinstance(cause, _HttpError) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise HubError(f"{_reason(cause, name)} {way_on}") from error
    finally:
        session.timeout = before


def _reason(error: BaseException, name: str) -> str:
    response = getattr(error, "response", None)
    if not isinstance(error, _HttpError):
        return f"the Hub's client could not send {name}: {first_line(error)}."
    if response is None:
        return f"the connection to {hub.endpoint()} broke: {first_line(error)}."
    words = (getattr(error, "server_message", None) or "").strip().rstrip(".")
    message = f" ({words})" if words else ""
    reasons = {
        401: f"the Hub does not know the token{message}. {_TOKEN}.",
        403: f"the token may not write to {name}{message}. Use a name of your own or of your organisation, or "
        f"another token: {_TOKEN}.",
        404: f"the Hub has no {name} that this token may see{message}.",
        409: f"{name} is taken by now{message}.",
    }
    return reasons.get(response.status_code, f"the Hub answered {response.status_code} to {name}{message}.")
