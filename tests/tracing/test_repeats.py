"""Recurrent modules and other loops over the data: what repeats is one operation, counted as PyTorch dispatches it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headway.count import Workload
from headway.errors import TraceError
from headway.tracing import trace
from helpers.cases import some
from helpers.counter import counted, dispatched

BATCH, STEPS = 3, 7
SHORT = SimpleNamespace(max_position_embeddings=64)  # as a configuration says it: traced on texts of 17 to 59 tokens


MODULES = {
    "lstm": lambda: nn.LSTM(5, 8),
    "two layers, both ways": lambda: nn.LSTM(5, 8, num_layers=2, bidirectional=True),
    "projected": lambda: nn.LSTM(5, 8, proj_size=3),
    "batch first": lambda: nn.LSTM(5, 8, batch_first=True),
    "gru": lambda: nn.GRU(5, 8),
    "gru both ways": lambda: nn.GRU(5, 8, bidirectional=True, bias=False),
    "tanh": lambda: nn.RNN(5, 8),
    "relu": lambda: nn.RNN(5, 8, num_layers=2, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_a_recurrent_module_counts_what_its_steps_dispatch(name):
    model = MODULES[name]()
    x = torch.randn(STEPS, BATCH, 5, requires_grad=False)
    assert counted(trace(model, inputs=(x,))) == dispatched(model, x)


def test_a_gru_by_hand():
    # W_ih (24 x 5) and W_hh (24 x 8) multiply every step of every sequence. W_hh's product of the first step, whose
    # state is zeros, sends no gradient back to it; nor does W_ih's to the data
    forward = 2 * BATCH * STEPS * 24 * (5 + 8)
    backward = forward + 2 * BATCH * (STEPS - 1) * 24 * 8
    model = nn.GRU(5, 8)
    x = torch.randn(STEPS, BATCH, 5)
    assert counted(trace(model, inputs=(x,))) == (forward, backward) == dispatched(model, x)


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_a_cell_is_two_products(cell, gates):
    model, x = cell(5, 8), torch.randn(BATCH, 5)
    expected = 2 * BATCH * gates * 8 * (5 + 8)
    assert counted(trace(model, inputs=(x,))) == dispatched(model, x) == (expected, expected)


def test_packed_sequences_count_their_real_steps():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 8, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return out

    model, lengths = Packed(), torch.tensor([2, 7, 4])
    x = torch.randn(3, 7, 5)
    forward, backward = counted(trace(model, inputs=(x, lengths)))
    assert forward == 2 * (2 + 7 + 4) * 32 * (5 + 8)
    assert (forward, backward) == dispatched(model, x, lengths)


class Gated(nn.Module):
    """A recurrent cell written out: a gate lets the state through or a new one in."""

    def __init__(self):
        super().__init__()
        self.from_input, self.from_state = nn.Linear(12, 16), nn.Linear(8, 16)

    def forward(self, x, state):
        gate, new = (self.from_input(x) + self.from_state(state)).chunk(2, dim=-1)
        return state * gate.sigmoid() + new.tanh() * (1 - gate.sigmoid())


class Language(nn.Module):
    """A recurrent language model; the loop over time is PyTorch's, or its own around a cell."""

    def __init__(self, recurrent):
        super().__init__()
        self.embed, self.head, self.recurrent = nn.Embedding(50, 12), nn.Linear(8, 50), recurrent
        self.config = SHORT

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if isinstance(self.recurrent, nn.RNNBase):
            return (self.head(self.recurrent(x)[0]),)
        states, state = [], x.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            state = self.recurrent(x[:, t], state)
            states.append(state)
        return (self.head(torch.stack(states, 1)),)


LOOPS = {
    "PyTorch's": lambda: nn.GRU(12, 8, batch_first=True),
    "around PyTorch's cell": lambda: nn.GRUCell(12, 8),
    "around a cell by hand": Gated,
}


@pytest.mark.parametrize("loop", some(LOOPS, "around a cell by hand".__ne__))
def test_a_loop_over_time_follows_the_tokens(loop):
    model = Language(LOOPS[loop]())
    cost = trace(model)
    assert cost.unknown == ()
    # the state's product has no gradient to send back from a segment's first token, so those are counted apart
    assert {row.driver for row in cost.rows} == {"tokens", "segments", "transitions"}
    assert {row.component for row in cost.rows if row.module == "recurrent"} <= {"language.recurrence"}
    for tokens in (9, 20):
        assert counted(cost, Workload([tokens])) == dispatched(model, torch.zeros(1, tokens, dtype=torch.long))
    model.embed.requires_grad_(False)
    assert counted(trace(model), Workload([9])) == dispatched(model, torch.zeros(1, 9, dtype=torch.long))


class FastWeights(nn.Module):
    """Writes each token into a matrix, elementwise, and reads it with a product: half of its work shows."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.config = nn.Embedding(50, 12), nn.Linear(12, 50), SHORT

    def forward(self, input_ids):
        x, state, out = self.embed(input_ids), 0.0, []
        for t in range(x.shape[1]):
            state = state + x[:, t, :, None] * x[:, t, None, :]
            out.append((x[:, t, None] @ state)[:, 0])
        return (self.head(torch.stack(out, 1)),)


def test_a_state_that_is_written_elementwise_is_refused():
    with pytest.raises(
        TraceError, match="It loops over tokens one by one, in a recurrence that no known formula explains"
    ):
        trace(FastWeights())


class InChunks(nn.Module):
    """A head that walks over the tokens in chunks, so that its logits never exist all at once."""

    def __init__(self, size):
        super().__init__()
        self.embed, self.head, self.size = nn.Embedding(50, 12), nn.Linear(12, 50), size

    def forward(self, input_ids):
        return (torch.stack([self.head(x).logsumexp(-1).sum() for x in self.embed(input_ids)[0].split(self.size)]),)


def test_a_loss_in_chunks_costs_its_tokens():
    rows = trace(InChunks(60)).rows
    assert [(row.module, row.driver, row.forward) for row in rows] == [("head", "tokens", 2 * 12 * 50)]
    assert rows == trace(InChunks(10_000)).rows


class Halting(nn.Module):
    """Runs another module on long inputs than on short ones."""

    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return (self.short if x.shape[0] < 200 else self.long)(x)


def test_a_branch_on_the_length_is_refused():
    with pytest.raises(TraceError, match=r"matmul in module (short|long) runs on one workload and not on another"):
        trace(Halting(), inputs=lambda w: torch.zeros(w.tokens, 4))
