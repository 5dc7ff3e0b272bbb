"""`headway flops` on what diffusers saves: the folder of a model, or of a pipeline."""

import json

import pytest

from headway.count import Workload
from headway.tracing import trace
from helpers.denoisers import DENOISERS, autoencoder, denoiser


@pytest.fixture
def saved(tmp_path):
    """Save the configuration of a model as diffusers does, without weights."""

    def save(name, folder="model"):
        (autoencoder() if name == "AutoencoderKL" else denoiser(name)).save_config(tmp_path / folder)
        return tmp_path / folder

    return save


def pipeline(tmp_path, saved, **names):
    """Save a pipeline of models of these classes."""
    index = {
        "_class_name": "DiffusionPipeline",
        "_diffusers_version": "0.42.1",
        "scheduler": ["diffusers", "DDPMScheduler"],
    }
    for part, name in names.items():
        saved(name, part)
        index[part] = ["diffusers", name]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("name", DENOISERS)
def test_a_saved_model_is_counted_by_its_class(headway, saved, name):
    side, option = (8, 8), "--videos" if name.startswith("Wan") else "--images"
    frames = 3 if option == "--videos" else 1
    reads = not name.startswith("DiT")
    text = ("--sources", 7) if reads else ()
    result = headway("flops", saved(name), option, f"{frames}x8x8*2", *text, "--json")
    assert result.code == 0, result.err
    grids = {option.removeprefix("--"): [(frames, *side)] * 2}
    work = Workload([64 * frames] * 2, sources=[7, 7] if reads else (), **grids)
    assert json.loads(result.out)["flops"]["total"] == trace(denoiser(name)).count(work).total


def test_sizes_that_the_configuration_states_need_not_be_typed(headway, saved):
    record = json.loads(headway("flops", saved("DiTTransformer2DModel"), "--json").out)
    assert record["workload"]["patches"] == 16  # 8 x 8 latents in patches of 2 x 2
    assert (
        record["flops"]["forward"]
        == trace(denoiser("DiTTransformer2DModel")).count(Workload([16], images=[(1, 4, 4)])).forward
    )
    result = headway("flops", saved("FluxTransformer2DModel"), "--sources", 7)
    assert result.code == 2
    assert "states no size of latents. Give it in patches: --images 1x64x64" in " ".join(result.err.split())


def test_a_pipeline_is_counted_by_its_one_denoiser(headway, saved, tmp_path):
    folder = pipeline(tmp_path, saved, transformer="SD3Transformer2DModel", vae="AutoencoderKL")
    whole = headway("flops", folder, "--images", "1x4x4", "--sources", 7, "--json")
    part = headway("flops", folder / "transformer", "--images", "1x4x4", "--sources", 7, "--json")
    assert whole.code == 0, whole.err
    assert whole.out == part.out


def test_a_pipeline_of_several_denoisers_asks_which(headway, saved, tmp_path):
    folder = pipeline(
        tmp_path, saved, transformer="WanTransformer3DModel", transformer_2="WanTransformer3DModel", vae="AutoencoderKL"
    )
    result = headway("flops", folder, "--videos", "3x8x8", "--sources", 7)
    assert result.code == 2
    message = " ".join(result.err.split())
    assert "has several models that denoise. Give the folder of one of its models:" in message
    assert f"{folder / 'transformer_2'} (WanTransformer3DModel)" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_class_name": "os"}, "names the class 'os', which this version of diffusers does not have as a model"),
        ({"_class_name": "DDPMScheduler"}, "does not have as a model"),
        ({"_class_name": "DiTTransformer2DModel", "num_layers": 10**9}, "num_layers is 1000000000"),
        ({"_class_name": "DiTTransformer2DModel", "num_attention_heads": "many"}, "cannot be built from its config"),
    ],
)
def test_a_strangers_configuration_is_refused_in_a_sentence(headway, tmp_path, settings, message):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    result = headway("flops", tmp_path, "--images", "1x4x4")
    assert result.code in (1, 2)
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_segments_of_latents_are_not_typed(headway, saved):
    result = headway("flops", saved("SD3Transformer2DModel"), "--segments", 16, "--sources", 7)
    assert "A sample of SD3Transformer2DModel consists of latents. Leave --segments and --splits out" in " ".join(
        result.err.split()
    )


def test_an_autoencoder_says_how_it_is_counted(headway, saved):
    result = headway("flops", saved("AutoencoderKL"), "--images", "1x8x8")
    assert result.code == 1
    assert "trace(model, inputs=...)" in " ".join(result.err.split())
