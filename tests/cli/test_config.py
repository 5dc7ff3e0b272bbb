"""`headway config` says of every setting what the classes that check it say."""

import json
from pathlib import Path

import pytest

from headway.config import OptimConfig, TrainConfig
from headway.config.tree import walk

ROOT = Path(__file__).parents[2]


def test_the_page_of_settings_is_what_the_command_prints(headway):
    assert headway("config", "--markdown").out == (ROOT / "docs/settings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_setting_is_printed_once_within_the_width_of_the_terminal(headway, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = headway("config").out.splitlines()
    assert max(map(len, lines)) <= width
    heads = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert len(set(heads)) == len(heads)
    names = {setting.name for setting in walk(TrainConfig) if "." in setting.name}
    alike = ("data.train.N.mix.", "data.stages.N.", "data.eval.")  # as data.train.N.*
    assert {name for name in names if not name.startswith(alike)} == set(heads)


def test_one_section_or_setting_is_printed_with_type_unit_default_and_meaning(headway, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert headway("config", "checkpoint").out == (
        "\n"
        "checkpoint\n"
        "    Cadence at which the whole state is saved, and how much of it stays on disk.\n"
        "  checkpoint.every  whole number at least 1 | null [steps]  default null\n"
        "      Optimizer steps between checkpoints. The end of the run always has one\n"
        "  checkpoint.keep  whole number at least 1 [checkpoints]  default 2\n"
        "      Newest checkpoints that stay. Older ones are deleted\n"
        "  checkpoint.keep_best  true | false | exact_match  default false\n"
        "      Save and keep a checkpoint after each evaluation that is the best so far, for `headway chat\n"
        "      RUN --best`, generate, evaluate and export. The best has the lowest loss (true), or the most\n"
        "      exact answers or pairs in the right order (exact_match)\n"
        "  checkpoint.asynchronous  true | false  default true\n"
        "      Write from a copy of the state in the host's memory while training continues\n"
        "  checkpoint.export  never | end | every  default end\n"
        "      Checkpoints that become a folder for from_pretrained: none, the last, or every one\n"
    )
    assert headway("config", "optim.lr").out == "  optim.lr  number above 0  required\n      Peak learning rate\n"
    assert "data.stages.N.mix.N.weight  number above 0 | null" in headway("config", "data.stages.0.mix.1.weight").out


def test_the_schema_allows_what_the_settings_take_in_other_forms(headway):
    """Or an editor would mark a file as wrong that trains."""
    sections = json.loads(headway("config", "--json").out)["$defs"]

    def kinds(section, name):
        node = sections[section]["properties"][name]
        listed = [each.get("type", each.get("$ref")) for each in node.get("anyOf", [node])]
        return {kind for each in listed for kind in (each if isinstance(each, list) else [each])}

    assert kinds("DataConfig", "tokens_per_pack") == {"integer", "string"}
    assert kinds("OptimConfig", "clip") == {"number", "string", "null"}
    assert kinds("RunConfig", "trackers") == {"array", "string"}
    assert kinds("LoraConfig", "targets") == {"array", "string", "null"}
    assert kinds("ProfileConfig", "ranks") == {"array", "integer", "string"}
    assert kinds("ModelConfig", "lora") == {"#/$defs/LoraConfig", "null", "number", "string"}
    assert kinds("DataConfig", "stream") == {"#/$defs/StreamConfig", "null"}
    assert kinds("OptimConfig", "betas") == {"array"}
    assert kinds("ModelConfig", "random_init") == {"boolean"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optm",), "There is no setting 'optm'. Did you mean optim?"),
        (("epochs",), "There is no setting 'epochs'. Did you mean"),
        (("learning_rate",), "In Headway it is `optim.lr`."),
        (("zzz",), "Sections: model, data, optim"),
        (("optim.lr", "--json"), "optim.lr is no section"),
        (("optim", "--markdown"), "--markdown prints the whole page"),
    ],
)
def test_a_setting_that_does_not_exist_names_the_nearest(headway, arguments, message):
    result = headway("config", *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())


def test_the_schema_describes_every_setting_and_a_path_in_the_place_of_a_source(headway):
    schema = json.loads(headway("config", "--json").out)
    assert list(schema["properties"]) == ["extends", *TrainConfig.model_fields]
    assert not schema["additionalProperties"]
    assert "required" not in schema["$defs"]["OptimConfig"]  # a file that extends another one gives a part
    train = schema["$defs"]["DataConfig"]["properties"]["train"]["anyOf"]
    assert [one.get("type", "source") for one in train] == ["string", "source", "array"]
    optim = json.loads(headway("config", "optim", "--json").out)
    assert optim["properties"].keys() == OptimConfig.model_fields.keys()
