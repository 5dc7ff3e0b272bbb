"""Strings of strangers in a run: no Markdown, page or line that is made of it obeys them."""

import json
import re
from html.parser import HTMLParser

import pytest
import yaml
from markdown_it import MarkdownIt

from headway.cli.explain import explain
from headway.cli.report import report
from headway.pages.run import read_run
from helpers.cases import PAYLOADS
from helpers.pages import report_markdown

OURS = {
    "p",
    "strong",
    "em",
    "code",
    "h1",
    "h2",
    "h3",
    "ul",
    "ol",
    "li",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "pre",
}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Tags(HTMLParser):
    def __init__(self, markdown):
        super().__init__()
        self.tags = []
        self.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))

    def handle_starttag(self, tag, attrs):  # noqa: ARG002 - as html.parser calls it
        self.tags.append(tag)

    def handle_comment(self, data):  # noqa: ARG002 - likewise
        self.tags.append("comment")


def poisoned(value, payload):
    """Every string of a record behind its kind, and every name that strangers choose."""
    if isinstance(value, dict):
        named = {"sources", "flops_by_component", "digits"}
        return {
            name: (
                {inner + payload: poisoned(one, payload) for inner, one in content.items()}
                if name in named and isinstance(content, dict)
                else content
                if name == "kind"
                else poisoned(content, payload)
            )
            for name, content in value.items()
        }
    if isinstance(value, list):
        return [poisoned(one, payload) for one in value]
    return value + payload if isinstance(value, str) else value


def write_run(folder, payload):
    folder.mkdir(parents=True)
    records = [
        {
            "schema_version": 1, "kind": "step", "step": step, "num_steps": 1, "wall_s": 0.5, "step_s": 0.5,
            "data_wait_s": 0.1, "data_wait_share": 0.2, "tokens": 100, "slots": 120, "world_size": 2, "mfu": 0.2,
            "padding_share": 1 / 6, "flops": {"total": 9000, "forward": 9000, "dgrad": 0, "wgrad": 0, "recompute": 0},
            "flops_by_component": {"language.mlp": 6000, "language.attention": 3000}, "tokens_per_s": 200.0,
            "convention": "useful/1", "peak_flops_per_s": 1e5, "peak_dtype": "fp32", "peak_source": "made up",
            "loss": 3.0 / step, "sources": {"a": {"loss": 1.0, "tokens": 60}, "b": {"loss": 2.0, "tokens": 40}},
            "rank_flops": [1, 2], "rank_flops_per_busy_s": [1e3, 2e3],
        }
        for step in range(1, 31)
    ]  # fmt: skip
    machine = {
        "command": ["headway", "train"], "host": "h", "device": {"name": "cpu"}, "precision": "fp32",
        "software": {"torch": "2"}, "model": {"class": "M", "parameters": 5, "trainable": 5},
        "recipe": {"path": "r.yaml", "overridden": ["optim.lr=1"]},
    }  # fmt: skip
    sample = {"kind": "sample", "step": 30, "where": "x", "prompt": "q", "gold": "g", "answer": "a", "exact": False}
    for name, rows in {
        "metrics.jsonl": records,
        "samples.jsonl": [sample] * 3,
        "resumes.jsonl": [{"kind": "resumed", "step": 20, "lost": []}],
    }.items():
        (folder / name).write_text("".join(json.dumps(poisoned(row, payload)) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(poisoned(machine, payload)))
    config = {"model": {"path": "m"}, "optim": {"name": "adamw"}, "run": {"folder": "f"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(poisoned(config, payload)))
    return folder


@pytest.mark.parametrize("payload", PAYLOADS)
def test_markdown_of_a_hostile_run_has_no_tag_link_or_control_character(tmp_path, payload, capsys):
    name = "run" + re.sub("[/\x00]", "_", payload)
    seen = read_run(write_run(tmp_path / name, payload))
    other = read_run(write_run(tmp_path / "other" / name, payload))
    explain([tmp_path / name], markdown=True)
    for text in (report_markdown(seen), report_markdown(seen, other), capsys.readouterr().out):
        assert set(Tags(text).tags) <= OURS
        assert not OBEYED.search(text)


def test_a_hostile_folder_reaches_neither_terminal_nor_log(tmp_path, capsys):
    folder = write_run(tmp_path / "run\x1b[2J\u202egpj", "")
    report([folder], output=tmp_path / "p\x1b[31m.html")
    printed = capsys.readouterr()
    assert not OBEYED.search(printed.out + printed.err)
    assert "run\\x1b[2J\\u202egpj" in printed.out
