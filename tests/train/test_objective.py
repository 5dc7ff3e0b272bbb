"""A user's own objective: distillation, as the example has it, beside a loop by hand."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaConfig, LlamaForCausalLM

from headway.config import parse_config
from headway.errors import ConfigError
from headway.train.run import train
from helpers.folders import tiny_tokenizer
from helpers.runs import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "distil.py"
SIZES = {
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": 2,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STUDENT, TEACHER = {"hidden_size": 32, "num_hidden_layers": 1}, {"hidden_size": 48, "num_hidden_layers": 3}
LENGTHS = [9, 17, 5, 12, 30, 7, 21, 3]  # [tokens]
STEPS, LR, TEMPERATURE = 4, 3e-3, 2.0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a student and a teacher."""
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, sizes) in enumerate({"student": STUDENT, "teacher": TEACHER}.items()):
        torch.manual_seed(seed)
        LlamaForCausalLM(
            LlamaConfig(**SIZES, **sizes, head_dim=8, tie_word_embeddings=False, initializer_range=0.2)
        ).save_pretrained(folder / name)
        tiny_tokenizer(60).save_pretrained(folder / name)
    return folder


@pytest.fixture
def raw(models, tmp_path):
    """A run that distils, as plain types; every step has all rows in a pack."""
    torch.manual_seed(7)
    rows = [torch.randint(3, 64, (length,)).tolist() for length in LENGTHS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return {
        "model": {"path": str(models / "student")},
        "data": {
            "train": str(tmp_path / "data.jsonl"),
            "tokens_per_pack": sum(LENGTHS),
            "workers": 0,
            "prefetch_bytes": 0,
        },
        "objective": {
            "path": f"{EXAMPLE}:Distil",
            "options": {"teacher": str(models / "teacher"), "temperature": TEMPERATURE},
        },
        "optim": {
            "steps": STEPS,
            "lr": LR,
            "schedule": "constant",
            "warmup_steps": 0,
            "betas": [0.9, 0.95],
            "weight_decay": 0.0,
        },
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "threads": 1, "dtype": "float32"},
    }


def records_of(raw):
    return [row for row in read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl") if row["kind"] == "step"]


def by_hand(models, rows):
    """Losses of a loop in plain transformers, row by row without padding, with torch's own AdamW."""
    student, teacher = (LlamaForCausalLM.from_pretrained(models / name) for name in ("student", "teacher"))
    optimizer = torch.optim.AdamW(student.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses, agreements = [], []
    for _ in range(STEPS):
        loss, agrees, tokens = 0.0, 0, 0
        for row in rows:
            ids = torch.tensor([row])
            with torch.no_grad():
                wanted = teacher(input_ids=ids).logits[0, :-1]
            logits = student(input_ids=ids).logits[0, :-1]
            log_p, log_q = (log_softmax(values / TEMPERATURE, -1) for values in (logits, wanted))
            loss = loss + kl_div(log_p, log_q, log_target=True, reduction="sum")
            agrees, tokens = agrees + int((logits.argmax(-1) == wanted.argmax(-1)).sum()), tokens + len(row) - 1
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach() / tokens))
        agreements.append(agrees / tokens)
    return losses, agreements


def test_a_distilled_student_learns_as_in_a_loop_by_hand(raw, models):
    train(parse_config(raw))
    rows = [json.loads(line)["input_ids"] for line in Path(raw["data"]["train"]).read_text().splitlines()]
    losses, agreements = by_hand(models, rows)
    records = records_of(raw)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert [record["agreement"] for record in records] == pytest.approx(agreements)
    assert losses[-1] < losses[0]


def test_the_teachers_forward_is_billed(raw):
    """Each token: 2 FLOPs a weight of the layers and the head; each allowed pair: 4 times the heads' width a layer."""
    train(parse_config(raw))
    hidden, layers, heads, shared = TEACHER["hidden_size"], TEACHER["num_hidden_layers"], 4 * 8, 2 * 8
    weights = layers * (hidden * (2 * heads + 2 * shared) + 3 * hidden * SIZES["intermediate_size"])
    pairs = sum(length * (length + 1) // 2 for length in LENGTHS)
    forward = 2 * (weights + hidden * SIZES["vocab_size"]) * sum(LENGTHS) + 4 * heads * layers * pairs
    for record in records_of(raw):
        assert record["phases"]["teacher"]["flops"]["total"] == forward
        assert record["flops"]["total"] > forward
        assert record["tokens"] == sum(LENGTHS)  # not once more for the teacher


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(raw, killed_before):
    raw["checkpoint"] = {"every": 1, "keep": 9}
    train(parse_config(raw))
    expected = [(row["loss"], row["agreement"], row["grad_norm"]) for row in records_of(raw)]
    raw["run"]["folder"] += "-again"
    config = parse_config(raw)
    killed_before(config, 3)
    assert train(config, resume=True).steps == STEPS
    assert [(row["loss"], row["agreement"], row["grad_norm"]) for row in records_of(raw)] == expected


@pytest.mark.parametrize(
    ("content", "objective", "message"),
    [
        ("", "mine.py", "give a file and a class in it, such as mine.py:Distil"),
        ("", "gone.py:Distil", r"gone\.py:Distil cannot be imported: FileNotFoundError"),
        ("1 / 0", "mine.py:Distil", "cannot be imported: ZeroDivisionError"),
        ("Distil = 3", "mine.py:Distil", r"names no subclass of .*Objective\. .*mine\.py has none"),
        ("from headway.train.objective import Objective\nclass A(Objective): pass", "mine.py:B", "mine.py has A"),
        (
            EXAMPLE.read_text(),
            {"path": "mine.py:Distil", "options": {"master": 1}},
            r"does not take the options \['master'\]",
        ),
        (EXAMPLE.read_text(), {"path": "mine.py:Distil", "options": {"teacher": "gone/folder"}}, "gone/folder"),
        (
            EXAMPLE.read_text().replace('terms = ("agreements",)', "terms = ()"),
            {"path": "mine.py:Distil"},
            r"the sum 'agreements', but its attribute `terms` \(\) does not name",
        ),
    ],
)
def test_an_objective_that_cannot_be_had_is_refused(raw, tmp_path, monkeypatch, content, objective, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(content)
    own = raw["objective"]["options"]
    raw["objective"] = objective if isinstance(objective, str) else {"options": own, **objective}
    with pytest.raises(Exception, match=message) as raised:
        train(parse_config(raw))
    assert type(raised.value).__module__ == "headway.errors"


def test_a_resumed_run_refuses_another_file(raw, tmp_path, killed_before):
    mine = tmp_path / "mine.py"
    shutil.copy(EXAMPLE, mine)
    raw["objective"]["path"] = f"{mine}:Distil"
    raw["checkpoint"] = {"every": 1}
    killed_before(parse_config(raw), 2)
    mine.write_text(mine.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match=r"the run began with another .*mine\.py:Distil"):
        train(parse_config(raw), resume=True)


def test_two_objectives_are_one_too_many(raw):
    with pytest.raises(ConfigError, match=r"preference and objective both set the loss. Take one of them out"):
        parse_config({**raw, "preference": {}})


def test_a_plan_does_not_run_a_users_file(raw, tmp_path):
    """What strangers wrote in a recipe runs only where somebody trains by it."""
    from headway.models.load import load_model
    from headway.predict.predictor import Predictor
    from headway.tracing import trace

    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit")
    raw["objective"] = f"{mine}:Distil"
    config = parse_config(raw)
    ledger = trace(load_model(config.model.path, random_init=True, device="meta"))
    planned = Predictor.of(config, ledger).at(config, 1)
    assert any("computes beside the model is not planned" in note for note in planned.notes)
