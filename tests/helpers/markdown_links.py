"""The relative links of a Markdown page: which of them lead to no file, or to no heading of one."""

import re

FENCED = re.compile(r"^(`{3,}).*?^\1$", flags=re.MULTILINE | re.DOTALL)


def broken_links(page):
    """List the links of a page, as written, that lead to nothing in the repository."""
    text = re.sub(r"`[^`\n]+`", "", FENCED.sub("", page.read_text(encoding="utf-8")))
    links = re.findall(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]+)?\)", text)
    return [path + heading for path, heading in links if not _leads_somewhere(page, path, heading)]


def _leads_somewhere(page, path, heading):
    target = page.parent / path if path else page
    return target.exists() and (not heading or heading[1:] in anchors(target))


def anchors(page):
    """List the anchors of a page's headings, as GitHub makes them; a second heading of the same words ends in -1."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    found = []
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        again = sum(one == slug for one, _ in found)
        found.append((slug, f"{slug}-{again}" if again else slug))
    return [anchor for _, anchor in found]
