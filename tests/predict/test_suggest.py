"""How often `headway init` lets data play."""

from dataclasses import replace

import numpy as np
import pytest

from headway.count import CostModel
from headway.count.rows import Parameter
from headway.predict.suggest import MeasuredLengths, _epochs

CHATS = MeasuredLengths(np.array([100, 200]), bad=0, images=0, are_documents=False)
CORPUS = replace(CHATS, are_documents=True)
LARGE, SMALL = (CostModel("m", (), (Parameter("w", n, n, "language.mlp"),)) for n in (1_500_000_000, 3_000_000))


@pytest.mark.parametrize(
    ("lengths", "model", "from_scratch", "steps", "epochs"),
    [
        (CHATS, LARGE, False, 40, 3),
        (CORPUS, LARGE, False, 40, 1),  # a corpus is read once
        (CHATS, SMALL, False, 31, 10),  # nobody fine-tunes 3 M parameters: 310 steps
        (CHATS, LARGE, True, 100, 3),  # without weights, 300 steps
        (CORPUS, SMALL, False, 40_000, 1),
        (CORPUS, SMALL, True, 150, 2),
        (CHATS, SMALL, False, 1, 50),  # more than so often teaches a handful of samples by heart
    ],
)
def test_data_play_as_often_as_a_model_needs(lengths, model, from_scratch, steps, epochs):
    assert _epochs(steps, model, lengths, from_scratch=from_scratch) == epochs
