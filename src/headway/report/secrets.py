"""Secrets in texts, settings and addresses, hidden before anybody sees them: in reports, errors and job logs alike.

It goes by names, by the forms of addresses and by how well-known tokens begin (`secrets.toml`): a secret under a name
that tells nothing, or within a path, is shown.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Control characters but tab and line feed, marks that turn the order of letters round, line separators, and halves of
# surrogate pairs, which is what Python makes of file names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HIDDEN = "(hidden)"
_LONGEST_FILE = 1_000_000  # longest file of settings [characters]; PyYAML reads some tens of thousands a second
_LONGEST_TEXT = 10_000  # longest error or value [characters]: the patterns below take the square of some texts
_MOST = 5000  # settings of a file; anchors of YAML may make a few lines endless
# Words of a setting's name that tell a secret, and those that tell one together with "key" or "keys".
_WORDS = frozenset(
    ("token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pass", "pwd", "pat", "credential",
     "credentials", "authorization", "auth", "cookie", "apikey", "accesskey", "sas", "signature")
)  # fmt: skip
_KEYS = frozenset(("api", "access", "account", "private", "shared", "signing", "ssh", "encryption", "license"))
_STORES = ("storage_options", "connection_string", "headers", "env", "environ", "kwargs")  # whatever is in them


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@cache  # read and compiled at the first text, since most commands show none
def _rules(*kinds: str) -> list[tuple[re.Pattern[str], str]]:
    rules = []
    for row in (row for kind in kinds for row in _table()[kind]):
        pattern = row["pattern"]
        for name, part in _table()["parts"].items():
            pattern = pattern.replace(f"<{name}>", part)
        rules.append((re.compile(pattern), row["instead"]))
    return rules


def printable(text: str) -> str:
    r"""Show the characters that a terminal would obey, or that hide a text's words, by their numbers.

    Names of files and values of rows are other people's: they could clear the screen, or show `gpj.exe` as `exe.jpg`.

    >>> print(printable("a\x1b[31mb.png"))
    a\x1b[31mb.png
    """
    return _UNPRINTABLE.sub(_by_number, text)


def _by_number(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def hide_secrets(text: str) -> str:
    """Text of anyone without passwords, tokens, keys and signatures.

    >>> hide_secrets("cannot open https://me:p@ss@host/x.jsonl?X-Amz-Signature=ab/cd, with HF_TOKEN='hush'")
    'cannot open https://(hidden)@host/x.jsonl?X-Amz-Signature=(hidden) with HF_TOKEN=(hidden)'
    """
    return _replaced(text, _rules("secrets"))


def presentable(text: str) -> str:
    r"""Text of anyone for a terminal or a log: nothing that a terminal obeys, and no secret.

    >>> presentable("\x1b[2J s3://key:hush@bucket")
    '\\x1b[2J s3://(hidden)@bucket'
    """
    return printable(hide_secrets(text))


def hide_people(text: str) -> str:
    """Text without secrets, names of home folders and addresses of mail, for anyone's eyes.

    >>> hide_people("/home/me/runs/a")
    '~/runs/a'
    """
    return _replaced(text, _rules("secrets", "people"))


def _replaced(text: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    if len(text) > _LONGEST_TEXT:  # cut between words: half a secret may be in no form that is known
        end = max(text.rfind(space, 0, _LONGEST_TEXT) for space in " \n\t")
        text = f"{text[: end + 1]}... ({len(text):,} characters)"
    for pattern, instead in rules:
        text = pattern.sub(instead, text)
    return text


def without_secrets(text: str, *, longest: int) -> str:
    r"""Settings of a YAML or JSON file without what is not for others.

    Values of settings that name a token, key or password are hidden whole, and all that goes to a store; in other
    values users and signatures of addresses, secrets in commands, and the names of home folders.

    Args:
        text: of the file, whole.
        longest: characters that are shown of what is left.

    >>> print(without_secrets("path: s3://me:pw@host/x?sig=1\nhub_token: abc\ntokens_per_pack: 4096", longest=99))
    path: s3://(hidden)@host/x?sig=(hidden)
    hub_token: (hidden)
    tokens_per_pack: 4096
    """
    import yaml  # takes time that commands without settings need not spend

    is_json = text.lstrip().startswith("{")
    try:
        if len(text) > _LONGEST_FILE:
            raise ValueError("too long")
        settings = json.loads(text) if is_json else yaml.safe_load(text)
        copied = _Shown().of(settings)
    except (ValueError, yaml.YAMLError, RecursionError):
        return "Not shown: it cannot be read as YAML or JSON, or holds too much."
    shown = json.dumps(copied, indent=1) if is_json else yaml.safe_dump(copied, sort_keys=False, allow_unicode=True)
    return shown.strip()[:longest]


class _Shown:
    """Copies settings, with a word in place of each hidden value."""

    def __init__(self) -> None:
        self._left = _MOST

    def of(self, node: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many settings")
        if isinstance(node, Mapping):
            if isinstance(node.get("name"), str) and "value" in node and _is_secret(node["name"]):
                node = {**node, "value": HIDDEN}  # an entry of a list of variables
            return {
                self._text(name): HIDDEN if _is_secret(str(name)) else self.of(value) for name, value in node.items()
            }
        if isinstance(node, list | tuple):
            if len(node) == 2 and isinstance(node[0], str) and node[0].isidentifier() and _is_secret(node[0]):
                return [node[0], HIDDEN]
            return [self._argument(item, before) for item, before in zip(node, ["", *node], strict=False)]
        return self._text(node) if isinstance(node, str) else node if _is_plain(node) else str(node)

    def _argument(self, item: Any, before: Any) -> Any:
        """An item of a list, which may be one of a command: `--token`, then a token, or `a.token=...`."""
        if isinstance(before, str) and before.startswith("-") and "=" not in before and _is_secret(before):
            return HIDDEN
        name, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
        if equals and any(_is_secret(part) for part in name.split(".")):
            return f"{name}={HIDDEN}"
        import yaml

        if equals and value.lstrip().startswith(("{", "[")):
            try:
                return f"{name}={json.dumps(self.of(yaml.safe_load(value)))}"
            except yaml.YAMLError:
                return f"{name}={HIDDEN}"
        return self.of(item)

    @staticmethod
    def _text(value: Any) -> Any:
        if isinstance(value, str):
            value = _replaced(hide_secrets(value), _rules("people"))
        return value if _is_plain(value) else str(value)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _is_secret(name: str) -> bool:
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if re.fullmatch(rf"{_table()['parts']['of_texts']}|token_dtype", plain):
        return False
    words = set(re.split(r"[^a-z0-9]+", plain))
    together = "_".join(re.split(r"[^a-z0-9]+", plain))
    has_key = bool(words & {"key", "keys"}) and bool(words & _KEYS)
    return bool(words & _WORDS) or has_key or together == "key" or together.endswith(_STORES)
