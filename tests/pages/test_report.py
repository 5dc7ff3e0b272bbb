import base64
import json
import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml

from headway.cli.report import report
from headway.count import Workload
from headway.devices import Peak
from headway.errors import ConfigError, UsageError
from headway.meter import Meter
from headway.pages.comparison import _interval
from headway.pages.page import page_of, report_page
from headway.pages.run import read_run
from headway.report.page import svg_file
from headway.report.section import markdown_text
from helpers.device import COST_MODEL, Clock
from helpers.pages import report_markdown, write_run

HOSTILE = '<script>alert(1)</script>"><img onerror=x> ]]> </style>'


SCRIPTS = [{"type": "application/json", "id": "headway-report"}, {}]  # the numbers, and what shows them under a pointer


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.data, self.scripts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "poster")]
        if tag == "script":
            self.scripts.append(dict(attrs))

    def handle_data(self, data):
        self.data.append(data)


def test_the_page_has_its_parts_and_asks_for_nothing(tmp_path):
    text = report_page(read_run(write_run(tmp_path / "run", 20)))
    page = Page(text)
    shown = " ".join(page.data)
    for said in ("MFU", "useful", "made up for a test", "Loss", "2.50 s (step 7)", "language.mlp", "Tokens by source"):
        assert said in shown
    assert page.links == []
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert {urlsplit(url).netloc for url in re.findall(r"https?://[^\s\"'<]+", text)} <= {"www.w3.org"}  # SVG's name
    assert page.scripts == SCRIPTS
    assert text.count('<svg role="img"') == page.tags.count("figure") == page.tags.count("desc") > 5
    folds = re.findall(r'<details class="fold"><summary><h2>(.*?)</h2>', text)
    assert folds == ["Learning", "Speed and memory", "Data", "The run"]


def test_the_same_run_gives_the_same_page(tmp_path):
    run = write_run(tmp_path / "run", 50)
    assert report_page(read_run(run)) == report_page(read_run(run))


@pytest.mark.slow
def test_ten_thousand_steps_of_eight_sources_and_ranks_stay_small(tmp_path):
    run, noise = write_run(tmp_path / "run", 10_000), np.random.default_rng(0)
    with (run / "metrics.jsonl").open() as file:
        records = [json.loads(line) for line in file]
    for record, drawn in zip(records, noise.uniform(0.5, 1.5, (len(records), 32)), strict=True):
        record |= {"lr": drawn[0], "grad_norm": drawn[1], "step_s": drawn[2], "wall_s": drawn[2], "mfu": drawn[3] / 3}
        record |= {
            "fill": drawn[4] / 2,
            "balance": drawn[5] / 2,
            "padding_share": drawn[6] / 9,
            "tokens_per_s": drawn[7],
        }
        record |= {"rank_flops": [*drawn[8:16]], "rank_flops_per_busy_s": [*drawn[16:24]], "world_size": 8}
        record["sources"] = {f"source-{n}": {"loss": one, "tokens": 50 * one} for n, one in enumerate(drawn[24:])}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    text = report_page(read_run(run))
    assert text.count("<figcaption><h3>Loss of source") == 8
    assert 100_000 < len(text.encode()) < 200_000


def test_steps_that_took_long_are_named_with_what_their_records_say(tmp_path):
    run = write_run(tmp_path / "run", 20)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    changed = {4: {"step_s": 0.9, "data_wait_share": 0.5}, 12: {"step_s": 1.1, "tokens": 300}, 15: {"step_s": 0.6}}
    records = [json.loads(line) for line in lines]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(one | changed.get(one["step"], {})) + "\n" for one in records)
    )
    text = report_markdown(read_run(run))
    assert "3 of 20 took more than 1.5 times the median, 506 ms." in text
    rows = [line for line in text.partition("### The slowest steps")[2].splitlines() if line.startswith("| ")][2:5]
    assert rows == [
        "| 7 | 2.50 s | 4.9 |  |",
        "| 12 | 1.10 s | 2.2 | waited for data 19.9 %, 3.0 times the usual tokens |",
        "| 4 | 900 ms | 1.8 | waited for data 50.0 % |",
    ]
    assert "The slowest steps" not in report_markdown(read_run(write_run(tmp_path / "even", 6)))


def test_what_is_the_same_in_every_record_is_a_row_and_no_chart(tmp_path):
    run = read_run(write_run(tmp_path / "run", 5, fill=0.75))
    assert "| Fill, tokens over the room of the packs | 75.0 % | 75.0 % | 75.0 % |" in report_markdown(run)
    assert "<figcaption><h3>Fill" not in report_page(run)
    assert "<figcaption><h3>Waiting for data" in report_page(run)


def test_what_a_run_was_made_with_is_a_table(tmp_path):
    run = write_run(tmp_path / "run", 5)
    made = {"command": ["headway", "train", "a b.yaml"], "host": "node-7", "device": {"name": "H100"}}
    made |= {"software": {"torch": "2.13", "git_commit": None}, "model": {"class": "Qwen3", "parameters": 1_459_840}}
    (run / "run.json").write_text(json.dumps(made))
    text = report_markdown(read_run(run))
    for row in ("command | headway train 'a b.yaml'", "host | node-7", "torch | 2.13"):
        assert f"| {row} |" in text
    assert "Qwen3, 1.46 M parameters · 1 x H100" in text
    assert "git commit" not in text


def test_numbers_for_machines_are_those_of_the_records(tmp_path):
    text = report_page(read_run(write_run(tmp_path / "run", 20)))
    told = json.loads(re.search(r'id="headway-report">(.*?)</script>', text, flags=re.DOTALL)[1])
    assert told["num_records"] == 20
    assert told["series"]["step_s"]["step of largest"] == 7
    assert told["series"]["loss"]["smallest"] == pytest.approx(0.15)
    assert sum(told["mean_step"]["lines"].values()) == told["mean_step"]["duration_ns"]


def test_hostile_text_stays_text(tmp_path):
    run = write_run(tmp_path / "run<img src=x>", 5, source=HOSTILE, peak_source=HOSTILE, convention=HOSTILE)
    (run / "config.yaml").write_text(HOSTILE)
    text = report_page(read_run(run))
    page = Page(text)
    assert page.scripts == SCRIPTS
    assert "img" not in page.tags
    assert page.tags.count("style") == 1
    assert "alert(1)" in " ".join(page.data)
    assert "<script>" not in report_markdown(read_run(run)).split("\n")[0]


def test_a_torn_line_is_said_and_left_out(tmp_path):
    run = write_run(tmp_path / "run", 5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    seen = read_run(run)
    assert len(seen.records) == 5
    assert "he last line was not written to its end" in report_page(seen)


def test_a_run_that_has_not_ended_says_so_first(tmp_path):
    run = write_run(tmp_path / "run", 5)
    assert "unfinished" not in report_page(read_run(run))
    (run / "config.yaml").write_text("run: {}\n")
    assert "unfinished" in report_page(read_run(run))
    (run / "summary.json").write_text("{}\n")
    assert "unfinished" not in report_page(read_run(run))


def test_a_resumed_run_has_each_step_once(tmp_path):
    run = write_run(tmp_path / "run", 6)
    first = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(first + first.splitlines()[-1] + "\n")
    (run / "resumes.jsonl").write_text('{"kind": "resumed", "step": 5}\n')
    seen = read_run(run)
    assert [record["step"] for record in seen.records] == [1, 2, 3, 4, 5, 6]
    assert "resumed once, after step 5" in report_page(seen)


def test_a_file_of_a_meter_and_missing_numbers_leave_sections_out(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"step": {n}, "step_s": 0.5, "tokens_per_s": 0.0}}\n' for n in (1, 2, 3)))
    text = report_page(read_run(path))
    for absent in (
        "<dt>MFU",
        "<dt>Tokens/s",
        "Gradient norm",
        "FLOPs by component",
        "Tokens by source",
        "wall time goes",
    ):
        assert absent not in text


def test_a_loop_of_anyone_with_a_meter(tmp_path):
    path, clock = tmp_path / "records.jsonl", Clock()
    with Meter(
        COST_MODEL, clock=clock, log_to=[path], log_every=2, peak=Peak("x", 1e5, "fp32", "made up for a test")
    ) as meter:
        for _ in range(8):
            meter.count(Workload([100]))
            clock.now_s += 0.5
            meter.step()
    text = report_page(read_run(path))
    assert ">18.0 %<" in text  # 100 tokens x 90 FLOPs / 0.5 s / 1e5
    assert "FLOPs by component" not in text  # it has one alone


def test_values_that_headway_does_not_write_do_not_stop_the_page(tmp_path):
    path = tmp_path / "mine.jsonl"
    odd = {
        "step": 1,
        "step_s": 0.5,
        "flops_by_component": ["x"],
        "sources": {"a": 1, "b": {"tokens": -3}},
        "loss": "low",
        "grad_norm": 10**400,
        "lr": True,
    }
    path.write_text(json.dumps(odd) + "\n" + json.dumps({"step": 10**400, "step_s": 0.5}) + "\n")
    text = report_page(read_run(path))
    assert "FLOPs by component" not in text
    assert "<figcaption><h3>Gradient norm" not in text
    assert "<figcaption><h3>Loss" not in text


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 5)
    monkeypatch.chdir(tmp_path)
    report([run])
    assert (tmp_path / "report.html").read_text() == report_page(read_run(run))
    with pytest.raises(UsageError, match="Give one of them"):
        report([run], tmp_path / "x.html", markdown=True)
    with pytest.raises(UsageError, match="3 runs are given"):
        report([run] * 3)
    with pytest.raises(UsageError, match="cannot be written"):
        report([run], run / "metrics.jsonl" / "x.html")
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    report([run, run], tmp_path / "two.html", open_it=True)
    assert opened == [(tmp_path / "two.html").as_uri()]


def test_page_markdown_and_terminal_say_the_same_first(tmp_path):
    run = read_run(write_run(tmp_path / "run", 20))
    page = page_of(run)
    words = [
        line for part in page.sections for line in (*(cell for row in part.rows for cell in row), *part.points) if line
    ]
    shown = " ".join(Page(page.as_html()).data)
    assert len(words) > 20
    for word in words:
        assert word in page.as_terminal()
        assert markdown_text(word) in page.as_markdown()
    for row in (*page.tiles.rows, *page.time.rows):
        assert all(cell.removeprefix("- ") in shown for cell in row)
    assert page.card.title == "What to change first"
    for words in (page.card.title, page.card.remark, *page.card.points):
        for text in (shown, page.as_markdown(), page.as_terminal()):
            assert re.sub(r"[`\\\s]", "", words) in re.sub(r"[`\\\s]", "", text)
    assert "show another" not in page.as_markdown()


def test_other_conventions_stand_beside_the_one_that_was_used(tmp_path):
    run = write_run(tmp_path / "run", 3)
    billed = [
        {"name": "useful", "version": "1", "flops": 9000, "ratio_to_useful": 1.0, "why": "real tokens"},
        {"name": "palm", "version": "2022-04", "flops": 18000, "ratio_to_useful": 2.0, "why": HOSTILE},
        {"name": "maxtext", "version": "2025-08", "flops": None, "ratio_to_useful": None, "why": "no heads"},
        "torn",
    ]
    (run / "summary.json").write_text(json.dumps({"mfu": 0.2, "conventions": billed}))
    text = report_page(read_run(run))
    shown = " ".join(Page(text).data)
    for said in ("What other tools would print", "palm/2022-04", "18.0 kFLOP", "2.000", "40.0 %", "no heads"):
        assert said in shown
    assert HOSTILE not in text
    assert "| palm/2022-04 | 18.0 kFLOP | 2.000 | 40.0 % |" in report_markdown(read_run(run))


def test_no_run_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="no-run"):
        read_run(tmp_path / "no-run")


SECRETS = """
run:
  trackers: [mlflow:https://me:s3cr3t/x@host/x]
  api_key: hush
  hub-token:
    'hush'
  hfToken: {nested: hush, more: [hush]}
  command: headway train x --hub-token hush HF_TOKEN=hush --password=hush
  note: |
    Authorization Bearer hushhush
    hf_hushhushhush
data:
  tokens_per_pack: 4096
  path: /home/someone/data/x.jsonl
  mounted: /mnt/home/me/x
  windows: C:\\Users\\someone\\x
  url: s3://b/x?X-Amz-Signature=hush&a=1
  connection: AccountKey=hush;Endpoint=y
  other: /root/data
  train:
  - storage_options: {key: hush, account_key: hush, token: {private_key: "hush"}, headers: {Authorization: hush}}
"""


@pytest.mark.parametrize("form", ["yaml", "json", "one line"])
def test_tokens_passwords_and_homes_are_not_on_the_page(tmp_path, form):
    run = write_run(tmp_path / "run", 3)
    text = SECRETS if form == "yaml" else json.dumps(yaml.safe_load(SECRETS), indent=1 if form == "json" else None)
    (run / "config.yaml").write_text(text)
    (run / "run.json").write_text('{"password": "hush", "env": {"X": "hush"}, "device": {"name": "cpu"}}')
    text = report_page(read_run(run))
    for secret in ("s3cr3t", "hush", "someone", "/root"):
        assert secret not in text
    for kept in ("4096", "~/data/x.jsonl", "(hidden)@host/x", "&amp;a=1", "cpu", "~/x", "Endpoint=y"):
        assert kept in text


def test_secrets_of_a_command_are_not_on_the_page(tmp_path):
    run = write_run(tmp_path / "run", 3)
    command = ["train", "--token", "hush", "--set", "run.api_key=hush", "--set", "optim.lr=1e-3"]
    command += ["--set", 'data.train=[{"path": "x", "storage_options": {"key": "hush"}}]', "--password=hush"]
    command += ["data.train.0.storage_options.account=hush"]
    (run / "run.json").write_text(json.dumps({"command": command, "host": "node-7"}))
    text = report_page(read_run(run))
    assert "hush" not in text
    assert "optim.lr=1e-3" in text
    assert "node-7" in text


def test_what_cannot_be_read_is_not_shown_and_a_secret_is_not_cut_in_two(tmp_path):
    run = write_run(tmp_path / "run", 3)
    (run / "config.yaml").write_text("a: [hush\n")
    assert "hush" not in report_page(read_run(run))
    (run / "config.yaml").write_text(f"a: {'x' * 19_970}\nb: s3://me:hushhushhush@host/x\n")
    assert "hush" not in report_page(read_run(run))


def test_two_runs_are_compared_at_equal_cost(tmp_path):
    a, b = write_run(tmp_path / "a", 40), write_run(tmp_path / "b", 40, tokens=200, loss=1.0)
    for run, tokens in ((a, 1), (b, 2)):
        (run / "config.yaml").write_text(f"data:\n  tokens_per_pack: {tokens}\n  seed: 0\n")
    text = report_markdown(read_run(a), read_run(b))
    assert "| data.tokens_per_pack | 1 | 2 |" in text
    assert "data.seed" not in text
    assert "### Loss at equal tokens" in text
    assert "| 4,000 | 0.0750 | 1.0000 | +0.9250 |" in text  # A has seen 4,000 tokens, as B at half of its run
    assert "A step of B takes as long as one of A" in text
    assert "No difference is shown" in text
    page = report_page(read_run(a), read_run(b))
    assert (Page(page).links, Page(page).scripts) == ([], SCRIPTS)
    assert page == report_page(read_run(a), read_run(b))


def test_the_page_of_two_runs_has_both_on_its_charts_and_its_numbers_for_programs(tmp_path):
    a, b = write_run(tmp_path / "a", 40), write_run(tmp_path / "b", 30, tokens=200)
    for run, tokens in ((a, 1), (b, 2)):
        (run / "config.yaml").write_text(f"data: {{tokens_per_pack: {tokens}}}\n")
    text = report_page(read_run(a), read_run(b))
    charts = dict(re.findall(r"<figcaption><h3>(.*?)</h3>(.*?)</figure>", text, flags=re.DOTALL))
    assert {*charts} >= {"Loss at equal tokens", "Loss at equal FLOPs", "Time of a step", "MFU"}
    for chart in charts.values():
        assert re.findall(r'data-name="(.)"', chart) == ["A", "B"]
    for name, unit in (("tokens", "ktokens"), ("FLOPs", "kFLOPs")):
        assert f'data-of="{unit}"' in charts[f"Loss at equal {name}"]
    assert "30 values over ktokens 0.2 to 6, from" in charts["Loss at equal tokens"]
    told = json.loads(re.search(r'id="headway-report">(.*?)</script>', text, flags=re.DOTALL)[1])
    assert [one["num_records"] for one in told["runs"]] == [40, 30]
    assert told["settings"] == {"data.tokens_per_pack": ["1", "2"]}
    low, high = told["step_interval_95"]
    assert low <= 0 <= high


def test_a_step_that_is_longer_is_beyond_doubt_and_its_work_is_told_from_its_rate(tmp_path):
    a = write_run(tmp_path / "a", 40)
    b = write_run(
        tmp_path / "b", 40, flops={"total": 18000, "forward": 6000, "dgrad": 6000, "wgrad": 6000, "recompute": 0}
    )
    text = report_markdown(read_run(a), read_run(b))
    assert "+0.0 % of time = +100.0 % of work, padding and recomputation in it, at +100.0 % of rate" in text
    for line in (slower := write_run(tmp_path / "c", 40) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["wall_s"] *= 1.2
        record["step_s"] *= 1.2
        with slower.with_name("slow.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    text = report_markdown(read_run(a), read_run(slower.with_name("slow.jsonl")))
    assert "95 % interval" in text
    assert "No difference is shown" not in text


def test_a_line_can_differ_for_sure_where_the_steps_do_not(tmp_path):
    a, b = write_run(tmp_path / "a", 40), write_run(tmp_path / "b", 40, data_wait_s=0.15)
    text = report_markdown(read_run(a), read_run(b))
    assert "No difference is shown" in text
    said = "idle: waiting for data (+50.00 ms, 95 % interval +50.00 to +50.00)"
    assert f"These lines differ by more than the steps vary: {said}" in text
    assert "| data | 100.0 ms | 150.0 ms | +50.0 ms |" in text


def test_the_interval_of_a_difference_holds_it_as_often_as_it_says():
    """95 % of intervals from independent normal steps hold the true ratio: of 200, 190 +- 3 standard deviations."""
    random = np.random.default_rng(7)
    pairs = ((random.normal(1.0, 0.2, 200), random.normal(1.1, 0.3, 200)) for _ in range(200))
    held = sum(low <= 0.1 <= high for low, high in (_interval(*pair) for pair in pairs))
    assert 181 <= held <= 199


def test_work_that_padding_adds_is_told_from_useful_work(tmp_path):
    a, b = write_run(tmp_path / "a", 40, slots=100), write_run(tmp_path / "b", 40, slots=150)
    text = report_markdown(read_run(a), read_run(b))
    # of 9,000 useful FLOPs those of attention, a third, do not grow with padding: (9,000 + 6,000 / 2) / 9,000
    assert "B computes +33.3 % FLOPs for each useful one" in text
    assert "+0.0 % of time = +33.3 % of work, padding and recomputation in it, at +33.3 % of rate." in text
    assert "| useful FLOPs of a step | 9.0 kFLOP | 9.0 kFLOP | +0.0 % |" in text
    assert "| FLOPs with padding and recomputation | 9.0 kFLOP | 12.0 kFLOP | +33.3 % |" in text
    assert "FLOPs for each useful one" not in report_markdown(read_run(a), read_run(a))


def luminance(colour):
    """Source: WCAG 2.2, relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_lines_stand_out_from_the_paper(scheme):
    """WCAG 2.2: 4.5 to 1 for text (1.4.3, AA), and so for lines; parts of a bar have their names and sizes below it."""
    light, dark = svg_file({}).split("@media screen and (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", light if scheme == "light" else dark))
    for name in ("ink", "soft", "warn", "a", "b"):
        for ground in ("paper", "card"):
            lighter, darker = sorted((luminance(colours[one]) for one in (name, ground)), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (name, ground)


def test_the_steps_of_a_meter_begin_with_those_of_its_first_window(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(f'{{"step": {n}, "num_steps": 4, "step_s": 0.5, "wall_s": 2}}\n' for n in (4, 8)))
    assert "1 to 8, 2 records" in report_page(read_run(path))


def test_hostile_text_of_two_runs_stays_text(tmp_path):
    a, b = write_run(tmp_path / "a", 12), write_run(tmp_path / "b", 12, source=HOSTILE, convention=HOSTILE)
    (b / "config.yaml").write_text(f"data: {{name: {json.dumps(HOSTILE)}}}\n")
    text = report_page(read_run(a), read_run(b))
    assert HOSTILE not in text
    assert "<img" not in text
    assert Page(text).scripts == SCRIPTS


def test_settings_that_refer_to_themselves_end(tmp_path):
    a, b = write_run(tmp_path / "a", 5), write_run(tmp_path / "b", 5)
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    (b / "config.yaml").write_text(bomb)
    assert "Not shown" in read_run(b).files["config.yaml"]
    assert report_markdown(read_run(a), read_run(b))


def test_of_few_steps_nobody_is_sure(tmp_path):
    a, b = write_run(tmp_path / "a", 3), write_run(tmp_path / "b", 3)
    assert "Fewer than 5 steps have no interval" in report_markdown(read_run(a), read_run(b))


def test_what_a_run_folder_holds_beside_steps_is_shown(tmp_path):
    run = write_run(tmp_path / "run", 6, rank_flops=[6000, 3000], rank_flops_per_busy_s=[2e4, 1e4])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": 6, "loss": 1.25, "exact_match": 0.5}\n')
    (run / "resumes.jsonl").write_text('{"kind": "resumed", "step": 4, "lost": [{"step": 5}]}\n')
    predicted = {"weights": 2**30, "peak": 2**31, "moments": []}
    (run / "memory.json").write_text(json.dumps({"predicted": predicted, "measured": {"peak": 2**31 + 2**30}}))
    answers = [
        {"kind": "sample", "step": step, "prompt": HOSTILE, "gold": "7", "answer": f"answer-{step}"} for step in (3, 6)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    text = report_page(read_run(run))
    shown = " ".join(Page(text).data)
    for said in (
        "Work of each rank", "133.3 %", "66.7 %", "Speed of each rank", "20.0 kFLOP/s", "went on after step", "1.2500",
        "50.0 %", "Memory of a device by part, predicted and measured", "3.0 GiB", "Answers after step 6", "answer-6",
    ):  # fmt: skip
        assert said in shown, said
    assert '<line class="mark"' in text
    assert ">restart</text>" in text
    assert "line: training, dots: held out" in shown
    assert "answer-3" not in shown
    assert "moments" not in shown
    assert HOSTILE not in text


def test_the_loss_of_held_out_samples_stands_in_the_chart_of_the_loss(tmp_path):
    run = write_run(tmp_path / "run", 6)
    for losses, risen in (((0.5, 0.4, 0.41), False), ((0.5, 0.4, 0.6), True)):
        lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "evaluation" not in line]
        lines += [
            json.dumps({"kind": "evaluation", "step": 2 * place, "loss": loss}) for place, loss in enumerate(losses, 1)
        ]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        text = report_page(read_run(run))
        assert "held out: 3 values over step 2 to 6, from 0.4 to" in text
        assert "line: training, dots: held out" in text
        assert ("least after step 4, 0.4000, and is 0.6000 after step 6" in text) == risen
        assert ("least after step 4" in report_markdown(read_run(run))) == risen


def test_answers_about_pictures_stand_beside_the_pictures(tmp_path):
    run = write_run(tmp_path / "run", 6)
    picture = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(range(200))).decode()
    seen = {"a.jsonl, line 1": picture, "a.jsonl, line 2": HOSTILE, "a.jsonl, line 3": "data:text/html,x" * 20}
    rows = [
        {"kind": "sample", "step": step, "where": where, "prompt": "what is it", "gold": "a cat", "answer": "a dog"}
        | ({"picture": data} if step == 3 else {})
        for step in (3, 6)
        for where, data in seen.items()
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(text := report_page(read_run(run)))
    assert page.links == [f"data:image/jpeg;base64,{picture}"]  # those of the first evaluation, and no others
    assert HOSTILE not in text
    assert picture not in report_markdown(read_run(run))


def test_what_a_model_drew_stands_above_who_read_it(tmp_path):
    run = write_run(tmp_path / "run", 6)
    (run / "drawn.png").write_bytes(b"\x89PNG" + bytes(range(90)))
    (run / "drawn.json").write_text(json.dumps({"digits": {"7": {"asked": 4, "classifier": 3, HOSTILE: 1}, "x": None}}))
    page = Page(text := report_page(read_run(run)))
    data = base64.b64encode((run / "drawn.png").read_bytes()).decode()
    assert page.links == [f"data:image/png;base64,{data}"]
    assert 'alt="Drawn, a row for each of the table"' in text
    assert "| 7 | 4 | 3 |  |" in report_markdown(read_run(run))
    (run / "drawn.png").write_bytes(bytes(100_001))
    assert "Drawn, a row" not in report_page(read_run(run))


def test_headings_keep_their_order_where_records_say_nothing_of_learning(tmp_path):
    run = write_run(tmp_path / "run", 4, loss=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": 4, "loss": 1.25}\n')
    (run / "run.json").write_text('{"host": "node-7"}')
    headings = re.findall('<details class="fold"><summary><h2>(.*?)</h2>', report_page(read_run(run)))
    assert headings == ["Learning", "Speed and memory", "Data", "The run"]


def test_each_source_has_its_loss_where_there_are_several(tmp_path):
    sources = {name: {"loss": loss, "tokens": 50} for name, loss in (("chats", 2.0), ("images", 3.5))}
    text = report_page(read_run(write_run(tmp_path / "run", 9, sources=sources)))
    assert "Loss of source chats" in text
    assert "Loss of source images" in text
    assert "Loss of source" not in report_page(read_run(write_run(tmp_path / "one", 9)))


def test_settings_that_differ_from_the_recipe_and_from_the_defaults(tmp_path):
    run = write_run(tmp_path / "run", 6)
    (run / "config.yaml").write_text(
        "optim: {steps: 7, lr: 0.5, betas: [0.9, 0.95], clip: 1.0, eps: 1.0e-08}\n"
        "data:\n  train: [{path: x.jsonl, epochs: 2.0}]\n"
    )
    text = report_markdown(read_run(run))
    assert "| optim.steps | 7 |" in text
    assert "optim.eps" not in text
    assert "the recipe's file" not in text  # an older run did not write it down
    recipe = {
        "path": "r.yaml",
        "overridden": ["optim.lr=0.001", "optim.steps=", "data.train.0.storage_options.key=hush"],
    }
    (run / "run.json").write_text(json.dumps({"recipe": recipe}))
    text = report_markdown(read_run(run))
    assert "hush" not in text
    assert "The recipe is r.yaml: 3 settings were given another value" in text
    assert "| optim.lr | 0.5 | 0.001 |" in text
    assert "| optim.steps | 7 | not set |" in text
    assert '| data.train.0.path | "x.jsonl" | the same | null |' in text


@pytest.mark.parametrize(
    "odd", [{"rank_flops": [1, None]}, {"rank_flops": "x"}, {"rank_flops": [[1], 2]}, {"sources": {"a": {}, "b": None}}]
)
def test_odd_values_leave_sections_out(tmp_path, odd):
    run = write_run(tmp_path / "run", 4, **odd)
    for name in ("memory.json", "resumes.jsonl", "samples.jsonl"):
        (run / name).write_text('{"kind": "sample", "predicted": 3, "lost": 4}\n[1]\nnot json\n')
    assert "Work of each rank" not in report_page(read_run(run))
