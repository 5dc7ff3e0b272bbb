"""What settings and addresses may hold that is not for others."""

import re

_SECRET = r"(?:token|secret|password|passwd|credentials?|api_?key|access_?key)"
_RULES = (
    # the value of a setting, to the end of its line
    (re.compile(rf"""(?im)^(\s*(?:-\s+)?["']?(?:[\w.-]*[_.-])?{_SECRET}["']?\s*:[ \t]*)\S.*$"""), r"\1(hidden)"),
    # who asks, in an address, and with which signature
    (re.compile(r"://[^/@\s\"']+@"), "://(hidden)@"),
    (re.compile(rf"(?i)([?&][\w.-]*(?:{_SECRET}|sig|signature|key)[\w.-]*=)[^&\s\"']+"), r"\1(hidden)"),
    # somebody's home
    (re.compile(r"(?:/(?:home|Users)/[^/\s\"']+|(?<![\w./-])/root)(?=[/\s\"']|$)"), "~"),
)


def without_secrets(text: str) -> str:
    r"""Text of a settings file without tokens, passwords, users in addresses and names of home folders.

    >>> print(without_secrets("data: s3://me:pw@host/x?sig=1\nhub_token: abc\ntokens_per_pack: 4096\npath: /home/me/x"))
    data: s3://(hidden)@host/x?sig=(hidden)
    hub_token: (hidden)
    tokens_per_pack: 4096
    path: ~/x
    """
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text
