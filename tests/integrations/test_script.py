"""Any script under `headway run`: it computes, prints and ends as without, and is billed what it computes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from headway.log.records import read_records
from headway.meter.goodput_report import read_goodput
from helpers.processes import PYTHONPATH, free_port, run_processes

COMMAND = [sys.executable, "-P", "-m", "headway", "run"]
LINE = "headway run: "


ENVIRONMENT = {"HEADWAY_PEAK_FLOPS": "1e12", "COLUMNS": "200"}


def start(command, folder):
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


ENDINGS = {
    "returns": "import sys, os; print(sys.argv, __name__, __file__, sys.path[0], 'PYTHONSAFEPATH' in os.environ)",
    "exits": "import sys, atexit; atexit.register(print, 'bye'); sys.exit(3)",
    "exits with a word": "import sys; sys.exit('no data')",
    "raises": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error",
    "is no Python": "x = = 1",
    "is interrupted": "import signal; print('a'); signal.raise_signal(signal.SIGINT)",
    "is ended": "import signal; print('a', flush=True); signal.raise_signal(signal.SIGTERM)",
    "starts a worker": (
        "import multiprocessing\ndef square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(square, [3]))"
    ),
}


@pytest.mark.parametrize(
    ("ending", "is_module"), [*dict.fromkeys(ENDINGS, False).items(), ("returns", True), ("raises", True)]
)
def test_a_script_prints_and_ends_as_python_lets_it(ending, is_module, tmp_path):
    (tmp_path / "script.py").write_text(ENDINGS[ending])
    program = [*(["-m", "script"] if is_module else ["script.py"]), "--lr", "1", "-o", "x", "--", "-o", "y"]
    plain = start([sys.executable, *program], tmp_path)
    metered = start([*COMMAND, *program], tmp_path)
    assert (metered.returncode, metered.stdout) == (plain.returncode, plain.stdout)
    said, _, line = metered.stderr.rpartition(LINE)
    if ending == "is ended":
        assert metered.stderr == plain.stderr
        assert metered.returncode == -signal.SIGTERM
    else:
        assert said == plain.stderr
        assert line == "nothing was metered, as no optimizer of torch took a third step.\n"


def test_a_script_that_is_not_there_is_wrong_use(tmp_path):
    done = start([*COMMAND, "script.py"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "Error: There is no script script.py. Check the path. A module needs -m.\n"


HEAD = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.rows, self.columns = nn.Linear(16, width), nn.Linear(width, 4)
    def forward(self, x):
        return self.columns(nn.functional.dropout(self.rows(x).relu(), 0.1, self.training))

def data(rows=8, batch=4, **options):
    return torch.utils.data.DataLoader(torch.randn(rows, 16), batch_size=batch, **options)

def update(loss, *optimizers):
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


def cost(rows, width=24, *, forwards=0, grad_of_input=False):
    """FLOPs of a Net by hand: two products forward, their weights' gradients, that of the hidden states."""
    first, second = 2 * rows * 16 * width, 2 * rows * width * 4
    return 2 * (first + second) + second + grad_of_input * first + forwards * (first + second)


SCRIPTS = {
    "accumulates, evaluates and saves the model": (
        """
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
for epoch in range(4):
    net.train()
    for number, batch in enumerate(data(16)):
        loss = net(batch).square().mean()
        print(loss.item().hex())
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        print(sum(net(batch).sum().item() for batch in data()).hex())
torch.save(net, "net.pt")
assert b"headway" not in open("net.pt", "rb").read()
print(torch.load("net.pt", weights_only=False)(torch.ones(1, 16)).sum().item().hex())
""",
        [2 * cost(4)] * 6,
    ),
    "trains two models against each other, beside a frozen one": (
        """
one, other, teacher = Net(), Net(32), Net().requires_grad_(False)
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, other)]
for step in range(6):
    x = torch.randn(4, 16)
    update((other(x) - teacher(x)).square().mean(), optimizers[1])
    update(one(x).mean(), optimizers[0])
    print(other(x).detach().sum().item().hex())
""",
        [cost(4, 32, forwards=1) + cost(4) + 2 * 4 * (16 * 24 + 24 * 4)] * 4,
    ),
    "goes on with another model": (
        """
for width in (24, 32):
    net = Net(width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        loss = net(torch.randn(4, 16)).mean()
        print(loss.item().hex())
        update(loss, optimizer)
""",
        [cost(4)] * 3 + [cost(4, 32)] * 3,
    ),
    "skips updates": (
        """
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
for step in range(6):
    loss = net(torch.randn(4, 16)).mean() * (torch.inf if step == 3 else 1)
    print(loss.item())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        [cost(4), 2 * cost(4), cost(4)],
    ),
}


def both(script, folder, count=1):
    """Run a script without Headway and with it, of which the records come too."""
    path = folder / "script.py"
    path.write_text(HEAD + script)
    plain = run_processes([sys.executable, path, "a"], count, cwd=folder, env=ENVIRONMENT)
    command = [sys.executable, "-m", "headway", "run", "-o", folder / "run", path, "a"]
    metered = run_processes(command, count, cwd=folder, env=ENVIRONMENT)
    assert [part.stdout for part in metered] == [part.stdout for part in plain]
    assert plain[0].stdout
    path = folder / "run" / "metrics.jsonl"
    return metered, [r for r in read_records(path) if r["kind"] == "step"] if path.exists() else []


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_computes_the_same_bits_and_is_billed_what_it_computes(what, tmp_path):
    script, flops = SCRIPTS[what]
    (metered,), records = both(script, tmp_path)
    assert metered.stderr.count(LINE) == 1, metered.stderr
    assert f"headway report {tmp_path / 'run'}" in metered.stderr
    assert [record["flops"]["total"] for record in records] == flops
    if "evaluates" in what:
        assert sum(record["evaluation_s"] for record in records) > 0
        assert sum(record["data_wait_s"] for record in records) > 0
        assert "% of the time waited for data" in metered.stderr


@pytest.mark.parametrize("around", ["net", "net.forward"])  # as a script writes autocast, and as Accelerate does
def test_a_step_under_autocast_is_judged_by_the_peak_of_its_products(around, tmp_path):
    script = f"""
net = Net()
{around} = torch.autocast("cpu", torch.bfloat16)({around})
optimizer = torch.optim.SGD(net.parameters() if isinstance(net, nn.Module) else net.__wrapped__.parameters(), lr=0.1)
for step in range(5):
    outputs = net(torch.ones(4, 16)).float()
    loss = nn.MSELoss()(outputs, torch.zeros_like(outputs))
    print(loss.item().hex())
    update(loss, optimizer)
"""
    both(script, tmp_path)
    assert json.loads((tmp_path / "run/run.json").read_text())["peak"]["dtype"] == "bf16"


def test_what_cannot_be_counted_is_one_warning_and_the_script_goes_on(tmp_path):
    script = """
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    loss = lambda weights: torch.func.functional_call(net, weights, torch.ones(4, 16)).mean()
    grads = torch.func.grad(loss)(dict(net.named_parameters()))
    for name, parameter in net.named_parameters():
        parameter.grad = grads[name]
    optimizer.step()
    print(sum(p.sum().item() for p in net.parameters()).hex())
"""
    (metered,), records = both(script, tmp_path)
    assert metered.stderr.count("Warning") == 1
    assert "torch.func" in metered.stderr
    assert {record["flops"]["total"] for record in records} == {0}


ODD = {
    # the class's method, the call, words of a warning, warnings, records
    "parameters that cannot be listed": ("def parameters(self): raise ValueError('none')", "{}(x)", "none", 1, 0),
    "parts that cannot be listed": ("def modules(self): raise ValueError('none')", "{}(x)", "none", 1, 0),
    "no hash": ("def __hash__(self): raise ValueError('none')", "{}(x)", "none", 1, 0),
    "complex weights": ("", "{}(x).abs()", "complex64", 2, 3),
    "a scripted model": ("", "torch.jit.script({})(x)", "ScriptModules", 1, 0),
    "odd arguments": ("def forward(self, x): return super().forward(x.x)", "{}(Odd(x))", "requires_grad", 1, 3),
    "odd results": ("def forward(self, x): return Odd(super().forward(x))", "{}(x).x", "The phases of", 2, 3),
    "an iterator": ("def forward(self, x): return iter([super().forward(x)])", "next({}(x))", "list_iterator", 1, 3),
    "no rows": ("", "{}(x[:0])", "", 0, 3),
    "sparse rows": ("def forward(self, x): return torch.sparse.mm(x, self.weight)", "{}(x.to_sparse())", "_mm", 1, 3),
    "a thread": ("", "threaded({}, x)", "", 0, 3),
    "a failure": ("", "failing({}, x)", "", 0, 3),
}


@pytest.mark.parametrize("what", ODD)
def test_no_hook_ends_a_script_with_odd_modules_and_arguments(what, tmp_path):
    method, call, warning, num_warnings, num_records = ODD[what]
    dtype = "torch.complex64" if "complex" in what else "torch.float32"
    script = f"""
import concurrent.futures, contextlib, warnings
warnings.filterwarnings("error", category=RuntimeWarning)

class Odd:
    def __init__(self, x): self.x = x
    def __getattr__(self, name): raise ValueError(name)
    __len__ = __bool__ = __hash__ = __repr__ = __iter__ = lambda self: 1 / 0
    __eq__ = lambda self, other: 1 / 0

class OddNet(nn.Linear):
    {method or "pass"}

def threaded(net, x):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return pool.submit(net, x).result()

def failing(net, x):
    with contextlib.suppress(RuntimeError):
        net(x[:, :3])
    return net(x)

net = OddNet(4, 4, dtype={dtype})
optimizer = torch.optim.SGD([net.weight, net.bias], lr=0.1)
for step in range(5):
    x = torch.randn(4, 4, dtype={dtype})
    loss = {call.format("net")}.sum()
    print(loss.item().hex())
    update(loss, optimizer)
"""
    (metered,), records = both(script, tmp_path)
    assert warning in metered.stderr
    assert metered.stderr.count(f"{LINE}Warning: ") == num_warnings
    assert len(records) == num_records


@pytest.mark.dist
def test_ranks_are_metered_together_and_the_first_one_tells(tmp_path):
    script = """
import torch.distributed as dist
dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(6):
    loss = net(torch.randn(4 + dist.get_rank(), 16)).square().mean()
    print(loss.item().hex())
    update(loss, optimizer)
dist.destroy_process_group()
"""
    (first, second), records = both(script, tmp_path, count=2)
    assert (first.stderr.count(LINE), second.stderr.count(LINE)) == (1, 0)
    assert [record["rank_flops"] for record in records] == [[cost(4), cost(5)]] * 4


def test_a_program_sets_what_torch_reads_as_it_is_imported_and_may_be_profiled(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport sys\nassert 'numpy' not in sys.modules\n"
        + HEAD
        + "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        + "for batch in data(72, num_workers=1):\n    update(net(batch).mean(), optimizer)\n"
        + "class Rows(torch.utils.data.Dataset):\n"
        + "    def __len__(self): return 2\n    def __getitem__(self, i): raise OSError('torn')\n"
        + "next(iter(torch.utils.data.DataLoader(Rows())))\n"
    )
    plain = start([sys.executable, "script.py"], tmp_path)
    metered = start([*COMMAND, "-o", "run", "--profile", "script.py"], tmp_path)
    assert metered.returncode == plain.returncode == 1
    traceback = metered.stderr[metered.stderr.index("Traceback") : metered.stderr.rindex(LINE)]
    assert traceback == plain.stderr
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["steps-000012-000014-rank-0.json.gz"]
    assert json.loads((tmp_path / "run/run.json").read_text())["model"]["class"] == "Net"
    assert read_goodput(tmp_path / "run").failure == "OSError: torn"


NET = """
net = Net(WIDTH)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
LOOP = """
for batch in data(4 * STEPS):
    update(net(batch).mean(), optimizer)
"""


def test_each_cell_of_a_notebook_that_trains_has_a_run_of_its_own(tmp_path, monkeypatch, capsys):
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e12")
    shell = interactive.InteractiveShell()

    def run(cell):
        """Run a cell; returns its error, its lines, and the FLOPs of the records that a line names."""
        result = shell.run_cell(cell)
        lines = [line for line in capsys.readouterr().out.splitlines() if "headway report" in line]
        paths = [tmp_path / re.search("headway report (.*)", line)[1] / "metrics.jsonl" for line in lines]
        return result.error_in_exec, lines, [r["flops"]["total"] for path in paths for r in read_records(path)]

    shell.run_line_magic("load_ext", "headway")
    assert run(HEAD) == (None, [], [])
    assert run("WIDTH, STEPS = 24, 6" + NET)[1:] == ([], [])
    error, lines, flops = run(LOOP)  # the first two steps of a cell find its model
    assert (error, flops) == (None, [cost(4)] * 4)
    assert "% of the time waited for data" in lines[0]
    assert run("WIDTH, STEPS = 32, 5" + NET + LOOP)[2] == [cost(4, 32)] * 3
    error, lines, flops = run(LOOP + "raise KeyError(3)")
    assert (type(error), len(lines), flops) == (KeyError, 1, [cost(4, 32)] * 3)
    failures = [read_goodput(folder).failure for folder in sorted((tmp_path / "runs").iterdir())]
    assert failures == ["", "", "KeyError: 3"]
    assert len({*(tmp_path / "runs").iterdir()}) == 3
    shell.run_line_magic("unload_ext", "headway")
    assert run(LOOP) == (None, [], [])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_ranks_that_a_launcher_starts_are_one_run_also_if_one_has_no_rows(tmp_path, launcher):
    count = {"torchrun": 3, "accelerate": 1}[launcher]
    (tmp_path / "script.py").write_text(
        HEAD
        + """
import torch.distributed as dist
if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(6):
    rows = 0 if (dist.get_rank(), step) == (2, 4) else 4 + dist.get_rank()
    loss = net(torch.randn(rows, 16)).square().sum()
    update(loss, optimizer)
with open(f"rank-{dist.get_rank()}", "w") as file:
    file.write(f"{sum(p.sum().item() for p in net.parameters()).hex()} {sys.argv[1:]}")
dist.destroy_process_group()
"""
    )
    port = free_port()
    launch = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", count, f"--master-port={port}", "--no-python"],
        "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", count, "--no_python"],
    }[launcher]
    done = start([sys.executable, *launch, *COMMAND, "-o", "run", "script.py", free_port()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1, done.stderr
    assert len({(tmp_path / f"rank-{rank}").read_text() for rank in range(count)}) == 1
    records = [r for r in read_records(tmp_path / "run/metrics.jsonl") if r["kind"] == "step"]
    every = [[cost(4 + rank) for rank in range(count)] for _ in range(4)]
    if count == 3:
        every[2][2] = 0  # the fifth step, of which the first two have no numbers
    assert [record["rank_flops"] for record in records] == every
