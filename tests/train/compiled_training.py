"""Train as a configuration says, its blocks compiled by one of PyTorch's backends.

python tests/train/compiled_training.py BACKEND FILE
"""

import functools
import sys
from pathlib import Path
from unittest.mock import patch

from headway.config import load_config
from headway.models.compiling import compile_blocks
from headway.train.run import train


def main(backend, path):
    with patch("headway.train.build.compile_blocks", functools.partial(compile_blocks, backend=backend)):
        train(load_config(Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
