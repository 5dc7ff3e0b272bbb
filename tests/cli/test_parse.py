import pytest
from typer import Context
from typer.main import get_command

from headway.cli.app import app
from headway.cli.parse import Lora, _words_of, parse_grids, parse_latents, parse_lora, parse_segments, parse_splits
from headway.errors import UsageError, WorkloadError
from headway.words import Argument, speaking


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("8192", [8192]),
        ("4096*3,512", [4096, 4096, 4096, 512]),
        (" 7 , 5*2 ", [7, 5, 5]),
        ("1", [1]),
        ("4k*2,1e3,4_096", [4000, 4000, 1000, 4096]),
    ],
)
def test_segments_are_lengths_with_repeats(text, lengths):
    assert parse_segments(text) == lengths


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-5",
        "4096*0",
        "0*3",
        "",
        " ",
        ",",
        "512,",
        "512,,256",
        "4096x3",
        "4kk",
        "40%",
        "1.5",
        "4096*",
        "*3",
        "٣",
    ],
)
def test_a_wrong_segment_is_quoted_with_an_example(text):
    with pytest.raises(WorkloadError) as caught:
        parse_segments(text)
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code == 2
    assert "--segments 4096*3,512" in str(caught.value)


def test_too_many_segments_are_refused_before_memory_is_taken():
    with pytest.raises(WorkloadError, match="more than 10,000,000 items"):
        parse_segments("256*99999999999")


def test_grids_are_t_h_w_with_repeats():
    assert parse_grids("1x32x48*2,1x4x4", "--images") == [(1, 32, 48), (1, 32, 48), (1, 4, 4)]
    assert parse_grids("8x32x48", "--videos") == [(8, 32, 48)]


@pytest.mark.parametrize("text", ["32x48", "1x32x48x2", "1x0x48", "1,32,48", "1x32", "1*32*48", "ax2x3", "-1x2x2", ""])
@pytest.mark.parametrize("option", ["--images", "--videos"])
def test_a_wrong_grid_is_quoted_with_an_example(option, text):
    with pytest.raises(WorkloadError) as caught:
        parse_grids(text, option)
    assert f"{option} {text!r}" in str(caught.value)
    assert "for example" in str(caught.value).lower()


@pytest.mark.parametrize(
    "text",
    ["", "full", "fill:3", "full:0", "full:3,", "full:3;;causal:2", "(full:3)*0", "(full:3", "full:3*2", "FULL:3"],
)
def test_a_wrong_split_is_quoted_with_an_example(text):
    with pytest.raises(WorkloadError, match=r"--splits.*[Ff]or example|repeats 0 times"):
        parse_splits(text)


@pytest.mark.parametrize("text", ["", "64", "1x64x64", "0x4", "4x4*0", "4 x 4"])
def test_a_wrong_grid_of_latents_is_quoted_with_an_example(text):
    with pytest.raises(WorkloadError, match="--latents"):
        parse_latents(text, "--latents")


@pytest.mark.parametrize(
    ("text", "lora"),
    [("16", Lora(16, None)), ("8:q_proj", Lora(8, ["q_proj"])), ("8:q_proj, v_proj", Lora(8, ["q_proj", "v_proj"]))],
)
def test_lora_is_a_rank_and_targets(text, lora):
    assert parse_lora(text) == lora


@pytest.mark.parametrize("text", ["", "0", "-4", "r16", "16:", "16:q_proj,,v_proj", "²"])
def test_a_wrong_lora_is_quoted_with_an_example(text):
    with pytest.raises(UsageError) as caught:
        parse_lora(text)
    assert f"--lora {text!r}" in str(caught.value)
    assert "--lora 16:q_proj,v_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "option"),
    [("explain", "--rank"), ("flops", "--lora")]
    + [(name, "`headway explain --rank`") for name in ("train", "report", "audit", "goodput")],
)
def test_a_rank_is_named_as_explain_shows_one_and_never_as_a_setting_of_adapters(command, option):
    group = get_command(app)
    with speaking(*_words_of(group.get_command(Context(group), command))):
        assert str(Argument("rank")) == option
