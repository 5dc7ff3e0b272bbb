"""What settings and addresses may hold that is not for others: hidden before anybody sees them."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

HIDDEN = "(hidden)"
_MOST = 5000  # settings of a file; anchors of YAML may make a few lines endless
# Words of a setting's name that tell a secret, and those that tell one together with "key".
_WORDS = frozenset(
    ("token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "authorization",
     "auth", "cookie", "apikey", "accesskey", "sas", "signature")
)  # fmt: skip
_KEYS = frozenset(("api", "access", "account", "private", "shared", "signing", "ssh", "encryption", "license"))
_STORES = ("storage_options", "connection_string", "headers", "env", "environ")  # whatever is in them
_SAID = r"(?:token|secret|password|passwd|credentials?|api[_-]?key|access[_-]?key|accountkey)"
_RULES = (
    # who asks, in an address, and with which signature
    (re.compile(r"://[^@\s\"']+@"), f"://{HIDDEN}@"),
    (re.compile(rf"(?i)([?&][\w.-]*(?:{_SAID}|sig|signature|key)[\w.-]*=)[^&\s\"']+"), rf"\1{HIDDEN}"),
    # options and variables of a command
    (re.compile(rf"(?i)(--?[\w-]*{_SAID}[ =])\S+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)\b(\w*{_SAID}=)[^\s;,&\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic) +[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|xox[abp]-|AKIA)[\w-]{8,}"), HIDDEN),
    # somebody's home
    (re.compile(r"(?<![\w/.-])/(?:home|Users)/[^/\s\"']+|(?<![\w./-])/root(?=[/\s\"']|$)"), "~"),
    (re.compile(r"(?i)\b[a-z]:\\+users\\+[^\\\s\"']+"), "~"),
)


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
    is_json = text.lstrip().startswith("{")
    try:
        found = json.loads(text) if is_json else yaml.safe_load(text)
        seen = _Shown().of(found)
    except (ValueError, yaml.YAMLError, RecursionError):
        return "Not shown: it cannot be read as YAML or JSON, or holds too much."
    shown = json.dumps(seen, indent=1) if is_json else yaml.safe_dump(seen, sort_keys=False, allow_unicode=True)
    return shown.strip()[:longest]


class _Shown:
    """Copies settings; what is hidden is a word."""

    def __init__(self) -> None:
        self._left = _MOST

    def of(self, node: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many settings")
        if isinstance(node, Mapping):
            return {self._text(name): HIDDEN if _is_secret(str(name)) else self.of(one) for name, one in node.items()}
        if isinstance(node, list | tuple):
            return [self._argument(one, before) for one, before in zip(node, ["", *node], strict=False)]
        return self._text(node) if isinstance(node, str) else node if _is_plain(node) else str(node)

    def _argument(self, item: Any, before: Any) -> Any:
        """An item of a list, which may be one of a command: `--token`, then a token, or `a.token=...`."""
        if isinstance(before, str) and before.startswith("-") and "=" not in before and _is_secret(before):
            return HIDDEN
        name, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
        if equals and any(_is_secret(part) for part in name.split(".")):
            return f"{name}={HIDDEN}"
        if equals and value.lstrip().startswith(("{", "[")):
            try:
                return f"{name}={json.dumps(self.of(yaml.safe_load(value)))}"
            except yaml.YAMLError:
                return f"{name}={HIDDEN}"
        return self.of(item)

    @staticmethod
    def _text(value: Any) -> Any:
        if isinstance(value, str):
            for pattern, instead in _RULES:
                value = pattern.sub(instead, value)
        return value if _is_plain(value) else str(value)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _is_secret(name: str) -> bool:
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = set(re.split(r"[^a-z0-9]+", plain))
    together = "_".join(re.split(r"[^a-z0-9]+", plain))
    return bool(words & _WORDS) or ("key" in words and bool(words & _KEYS)) or together.endswith(_STORES)
