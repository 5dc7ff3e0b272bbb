"""Make the pictures of README.md: the page of a run in light and in dark, taken in headless Chromium.

python -m tools.report_pictures [RUN]      # of headway demo's run if none is given: minutes on two cores
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.pages import Browser

DOCS = Path(__file__).parents[1] / "docs"
_WIDTH = 1040  # of the window, so that a README shows its letters at nearly their size [pixels]
_COLOURS = 256  # of a picture, so that it is small
_MARGIN = 10  # below the charts [pixels]


def main() -> None:
    """Train where no run is given, write its page, and take its pictures down to the charts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run; headway demo's if not given")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        if options.run is None:
            _headway("demo", "--folder", folder / "digits")
        page = folder / "page.html"
        _headway("report", options.run or folder / "digits/run", "-o", page)
        with Browser(folder / "profile") as browser:
            for scheme in ("light", "dark"):
                browser.show(page.as_uri(), width=_WIDTH, dark=scheme == "dark")
                browser.stretch(_WIDTH)
                height = browser.value("document.querySelector('.grid').getBoundingClientRect().bottom")
                _take(browser, DOCS / f"report-{scheme}.png", round(height) + _MARGIN)
            assert not browser.errors + browser.requests, browser.errors + browser.requests


def _take(browser: Browser, path: Path, height: int) -> None:
    """Take a picture of few colours, which is a third of the size and looks the same."""
    browser.picture(path)
    picture = Image.open(path).convert("RGB").crop((0, 0, _WIDTH, height))
    picture.quantize(_COLOURS, Image.Quantize.MEDIANCUT).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def _headway(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "headway", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
