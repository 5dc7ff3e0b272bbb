"""Scalars for TensorBoard, which makes a panel of the first word of each name.

So names have a group there, `train/loss`, `speed/mfu`, `data/fill`, `eval/loss`, where other trackers have `headway/`.
"""

import itertools
import re
import time
from pathlib import Path

from headway.log.trackers import PREFIX, Tracker, opening

_GROUPS = {
    "speed": (
        "wall_s", "step_s", "away_s", "left_out_s", "num_left_out", "num_steps", "tokens_per_s", "slots_per_s",
        "images_per_s", "patches_per_s", "flops_per_s", "tokens_per_s_per_device", "slots_per_s_per_device",
        "flops_per_s_per_device", "mfu", "hfu", "mbu", "mfu_of_ceiling", "bytes_moved", "peak_flops_per_s",
        "peak_dtype", "peak_source", "convention", "world_size", "energy_j", "joules_per_token", "peak_memory_bytes",
        "compiled", "recompiles", "recompile_guards", "is_warmup", "supervised_per_s", "mfu_of_all_devices",
        "compile_s", "evaluation_s", "checkpoint_s", "collection_s", "num_profiled", "num_sampled", "phases_s",
        "host_s", "host_lead_s", "num_skipped", "device_memory_bytes", "weights_dtype", "optimizer", "places",
        "anomaly_mode", "machine_state", "extra_passes", "core_wait_s",
    ),
    "data": (
        "tokens", "slots", "segments", "images", "videos", "patches", "audio_frames", "packs", "fill", "padding_share",
        "data_wait_s", "data_wait_share", "samples_digest", "supervised", "audio_clips", "latent_patches",
    ),
    "ranks": (
        "balance", "straggler_share", "heaviest_rank", "heaviest_rank_load", "slowest_rank", "slowest_rank_speed",
        "rank_flops", "rank_flops_per_busy_s", "late_rank", "late_rank_s", "late_rank_phase",
    ),
    "phases": ("phases",),
    "flops": ("flops", "flops_by_component", "flops_share_by_component"),
}  # fmt: skip
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}


def grouped(name: str) -> str:
    """The name in TensorBoard of a number that other trackers call `headway/...`, its group first.

    >>> [grouped(f"headway/{name}") for name in ("loss", "mfu", "flops/total", "evaluation/loss")]
    ['train/loss', 'speed/mfu', 'flops/total', 'eval/loss']
    """
    inside = name.removeprefix(f"{PREFIX}/")
    first, _, name_in_group = inside.partition("/")
    if first == "evaluation":
        return f"eval/{name_in_group}"
    if first == "answers":
        return f"eval/{inside}"
    group = _GROUP_OF.get(first.removesuffix("_smoothed"), "train")
    return inside if group == first else f"{group}/{inside}"


class TensorBoardSink(Tracker):
    """Scalars in a folder of TensorBoard events, in the hands of the system when `write` returns.

    TensorBoard keeps scalars as 32-bit floats. When a run is resumed into the same folder, the steps that are done
    again replace those of before.

    Args:
        folder: log folder.

    Raises:
        ConfigError: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with opening("TensorBoard"):
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            _wait_for_a_second_of_its_own(folder)
            self._writer = EventFileWriter(str(folder))
        self._has_begun = False

    @classmethod
    def parse(cls, place: str, *, run: Path | None = None) -> "TensorBoardSink":
        """Open from "FOLDER"; several runs have a folder each in it."""
        with opening("TensorBoard"):
            return cls(Path(place) if run is None else _folder_of_run(Path(place), run))

    def _log(self, step: int, numbers: dict[str, int | float], texts: dict[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        now_s = time.time()
        if not self._has_begun:  # makes TensorBoard drop what earlier files hold from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now_s, step=step, session_log=start))
            self._has_begun = True
        values = [Summary.Value(tag=grouped(name), simple_value=number) for name, number in numbers.items()]
        self._writer.add_event(Event(wall_time=now_s, step=step, summary=Summary(value=values)))
        for name, text in texts.items():
            self._writer.add_event(Event(wall_time=now_s, step=step, summary=text_pb(grouped(name), text)))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _wait_for_a_second_of_its_own(folder: Path) -> None:
    """Event files are read in the order of their names, which say the second and then nothing that keeps order."""
    now_s = time.time()
    if any(re.match(rf"events\.out\.tfevents\.0*{int(now_s)}\.", path.name) for path in folder.glob("events.*")):
        time.sleep(1 - now_s % 1)


def _folder_of_run(folder: Path, run: Path) -> Path:
    """A run's own folder among the folders of runs that log to one place, found again when the run goes on."""
    place = str(run.resolve())
    if folder.resolve().is_relative_to(run.resolve()):
        return folder
    for number in itertools.count(1):
        own = folder / (run.name if number == 1 else f"{run.name}-{number}")
        note = own / "run.txt"
        if not own.exists():
            own.mkdir(parents=True)
            note.write_text(f"{place}\n", encoding="utf-8")
        if note.is_file() and note.read_text(encoding="utf-8").strip() == place:
            return own
    raise AssertionError("numbers do not end")
