import json


def test_models_are_listed_with_kind_and_parameters(headway):
    result = headway("models")
    assert (result.code, result.err) == (0, "")
    lines = {line.split()[0]: " ".join(line.split()) for line in result.out.splitlines()}
    # Meta's model card: 8B parameters (8,030,261,248 in the released checkpoint)
    assert lines["llama-3.1-8b"] == "llama-3.1-8b text 8,030,261,248 8,030,261,248"
    assert "vision-language" in lines["qwen3-vl-8b"]
    assert "text, experts" in lines["mixtral-8x7b"]


def test_models_as_json(headway):
    data = json.loads(headway("models", "--json").out)
    assert data["schema_version"] == 1
    models = {entry["name"]: entry for entry in data["models"]}
    assert models["llama-3.1-8b"]["params"] == {"total": 8030261248, "active": 8030261248}
    assert models["qwen3-vl-30b-a3b"]["kind"] == "vision-language, experts"
    # Mixtral paper, section 1: 47B parameters, 13B active
    assert round(models["mixtral-8x7b"]["params"]["total"] / 1e9) == 47
    assert round(models["mixtral-8x7b"]["params"]["active"] / 1e9) == 13
