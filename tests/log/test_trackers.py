"""What each tracker holds, read back by its own means, is what the JSONL holds."""

import builtins
import json
import math
import re
import shutil
import socket
import sys
import urllib.request

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.log import tensorboard
from headway.log.jsonl import read_jsonl
from headway.log.sinks import Sinks, open_sink
from headway.log.tensorboard import grouped
from headway.log.trackers import tracked
from headway.version import install_command
from helpers.runs import leave_settings_out, read_events, read_mlflow, read_wandb, wandb_history
from tools.site.records import example

# MLflow's models use a loader that SQLAlchemy 2.1 announces the end of; nothing that its user can change.
mlflow_warning = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

RECORDS = [
    {
        "kind": "step",
        "step": step,
        "step_s": 0.1 * step,
        "mfu": 0.1 + 0.2 / step,
        "flops": {"total": 3 * 2**40 + step, "recompute": 0},
        "flops_by_component": {"language.mlp": 2**41, "vision.attention": 2**40 + step},
        "is_warmup": step == 1,
        "joules": None,
        "convention": "useful/1",
        "peak_source": "datasheet of 2023" if step < 3 else "measured",
    }
    for step in (1, 2, 3)
] + [{"kind": "evaluation", "step": 3, "loss": 0.7}]


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch, tmp_path):
    leave_settings_out(monkeypatch, tmp_path)


def write_beside_jsonl(tmp_path, *specs, records=RECORDS):
    """Write the records to sinks and to a JSONL file; give back what the file holds."""
    path = tmp_path / "metrics.jsonl"
    with Sinks.open([path, *specs]) as sinks:
        for record in records:
            sinks.write(record)
    return read_jsonl(path)


def by_tag(records):
    """{tag: [(step, value), ...]} of all numbers, as a tracker should hold them."""
    series = {}
    for record in records:
        for name, number in tracked(record)[0].items():
            series.setdefault(name, []).append((record["step"], number))
    return series


def test_numbers_and_texts_have_their_names():
    numbers, texts = tracked(RECORDS[0])
    assert numbers == {
        "headway/step_s": 0.1,
        "headway/mfu": 0.1 + 0.2,
        "headway/flops/total": 3 * 2**40 + 1,
        "headway/flops/recompute": 0,
        "headway/flops_by_component/language.mlp": 2**41,
        "headway/flops_by_component/vision.attention": 2**40 + 1,
        "headway/is_warmup": 1,
    }
    assert texts == {"headway/convention": "useful/1", "headway/peak_source": "datasheet of 2023"}
    assert tracked(RECORDS[-1]) == ({"headway/evaluation/loss": 0.7}, {})


# TensorBoard


def test_tensorboard_holds_what_the_jsonl_holds(tmp_path):
    records = write_beside_jsonl(tmp_path, f"tensorboard:{tmp_path}/tb")
    events = read_events(tmp_path / "tb")
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    # TensorBoard's scalars are 32-bit floats
    kept = {grouped(tag): [(s, float(np.float32(v))) for s, v in pairs] for tag, pairs in by_tag(records).items()}
    assert found == kept
    assert {tag.partition("/")[0] for tag in found} == {"speed", "flops", "eval"}
    sources = [(e.step, e.tensor_proto.string_val[0]) for e in events.Tensors("speed/peak_source")]
    assert sources == [(1, b"datasheet of 2023"), (3, b"measured")]


def test_tensorboard_has_a_record_as_soon_as_it_is_written(tmp_path):
    with open_sink(f"tensorboard:{tmp_path}/tb") as sink:
        sink.write(RECORDS[0])
        assert [e.step for e in read_events(tmp_path / "tb").Scalars("speed/mfu")] == [1]


def test_steps_done_again_after_a_resume_replace_those_before_in_tensorboard(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    now_s = 1_700_000_000
    monkeypatch.setattr(event_file_writer.time, "time", lambda: now_s)  # a file's name has its second, which orders
    for steps, value in (([1, 2, 3, 4], 0.25), ([3, 4, 5], 0.5)):
        now_s += 60
        with open_sink(f"tensorboard:{tmp_path}/tb") as sink:
            for step in steps:
                sink.write({"step": step, "mfu": value})
    scalars = read_events(tmp_path / "tb").Scalars("speed/mfu")
    assert [(e.step, e.value) for e in scalars] == [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)]


class FrozenClock:
    """Time that passes only while somebody sleeps."""

    now_s = 1_700_000_000.25

    def time(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_a_run_opened_again_within_a_second_still_comes_after_itself_in_tensorboard(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    clock = FrozenClock()
    monkeypatch.setattr(event_file_writer, "time", clock)
    monkeypatch.setattr(tensorboard, "time", clock)
    steps = range(1, 13)  # TensorBoard numbers a process's files, and "10" is read before "9"
    for step in steps:
        with open_sink(f"tensorboard:{tmp_path}/tb") as sink:
            sink.write({"step": step, "loss": 0.5})
    assert [e.step for e in read_events(tmp_path / "tb").Scalars("train/loss")] == list(steps)


def test_runs_that_share_a_folder_do_not_merge_in_tensorboard_and_are_found_again(tmp_path):
    runs = [tmp_path / "a/run", tmp_path / "b/run", tmp_path / "c"]
    for step in (1, 2):
        for number, run in enumerate(runs):
            with open_sink(f"tensorboard:{tmp_path}/tb", run=run) as sink:
                sink.write({"step": step, "loss": float(number)})
    for name, number in (("run", 0), ("run-2", 1), ("c", 2)):
        scalars = read_events(tmp_path / "tb" / name).Scalars("train/loss")
        assert [(e.step, e.value) for e in scalars] == [(1, number), (2, number)]
    with open_sink(f"tensorboard:{tmp_path}/c/tb", run=runs[2]) as sink:
        sink.write({"step": 1, "loss": 1.0})
    assert read_events(tmp_path / "c/tb").Scalars("train/loss")  # a folder inside the run's is the run's own


# Weights & Biases


@pytest.fixture
def wandb_offline(monkeypatch):
    """W&B as a new process finds it, in offline mode: it reads its variables once."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield wandb
    wandb.teardown()


def ours(row):
    return {key: value for key, value in row.items() if key.startswith("headway/")}


def test_wandb_offline_files_hold_what_the_jsonl_holds(tmp_path, wandb_offline):
    records = write_beside_jsonl(tmp_path, "wandb:packing")
    rows = [ours(row) for row in wandb_history(tmp_path)]
    assert rows == [{"headway/step": record["step"], **tracked(record)[0]} for record in records]
    (run,) = [r.run for r in read_wandb(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert run.project == "packing"
    updates = [r.config for r in read_wandb(tmp_path) if r.WhichOneof("record_type") == "config"]
    config = {item.key: json.loads(item.value_json) for update in updates for item in update.update}
    assert config.items() >= {"headway/convention": "useful/1", "headway/peak_source": "measured"}.items()


def test_an_active_wandb_run_is_joined_and_left_open(tmp_path, wandb_offline):
    with wandb_offline.init(project="theirs") as run:
        with open_sink("wandb:ours") as sink:
            for step in (10, 20):
                run.log({"loss": 1.0 / step})  # the loop's own numbers
                sink.write({"step": step, "mfu": 0.25})
        run.log({"after": 1})
    rows = [{k: v for k, v in row.items() if not k.startswith("_")} for row in wandb_history(tmp_path)]
    assert rows == [
        {"loss": 0.1},
        {"headway/step": 10, "headway/mfu": 0.25},
        {"loss": 0.05},
        {"headway/step": 20, "headway/mfu": 0.25},
        {"after": 1},
    ]


def test_a_loop_that_gives_wandb_its_own_steps_loses_no_row(tmp_path, wandb_offline):
    with wandb_offline.init(project="theirs") as run, open_sink("wandb") as sink:
        for step in range(1, 7):
            run.log({"loss": 1.0 / step}, step=step)
            if step % 3 == 0:
                sink.write({"step": step, "mfu": 0.25})
    rows = wandb_history(tmp_path)
    assert [(row["_step"], row["loss"]) for row in rows] == [(step, 1.0 / step) for step in range(1, 7)]
    assert [row["_step"] for row in rows if row.get("headway/mfu") == 0.25] == [3, 6]


def test_wandb_asks_nobody_to_log_in(monkeypatch, wandb_offline):
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb_offline.teardown()
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match="W&B has no login key"):
        open_sink("wandb:packing")


# MLflow


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database with MLflow's tables, which take it seconds to make."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_uri(empty_store, tmp_path):
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'runs.db')}"


@mlflow_warning
def test_mlflow_database_holds_what_the_jsonl_holds(tmp_path, mlflow_uri):
    records = write_beside_jsonl(tmp_path, f"mlflow:{mlflow_uri}#packing")
    series, tags, status = read_mlflow(mlflow_uri, "packing")
    assert series == by_tag(records)  # 64-bit floats
    assert tags.items() >= {"headway/convention": "useful/1", "headway/peak_source": "measured"}.items()
    assert status == "FINISHED"


@pytest.mark.slow
@mlflow_warning
def test_an_active_mlflow_run_is_joined_and_left_open(mlflow_uri):
    import mlflow

    mlflow.set_tracking_uri(mlflow_uri)
    try:
        mlflow.set_experiment("theirs")
        with mlflow.start_run():
            with open_sink("mlflow") as sink:
                sink.write(RECORDS[0])
            assert read_mlflow(mlflow_uri, "theirs")[2] == "RUNNING"
    finally:
        mlflow.set_tracking_uri(None)  # stated, even the default would outlast the environment of later tests
    series, _, _ = read_mlflow(mlflow_uri, "theirs")
    assert series == by_tag(RECORDS[:1])


@pytest.mark.slow
@mlflow_warning
def test_a_resumed_process_goes_on_with_the_mlflow_run_that_is_named(mlflow_uri, monkeypatch):
    with open_sink(f"mlflow:{mlflow_uri}#packing") as sink:
        sink.write(RECORDS[0])
        run_id = sink.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    with open_sink(f"mlflow:{mlflow_uri}") as sink:
        sink.write(RECORDS[1])
        assert read_mlflow(mlflow_uri, "packing")[2] == "RUNNING"
    series, _, status = read_mlflow(mlflow_uri, "packing")
    assert (series, status) == (by_tag(RECORDS[:2]), "FINISHED")


@pytest.mark.slow
@mlflow_warning
def test_an_mlflow_run_that_takes_no_more_costs_a_warning_and_no_other_sink(mlflow_uri, tmp_path):
    from mlflow.tracking import MlflowClient

    sink = open_sink(f"mlflow:{mlflow_uri}#packing")
    path = tmp_path / "metrics.jsonl"
    sinks = Sinks.open([sink, path])
    MlflowClient(mlflow_uri).delete_run(sink.run_id)
    sinks.write(RECORDS[0])  # a thread finds out
    with pytest.warns(RuntimeWarning, match="MlflowSink failed: MlflowException: .*must be in the 'active' state"):
        sinks.close()
    assert len(read_jsonl(path)) == 1


@pytest.mark.slow
@mlflow_warning
def test_mlflow_failures_are_raised_by_the_next_write(mlflow_uri):
    from mlflow.tracking import MlflowClient

    sink = open_sink(f"mlflow:{mlflow_uri}#packing")
    MlflowClient(mlflow_uri).delete_run(sink.run_id)
    sink.write(RECORDS[0])
    (found_out,) = sink._pending
    assert found_out.exception(timeout=60) is not None
    with pytest.raises(Exception, match="must be in the 'active' state"):
        sink.write(RECORDS[1])
    sink.close()


@mlflow_warning
def test_an_mlflow_store_that_cannot_be_opened_is_an_error():
    with pytest.raises(ConfigError, match=r"MLflow cannot be opened: .*ftp"):
        open_sink("mlflow:ftp://nowhere#packing")


# Prometheus


def scrape(port):
    """{name: {labels: value}} of what a scrape gives, by Prometheus' own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_gives_the_last_record_of_the_jsonl(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open_sink("prometheus:127.0.0.1:0", rank=3) as prometheus, Sinks.open([path]) as jsonl:
        for record in RECORDS:
            prometheus.write(record)
            jsonl.write(record)
        found = scrape(prometheus.port)
    _, _, step, evaluation = read_jsonl(path)
    rank = {"rank": "3"}
    assert found == {
        "headway_step": (rank, 3.0),
        "headway_step_s": (rank, step["step_s"]),
        "headway_mfu": (rank, step["mfu"]),
        "headway_flops_total": (rank, float(step["flops"]["total"])),
        "headway_flops_recompute": (rank, 0.0),
        "headway_flops_by_component_language_mlp": (rank, 2.0**41),
        "headway_flops_by_component_vision_attention": (rank, 2.0**40 + 3),
        "headway_is_warmup": (rank, 0.0),
        "headway_evaluation_step": (rank, 3.0),
        "headway_evaluation_loss": (rank, evaluation["loss"]),
        "headway_info": ({**rank, "convention": "useful/1", "peak_source": "measured"}, 1.0),
    }


def test_a_server_that_asks_for_openmetrics_gets_the_same():
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    with open_sink("prometheus:127.0.0.1:0") as sink:
        sink.write(RECORDS[0])
        request = urllib.request.Request(
            f"http://127.0.0.1:{sink.port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        plain = scrape(sink.port)
    assert text.endswith("# EOF\n")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name: (sample.labels, sample.value) for sample in samples} == plain


def test_a_scrape_is_possible_before_the_first_record_and_of_what_is_not_finite():
    with open_sink("prometheus:127.0.0.1:0") as sink:
        assert scrape(sink.port) == {}
        sink.write({"step": 1, "loss": math.nan})
        assert math.isnan(scrape(sink.port)["headway_loss"][1])


def test_the_port_is_free_again_after_closing():
    with open_sink("prometheus:127.0.0.1:0") as sink:
        port = sink.port
    with open_sink(f"prometheus:127.0.0.1:{port}") as again:
        assert again.port == port


def test_a_taken_port_is_an_error_that_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be opened: Address already in use"):
            open_sink(f"prometheus:127.0.0.1:{port}")


@pytest.mark.parametrize("place", ["http", "-1", "localhost:"])
def test_a_port_that_is_none_is_an_error(place):
    with pytest.raises(ConfigError, match="names no port"):
        open_sink(f"prometheus:{place}")


def test_a_port_beyond_the_last_is_an_error():
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_sink("prometheus:127.0.0.1:70000")


def test_prometheus_listens_on_this_machine_alone_unless_told():
    for spec, address in (("prometheus:0", "127.0.0.1"), ("prometheus:0.0.0.0:0", "0.0.0.0")):
        with open_sink(spec) as sink:
            assert sink._server.server_address[0] == address


def test_two_names_that_are_one_to_prometheus_cost_that_sink_and_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Sinks.open([path, "prometheus:127.0.0.1:0"]) as sinks:
        with pytest.warns(
            RuntimeWarning, match="headway/a.b and headway/a/b would both be named headway_a_b in Prometheus"
        ):
            sinks.write({"step": 1, "a.b": 1, "a": {"b": 2}})
        sinks.write({"step": 2})
    assert len(read_jsonl(path)) == 2


# All of them


@pytest.mark.parametrize(
    ("spec", "package"),
    [
        ("tensorboard:tb", "tensorboard"),
        ("wandb:packing", "wandb"),
        ("mlflow:sqlite:///runs.db", "mlflow"),
        ("prometheus:0", "prometheus_client"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, spec, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    command = re.escape(install_command("trackers"))
    with pytest.raises(ConfigError, match=rf"needs {package}\S*, which is not installed.*{command}"):
        open_sink(spec)


def test_every_name_of_a_record_has_a_group_of_its_own_kind():
    """`train/` is for what the loop adds, such as its loss."""
    record = example().to_dict()
    of_the_loop = {"schema_version", "kind", "step"}
    assert {name for name in record if grouped(f"headway/{name}").startswith("train/")} == of_the_loop
    assert grouped("headway/phases/rollout/mfu") == "phases/rollout/mfu"
