"""Strings that are tags, links, Markdown or commands to a terminal, unless they are shown as text."""

PAYLOADS = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "<!--",
    "]]>",
    "`<b onclick=x>`",
    "a `` ` <i> `` b ` <u>",
    "[x](javascript:alert(1))",
    "![x](//evil/a.png)",
    "<https://evil>",
    "[x]: //evil\n\n[x]",
    "\n\n# big\n\n* item\n\n<iframe src=//evil>",
    "\\[x](//evil) \\<b> \\`<i>`",
    "</title><script>x</script>",
    "</pre></style><meta http-equiv=refresh content=0;url=//evil>",
    "&lt;script&gt; &#60;b&#62;",
    "\x1b[31mred\x9b a\u202eb | c **d** ~~e~~",
)
