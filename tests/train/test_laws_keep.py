"""What several real processes keep when one of them is killed, stopped, told to end or out of disk.

The yardstick is a run of one process that nobody interrupted: float32, the same packs in every step, so the same losses
and gradient norms to 1e-5 whatever number of processes took the step.
"""

import os
import random
import signal
import socket
import sys
import time
from contextlib import ExitStack

import pytest
import yaml

from headway.checkpoint import find_checkpoint
from headway.config import load_config
from headway.meter.goodput_report import read_goodput
from headway.models.parallel.ranks import Ranks
from headway.train.check import check_run
from headway.train.run import train
from helpers.cases import IS_QUICK
from helpers.processes import ROOT, TRAIN, free_port, run_processes, running, start_processes
from helpers.runs import read_metrics

STEPS, PACKS = 9 if IS_QUICK else 15, 4
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def recipe(digits, tmp_path_factory):
    """A configuration of four packs a step that saves every third step; one process takes them in turn."""
    path = tmp_path_factory.mktemp("keep") / "recipe.yaml"
    raw = {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {
            "train": [{"path": str(digits / "data/train.jsonl")}],
            "tokens_per_pack": 160,
            "strategy": "best_fit",  # the same packs in a step, whoever computes them
            "workers": 0,
            "prefetch_bytes": 0,
        },
        "optim": {"steps": STEPS, "lr": 2e-3, "warmup_steps": 2, "accumulation": PACKS, "ema": {"decay": 0.9}},
        "checkpoint": {"every": 3, "keep": 2},
        "run": {"folder": str(path.parent / "alone"), "device": "cpu", "threads": 1, "watchdog_s": 200.0},
    }
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def alone(recipe):
    """Losses and gradient norms of one process that nobody interrupted."""
    config = load_config(recipe)
    train(config)
    return curve(config.run.folder)


def curve(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r["loss"], r["grad_norm"], r["flops"]["total"]) for r in records if r["kind"] == "step"]


def assert_same(found, expected):
    assert [row[0] for row in found] == [row[0] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-5), f"step {ours[0]}"
        assert ours[3] == theirs[3], f"step {ours[0]}"


def arguments(recipe, folder, processes, *more):
    settings = [f"run.folder={folder}", f"optim.accumulation={PACKS // processes}"]
    return [recipe, *(part for setting in settings for part in ("--set", setting)), "--resume-if-any", *more]


SIGNALLED = """
import os, sys, threading
from headway.cli.app import main
from headway.train import loop
from headway.train import run as run_module
number, rank, at, delay_s = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
original = loop.learning_rate
def rate(step, *settings):
    if step == int(at) and os.environ["RANK"] == rank:
        threading.Timer(float(delay_s), os.kill, (os.getpid(), int(number))).start()
    return original(step, *settings)
loop.learning_rate = rate
main()
"""


def signalled(number, rank, step, delay_s=0.0):
    """The program in which a rank gets a signal so long after the start of a step."""
    return [sys.executable, "-c", SIGNALLED, int(number), rank, step, delay_s, "train"]


class Started:
    """Processes of one run, with what each says kept in files."""

    def __init__(self, command, count, tmp_path):
        said = tmp_path / f"said-{count}"
        said.mkdir()
        self.said = [said / f"{rank}.err" for rank in range(count)]
        self.processes = start_processes(command, count, said)

    def end(self):
        """How each ended; none may hang."""
        return [process.wait(timeout=240) for process in self.processes]

    def texts(self):
        return [path.read_text() for path in self.said]


# so late that the second save has waited for the first
@pytest.mark.parametrize("kills", [[(2, 8)], pytest.param([(4, 8), (2, 13)], marks=pytest.mark.slow)], ids=len)
def test_a_killed_rank_ends_the_others_and_fewer_processes_go_on_with_the_same_losses(recipe, alone, tmp_path, kills):
    folder = tmp_path / "run"
    for processes, kill_at in kills:
        program = signalled(signal.SIGKILL, processes - 1, kill_at, random.Random(processes).uniform(0.0, 0.2))
        run = Started([*program, *arguments(recipe, folder, processes)], processes, tmp_path)
        codes = run.end()
        assert codes[-1] == -signal.SIGKILL, "the run ended before it could be killed"
        assert set(codes[:-1]) == {1}
        for text in run.texts()[:-1]:
            assert "another rank ended or did not answer in step" in " ".join(text.split())
            assert "Traceback" not in text
        saved = find_checkpoint(folder / "checkpoints", Ranks(0, 1))
        assert saved.step in range(kill_at - 5, kill_at)
        assert saved.world_size == processes
        assert saved.mesh["shard"] == processes
    run_processes([*TRAIN, *arguments(recipe, folder, 1)], 1)
    assert_same(curve(folder), alone)
    assert read_goodput(folder).restarts == len(kills)


KILLED_WHILE_SAVING = """
import os, signal, sys
from headway.cli.app import main
from headway.checkpoint import saver
stage, rank = sys.argv.pop(1), sys.argv.pop(1)
original, calls = getattr(saver, stage), []
def die(*arguments):
    calls.append(1)
    if len(calls) == 2 and os.environ["RANK"] == rank:
        if stage == "entries":
            half = arguments[0] / f"__{rank}_0.distcp"
            half.write_bytes(half.read_bytes()[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(saver, stage, die)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "rank"),
    [
        ("publish", 0),
        pytest.param("entries", 1, marks=pytest.mark.long),
        pytest.param("seal", 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_killed_in_the_middle_of_saving_leaves_the_checkpoint_before(recipe, alone, tmp_path, stage, rank):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, stage, rank, "train", *arguments(recipe, folder, 2)]
    run = Started(command, 2, tmp_path)
    codes = run.end()
    assert codes[rank] == -signal.SIGKILL, run.texts()
    assert codes[1 - rank] == 1
    assert "Traceback" not in run.texts()[1 - rank]
    whole = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert whole == ["step-000003"]
    run_processes([*TRAIN, *arguments(recipe, folder, 2)], 2)
    assert not list((folder / "checkpoints").glob(".step-*"))
    assert_same(curve(folder), alone)


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_the_watchdog_of_the_other(recipe, alone, tmp_path):
    folder = tmp_path / "run"
    program = signalled(signal.SIGSTOP, 1, 5)
    run = Started([*program, *arguments(recipe, folder, 2, "--set", "run.watchdog_s=30.0")], 2, tmp_path)
    assert run.processes[0].wait(timeout=240) == 1
    run.processes[1].send_signal(signal.SIGKILL)
    run.processes[1].wait()
    said = " ".join(run.texts()[0].split())
    assert "rank 0 has made no progress for" in said
    assert "(run.watchdog_s is 30) in step" in said
    traces = (folder / "hung-rank-0.txt").read_text()
    assert "most recent call first" in traces
    assert "loop.py" in traces
    assert not (folder / "hung-rank-1.txt").exists()
    run_processes([*TRAIN, *arguments(recipe, folder, 1)], 1)
    assert_same(curve(folder), alone)


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_and_ends_all_with_0(recipe, alone, tmp_path):
    folder = tmp_path / "run"
    run = Started([*signalled(signal.SIGTERM, 1, 5), *arguments(recipe, folder, 2)], 2, tmp_path)
    assert run.end() == [0, 0], run.texts()
    steps = len(curve(folder))
    assert 5 <= steps < STEPS, "the run ended before it could be stopped"
    assert f"stopped by SIGTERM after step {steps}" in run.texts()[0]
    assert find_checkpoint(folder / "checkpoints", Ranks(0, 1)).step == steps
    run_processes([*TRAIN, *arguments(recipe, folder, 2)], 2)
    assert_same(curve(folder), alone)


FULL_DISK_OF_ONE_RANK = """
import os, resource, signal
from headway.cli.app import main
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["ROOM"]), resource.RLIM_INFINITY))
main()
"""


@pytest.mark.parametrize("room", [20_000, 80_000])  # in a file of Headway's and, with words of its own, in PyTorch's
def test_a_full_disk_under_one_rank_ends_all_with_the_reason(recipe, tmp_path, monkeypatch, room):
    monkeypatch.setenv("ROOM", str(room))
    folder = tmp_path / "run"
    command = [sys.executable, "-c", FULL_DISK_OF_ONE_RANK, "train", *arguments(recipe, folder, 2)]
    run = Started(command, 2, tmp_path)
    assert run.end() == [1, 1]
    for text in run.texts():
        assert "cannot write the checkpoint of step 3" in " ".join(text.split())
        assert "File too large (rank 1)" in " ".join(text.split())
        assert "Traceback" not in text
    assert not list((folder / "checkpoints").iterdir())


DIES_WITH_ITS_AGENT = """
import os, signal
from headway.cli.app import main
from headway.train import loop
from headway.train import run as run_module
original = loop.learning_rate
def rate(step, *settings):
    if step == 8:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(step, *settings)
loop.learning_rate = rate
main()
"""


class Agents:
    """torchruns of one run on loopback, each a machine of its own to the others."""

    def __init__(self, said, train):
        self.port = free_port()
        self.said, self.train, self.running, self.until_end = said, train, [], ExitStack()

    def start(self, program):
        """Start a torchrun whose one process runs a program of Python's."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "keep"]
        # a machine counts as gone after two missed signs of life, one a second, instead of three in fifteen
        meeting += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2", "--max-restarts", "1"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as docs/many-gpus.md says, with the reason
        with (self.said / f"agent-{len(self.running)}").open("w") as file:
            whole = [*command, "--no-python", sys.executable, *program, "train", *map(str, self.train)]
            started = running(whole, env=environment, stdout=file, stderr=file)
            self.running.append(self.until_end.enter_context(started))
        return self.running[-1]

    def wait_for_store(self):
        """Wait until the first agent listens, so that it is the one that hosts the meeting place."""
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            with socket.socket() as caller:
                if caller.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(self.texts())

    def texts(self):
        return [(self.said / f"agent-{number}").read_text() for number in range(len(self.running))]


@pytest.mark.long
def test_a_killed_machine_comes_back_and_the_run_goes_on_with_the_same_losses(recipe, alone, tmp_path):
    folder = tmp_path / "run"
    agents = Agents(tmp_path, arguments(recipe, folder, 2))
    with agents.until_end:
        first = agents.start(["-m", "headway"])
        agents.wait_for_store()
        second = agents.start(["-c", DIES_WITH_ITS_AGENT])
        assert second.wait(timeout=300) == -signal.SIGKILL, agents.texts()
        taken = [step for step, *_ in curve(folder)]
        assert 6 <= taken[-1] < 8, "it was killed in step 8, after the checkpoint of step 3"
        again = agents.start(["-m", "headway"])
        assert [agent.wait(timeout=300) for agent in (first, again)] == [0, 0], agents.texts()
    assert "another rank ended or did not answer in step" in " ".join(agents.texts()[0].split())
    assert_same(curve(folder), alone)
    records = read_metrics(folder / "metrics.jsonl")
    assert {record["world_size"] for record in records if record["kind"] == "step"} == {2}
    assert read_goodput(folder).restarts == 1


KILLED_AGAIN_AND_AGAIN = """
import os, random, signal, threading
from headway.cli.app import main
from headway.train import loop
from headway.train import run as run_module
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
rng = random.Random(attempt)
victim, steps, in_set_up = rng.randrange(2), rng.randrange(1, 5), attempt % 4 == 2
delay_s = rng.uniform(0.0, 2.0 if in_set_up else 0.05)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
taken = []
original = loop.learning_rate
def rate(step, *settings):
    taken.append(step)
    if not in_set_up and len(taken) == steps:
        threading.Timer(delay_s, die).start()
    return original(step, *settings)
if attempt < int(os.environ["KILLS"]) and rank == victim:
    loop.learning_rate = rate
    if in_set_up:
        original_prepare = run_module.prepare
        def prepare(*arguments, **settings):
            threading.Timer(delay_s, die).start()
            return original_prepare(*arguments, **settings)
        run_module.prepare = prepare
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_torchrun_starts_killed_ranks_again_and_the_run_goes_on_with_the_same_losses(recipe, alone, tmp_path, kills):
    """A rank is killed without a warning, amid a step, a checkpoint or the set-up; torchrun starts both anew."""
    folder, whole, settings = tmp_path / "run", load_config(recipe).run.folder, []
    if kills > 1:  # a longer run, or it would end before it has been killed so often
        whole, settings = tmp_path / "whole", [f"optim.steps={5 * kills}"]
        train(load_config(recipe, (*settings, f"run.folder={whole}")))
    # A checkpoint a step, as most attempts live for no more than a few.
    settings += ["checkpoint.every=1", "run.watchdog_s=120.0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(kills), "--no-python", sys.executable, "-c", KILLED_AGAIN_AND_AGAIN, "train"]
    command += arguments(recipe, folder, 2, *(part for setting in settings for part in ("--set", setting)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "KILLS": str(kills)}
    with (tmp_path / "said").open("w") as said, running(command, env=environment, stdout=said, stderr=said) as agent:
        code = agent.wait(timeout=120 * (kills + 1))
    text = (tmp_path / "said").read_text()
    assert code == 0, text
    assert "Traceback" not in text, text
    # of a kill, the agent names the rank that it sees end first: the killed one, or the one that was left alone (1)
    assert text.count("failed (exitcode: -9)") + text.count("failed (exitcode: 1)") == kills, text
    assert_same(curve(folder), curve(whole))
    found = check_run(folder, whole)
    assert (found.faults, found.others, found.checkpoints) == ((), found.steps, 2)
