"""Make the pictures of docs/report.md: train small runs, report them, and take pictures in headless Chromium.

    python -m tools.report_pictures [--runs DIR] [--pictures DIR] [--all]      # ten minutes on two cores

Runs that are there already are not trained again. Each page has four pictures, wide and narrow, light and dark;
docs/ gets those that docs/report.md shows. With --all they are of the whole page and none goes to docs/.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.pages import Browser

ROOT = Path(__file__).parents[1]
STEPS = 400  # so that the demo's second stage and four evaluations are in them
_KILLED_AT = 150  # step at which the resumed run is killed, after its first checkpoint
_COLOURS = 128  # of a picture, so that it is small
_WAIT_S = 1800  # for a run to get so far
_WIDTHS = (1280, 375)  # of a window [pixels]
_SHOWN = {
    "run": [("report-1280.png", 1280, False, "h1"), ("report-375-dark.png", 375, True, "figure")],
    "resumed": [("report-resumed.png", 1280, True, ".controls")],
    "two": [("report-two.png", 1280, False, "h1")],
    "meter": [("report-meter.png", 375, False, "figure")],
}  # pictures in docs: file, width, whether dark, and what stands at the upper edge

# A loop of anyone with a meter: no run folder, no ledger, an optimizer that goes over its tensors one by one.
_LOOP = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from headway import Meter
torch.manual_seed(0)
torch.set_num_threads(1)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=1, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
tokens = (torch.arange(16 * 300)[:, None] + torch.arange(64)).remainder(61).reshape(300, 16, 64)
with Meter(model, log_to=["jsonl:" + sys.argv[1]], log_every=1) as meter:
    for ids in meter.batches(tokens):
        batch = {"input_ids": ids}
        meter.count(batch)
        loss = model(**batch, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(loss=loss.item())
"""


def main() -> None:
    """Train what is missing, write the pages, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the runs and pages; a temporary one if not given")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs", help="folder of the pictures; docs/")
    parser.add_argument("--all", action="store_true", help="whole pages at all widths and colours")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = (options.runs or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        pages = write_pages(folder)
        with Browser(Path(scratch) / "profile") as browser:
            if options.all:
                take_all(browser, pages)
            else:
                take_shown(browser, pages, options.pictures)
        assert not browser.errors + browser.requests, browser.errors + browser.requests


def write_pages(folder: Path) -> dict[str, Path]:
    """Make the runs that are missing, and the page of each, by a short name."""
    run, resumed, padded, records = (folder / name for name in ("digits", "killed", "padded", "loop/records.jsonl"))
    if not (run / "run/summary.json").exists():
        _headway("demo", "--folder", run, "--steps", STEPS)
    if not (resumed / "run/summary.json").exists():
        _kill_and_resume(resumed)
    if not (padded / "summary.json").exists():
        _train(run, padded, "data.bucket_tokens=2048")
    if not records.exists():
        records.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-c", _LOOP, str(records)], check=True)
    sources = {
        "run": [run / "run"],
        "resumed": [resumed / "run"],
        "two": [run / "run", padded],
        "meter": [records],
    }
    for name, paths in sources.items():
        _headway("report", *paths, "-o", folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in sources}


def take_shown(browser: Browser, pages: dict[str, Path], folder: Path) -> None:
    """Take the first screens that the docs show."""
    for name, pictures in _SHOWN.items():
        for file, width, dark, top in pictures:
            browser.show(pages[name].as_uri(), width=width, dark=dark)
            browser.value(f"document.querySelector('{top}').scrollIntoView()")
            _small(browser, folder / file)
    browser.show(pages["run"].as_uri(), width=1280)
    # One chart over tokens, smoothed and zoomed, as a reader has made it.
    for place, value in enumerate(("tokens", "0.9")):
        choice = f"document.querySelectorAll('.controls select')[{place}]"
        browser.value(f"{choice}.value = '{value}'; {choice}.dispatchEvent(new Event('change'))")
    browser.value("document.querySelector('.controls').scrollIntoView()")
    _small(browser, folder / "report-charts.png")


def take_all(browser: Browser, pages: dict[str, Path]) -> None:
    """Take whole pages, wide and narrow, light and dark, and say what is wider than its window."""
    for page in pages.values():
        for width in _WIDTHS:
            for dark in (False, True):
                browser.show(page.as_uri(), width=width, dark=dark)
                browser.stretch(width)
                browser.picture(page.with_name(f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"))
                if browser.value("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                    raise AssertionError(f"{page} is wider than {width} pixels")


def _small(browser: Browser, path: Path) -> None:
    """Take a picture of few colours, which is a third of the size and looks the same."""
    browser.picture(path)
    Image.open(path).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def _headway(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "headway", *map(str, arguments)], check=True)


def _train(demo: Path, folder: Path, *settings: str) -> None:
    """Train as the demo did, on its data, in another folder and with some other settings."""
    config = yaml.safe_load((demo / "run/config.yaml").read_text(encoding="utf-8"))
    config["run"]["folder"] = str(folder)
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(config), encoding="utf-8")
    _headway("train", recipe, *(part for setting in settings for part in ("--set", setting)))


def _kill_and_resume(folder: Path) -> None:
    """Train until after the first checkpoint, kill the process, and go on."""
    command = [sys.executable, "-m", "headway", "demo", "--folder", str(folder), "--steps", str(STEPS)]
    metrics = folder / "run/metrics.jsonl"
    with _started(command) as process:
        end_s = time.monotonic() + _WAIT_S
        while process.poll() is None and time.monotonic() < end_s:
            text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
            steps = [int(step) for step in re.findall(r'"kind": "step".*?"step": (\d+)', text)]
            if steps and steps[-1] >= _KILLED_AT:
                break
            time.sleep(1)
        os.kill(process.pid, signal.SIGKILL)
    subprocess.run([*command, "--resume"], check=True)


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
