"""Messages name arguments in the words of whoever asks: Python, a command, a configuration."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from headway.data.bad_rows import sample_error
from headway.data.pool import Job, Pool
from headway.data.samples import Origin, SampleError
from headway.errors import ConfigError, DataError, UsageError, errors_in
from headway.packing.budget import Budget, Size, over_budget
from headway.predict.lengths import no_lengths
from headway.train.run_folder import refuse_existing_run
from headway.words import RUN_KEYS, Argument, Keys, Options, adopt, current_words, speaking

OPTIONS = Options({"freeze": "--freeze", "resume": "--resume", "resume=None": "--resume-if-any"}, assigns="--set")


@pytest.mark.parametrize(
    ("argument", "python", "option", "key"),
    [
        (Argument("freeze"), "freeze", "--freeze", "model.freeze"),
        (Argument("freeze", "nope"), "freeze='nope'", "--freeze nope", "model.freeze: nope"),
        (Argument("freeze", ("a", "b")), "freeze=('a', 'b')", "--freeze a --freeze b", "model.freeze: ('a', 'b')"),
        (Argument("freeze", 0.0), "freeze=0.0", "--freeze 0", "model.freeze: 0"),
        (Argument("freeze", example="PATTERN"), "freeze=PATTERN", "--freeze PATTERN", "model.freeze: PATTERN"),
        (Argument("resume", True), "resume=True", "--resume", "resume=True"),
        (Argument("resume", example="None"), "resume=None", "--resume-if-any", "resume=None"),
        (Argument("run.folder", example="X"), "run.folder=X", "--set run.folder=X", "run.folder=X"),
        (Argument("run.device", "cpu"), "run.device=cpu", "run.device=cpu", "run.device=cpu"),
        (Argument("optim.lr"), "optim.lr", "optim.lr", "optim.lr"),
    ],
)
def test_an_argument_is_said_by_python_options_and_keys(argument, python, option, key):
    assert str(argument) == f"{argument}" == python
    with speaking(OPTIONS):
        assert str(argument) == option
    with speaking(RUN_KEYS):
        assert str(argument) == key
    assert str(argument) == python


def test_the_words_within_go_before_those_around():
    with speaking(OPTIONS), speaking(Keys({"resume": "run.resume"}, {})):
        assert f"{Argument('resume', True)} {Argument('freeze', 'x')}" == "run.resume: true --freeze x"


def test_an_error_carries_what_was_wrong_as_fields():
    error = UsageError("no ", Argument("freeze", "nope"), " in ", Argument("model"), choices=["vision", "language"])
    assert (error.parameter, error.value, error.choices) == ("freeze", "nope", ("vision", "language"))
    assert (ConfigError("text").parameter, ConfigError("text").value, ConfigError("text").choices) == (None, None, ())
    other = error.as_kind(ConfigError, ".")
    assert (type(other), str(other), other.value) == (ConfigError, "no freeze='nope' in model.", "nope")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.value, again.choices) == (str(error), "nope", ("vision", "language"))


@pytest.mark.parametrize("words", [OPTIONS, RUN_KEYS])
def test_an_error_that_leaves_keeps_the_words_that_it_left_with(words):
    origin = Origin("a", "a.jsonl", 0, "line 1")
    for error in (UsageError(Argument("freeze", "x"), " is wrong."), SampleError(origin, Argument("freeze", "x"))):
        with pytest.raises(type(error)) as caught, errors_in(words):
            raise error
        assert caught.value is error
        assert words.say(Argument("freeze", "x")) in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert error.parameter == "freeze"


def test_an_error_about_a_sample_names_its_place_once():
    origin = Origin("a", "a.jsonl", 0, "line 1")
    inner = DataError("too long, raise ", Argument("max_characters"), ".", where=str(origin))
    assert str(inner) == f"{origin}: too long, raise max_characters."
    error = sample_error(inner, origin)
    assert (str(error), error.reason) == (str(inner), "too long, raise max_characters.")
    elsewhere = sample_error(DataError("cut", where="part 2"), origin)
    assert (elsewhere.reason, sample_error(elsewhere, Origin("b", "b", 1, "line 2"))) == ("part 2: cut", elsewhere)


def _said(_):
    return str(Argument("freeze", "x"))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_those_who_work_for_a_command_speak_its_words(workers):
    with speaking(OPTIONS):
        pool = Pool(_said, workers=workers, prefetch_bytes=0)
        assert list(pool.run([Job(0, 1)])) == ["--freeze x"]
        pool.close()


def test_words_of_one_thread_are_not_those_of_another():
    with speaking(OPTIONS), ThreadPoolExecutor(1) as threads:
        assert threads.submit(current_words).result() == ()
        assert threads.submit(lambda: (adopt((RUN_KEYS,)), _said(0))[1]).result() == "model.freeze: x"
        assert _said(0) == "--freeze x"


def test_keys_stand_where_a_reader_looks_for_them():
    with speaking(RUN_KEYS):
        assert str(Argument("allow_remote", True)) == "allow_remote: true beside its path in the data section"
        assert str(Argument("max_characters")) == "data.max_characters"


@pytest.mark.parametrize(
    ("message", "python", "key"),
    [
        (
            lambda: over_budget("it", Size(9, 0), Budget(4)),
            "over-long samples (overlong)",
            "over-long samples (data.overlong, overlong of a source)",
        ),
        (no_lengths, "Give lengths=FILE, or set plan.lengths", "Give lengths=FILE, or set plan.lengths"),
    ],
)
def test_a_configuration_reads_its_keys(message, python, key):
    assert python in str(message())
    with speaking(RUN_KEYS):
        assert key in str(message())


def test_a_run_that_is_there_is_left_by_the_way_that_the_reader_has(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"with resume=True, start another one elsewhere with run\.folder=FOLDER, or"):
        refuse_existing_run(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"with --resume, start .* with --set run\.folder=FOLDER, or"),
        errors_in(OPTIONS),
    ):
        refuse_existing_run(tmp_path)
