"""What engines return of a rollout, read as lengths: vLLM's own objects, TRL's clients and rollout functions."""

from types import SimpleNamespace

import pytest
from PIL import Image

from headway.errors import WorkloadError
from headway.integrations.generation_calls import ImageGrids, generations_of

FIRST, SECOND = [7, 8, 9], [7, 8]
ANSWERS = {"two": [[1, 2], [3]], "one": [[4, 5, 6]]}  # of the first prompt and of the second
LISTED = [*ANSWERS["two"], *ANSWERS["one"]]


def request(prompt, answers):
    outputs = [SimpleNamespace(token_ids=answer) for answer in answers]
    return SimpleNamespace(prompt_token_ids=prompt, outputs=outputs)


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([request(FIRST, ANSWERS["two"]), request(SECOND, ANSWERS["one"])], id="vLLM in the process"),
        pytest.param(([FIRST, FIRST, SECOND], LISTED, None, None), id="TRL's generation"),
        pytest.param(
            {
                "prompt_ids": [FIRST, FIRST, SECOND],
                "completion_ids": LISTED,
                "logprobs": [],
            },
            id="a rollout function",
        ),
        pytest.param(
            {
                str(i): SimpleNamespace(prompt_ids=prompt, generated_tokens=answer)
                for i, (prompt, answer) in enumerate(zip([FIRST, FIRST, SECOND], LISTED, strict=True))
            },
            id="transformers' continuous batching",
        ),
    ],
)
def test_equal_prompts_in_a_row_are_one_prompt_with_several_answers(results):
    pair, single = generations_of("an engine", results)
    assert (pair.prompts.tolist(), pair.answers.tolist(), pair.group) == ([3], [2, 1], 2)
    assert (single.prompts.tolist(), single.answers.tolist(), single.group) == ([2], [3], 1)
    assert pair.prefill.tokens == 3  # once for both


def test_a_client_names_each_prompt_once():
    (generation,) = generations_of("a client", {"prompt_ids": [FIRST, SECOND], "completion_ids": [[1], [2], [3], [4]]})
    assert (generation.prompts.tolist(), generation.group) == ([3, 2], 2)


@pytest.mark.parametrize("results", [None, 7, [FIRST], ([FIRST, SECOND], [[1], [2], [3]]), {"completion_ids": [[1]]}])
def test_other_results_are_an_error_that_names_the_engine(results):
    with pytest.raises(WorkloadError, match="the engine returned a"):
        generations_of("the engine", results)


def test_a_grid_is_asked_for_once_for_each_size():
    asked = []

    def processor(images, return_tensors):
        del return_tensors
        asked.append(images[0].size)
        return {"image_grid_thw": [[1, images[0].height // 8, images[0].width // 8]]}

    grids = ImageGrids(SimpleNamespace(image_processor=processor))
    small, large = Image.new("RGB", (16, 24)), Image.new("RGB", (32, 40))
    assert grids.of([[small, large], None, [small]]) == [((1, 3, 2), (1, 5, 4)), (), ((1, 3, 2),)]
    assert asked == [(16, 24), (32, 40)]


def test_images_of_a_processor_without_grids_are_an_error():
    with pytest.raises(WorkloadError, match=r"grid of patches of a Image of \(16, 24\)"):
        ImageGrids(None).of([[Image.new("RGB", (16, 24))]])
