import pytest

from headway.errors import ConfigError
from headway.train.config import load_config, parse_config

MINIMAL = """
model: {path: some/model}
data: {train: [{path: a.jsonl}], tokens_per_pack: 1024}
optim: {steps: 100, lr: 1e-3}
run: {folder: runs/x}
"""


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_file_is_completed_with_defaults(minimal):
    config = load_config(minimal)
    assert config.optim.lr == 0.001
    assert config.optim.accumulation == 1
    assert config.data.train[0].epochs is None
    assert config.run.dtype == "auto"


def test_the_resolved_configuration_reads_back_as_itself(minimal):
    config = load_config(minimal)
    assert parse_config(config.as_dict()) == config


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("optim.lr=3e-4", lambda c: c.optim.lr, 3e-4),
        ("optim.clip=null", lambda c: c.optim.clip, None),
        ("optim.betas=[0.8, 0.9]", lambda c: c.optim.betas, (0.8, 0.9)),
        ("data.train.0.epochs=3", lambda c: c.data.train[0].epochs, 3),
        ("data.train=[{path: b.jsonl, epochs: 1}, {path: c.jsonl}]", lambda c: len(c.data.train), 2),
        ("model.random_init=true", lambda c: c.model.random_init, True),
        ("checkpoint.every=50", lambda c: c.checkpoint.every, 50),
        ("model.path=a=b", lambda c: c.model.path, "a=b"),
    ],
)
def test_set_lays_a_yaml_value_over_the_file(minimal, override, read, expected):
    assert read(load_config(minimal, (override,))) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.momentum=1", "unknown key 'optim.momentum', allowed here: steps, lr"),
        ("optim.warmup=1", "unknown key 'optim.warmup', did you mean 'warmup_steps'?"),
        ("data.train.0.epoch=1", "unknown key 'data.train.0.epoch', did you mean 'epochs'?"),
        ("modle.path=x", "unknown key 'modle', did you mean 'model'?"),
        ("optim.lr=fast", "optim.lr = 'fast': input should be a valid number"),
        ("optim.lr=-1", "optim.lr = -1: input should be greater than 0"),
        ("optim.steps=0", "optim.steps = 0: input should be greater than or equal to 1"),
        ("optim.schedule=linear", "optim.schedule = 'linear': input should be 'cosine' or 'constant'"),
        ("optim.warmup_steps=100", "warmup_steps 100 leaves nothing of the 100 steps"),
        ("optim.betas=[0.9, 1.0]", "both must be below 1"),
        ("data.train=[{path: a}, {path: b}]", "stage 0 needs 'epochs'"),
        ("eval.every=10", "data.eval names no file"),
        ("data.eval=e.jsonl", "neither eval.every nor eval.at_end uses it"),
        ("checkpoint.every=1000", "checkpoint.every 1000 is never reached in 100 steps"),
        ("optim.lr", "is no assignment; write section.key=value"),
        ("data.train.5.path=x", "data.train has items 0 to 0, and no '5'"),
        ("optim.lr.x=1", "optim.lr is the value"),
        ("optim.lr=[1", "is not YAML"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(minimal, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, (override,))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_min_lr_ratio_without_a_cosine_is_refused(minimal):
    with pytest.raises(ConfigError, match="min_lr_ratio has no effect"):
        load_config(minimal, ("optim.schedule=constant", "optim.min_lr_ratio=0.5"))


def test_all_mistakes_are_named_at_once(minimal):
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, ("optim.lr=no", "run.foldr=x"))
    assert "optim.lr" in str(caught.value)
    assert "did you mean 'folder'" in str(caught.value)


def test_a_missing_key_says_what_it_means(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL.replace("lr: 1e-3", ""))
    with pytest.raises(ConfigError, match=r"'optim.lr' is required \(Peak learning rate\)"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"), [("", "holds no configuration"), ("a: [", "is not YAML"), ("- 1", "holds no")]
)
def test_a_file_that_is_no_configuration(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "none.yaml")


def test_every_setting_is_described():
    def check(model, path):
        for name, field in model.model_fields.items():
            nested = getattr(field.annotation, "model_fields", None)
            if nested is not None:
                check(field.annotation, f"{path}{name}.")
            else:
                assert field.description, f"{path}{name} has no description"

    from headway.train.config import Stage, TrainConfig

    check(TrainConfig, "")
    check(Stage, "data.train.")
