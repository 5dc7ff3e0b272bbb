"""TRL's trainers whose rollouts vLLM serves: counted from the lengths, timed by the caller, on its own devices.

The server is a stand-in that answers the requests of TRL's own client; weights, which TRL sends by NCCL, are not sent.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_client, vllm_generation

from headway import trace
from headway.devices import Peak
from headway.meter import PhaseDevices
from headway.models import load_processor
from helpers.folders import write_vlm
from helpers.rollouts import EOS, GROUPS, check_sums, flops, learnt, length_reward, metered, policy, shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # TRL asks for it
]

SECONDS = 0.1  # that each rollout takes
WORKERS = 4


class Server:
    """Answers as vLLM's OpenAI interface does, with answers of 1, 2, 3, ... tokens."""

    def __init__(self):
        self.rows, self.paths = [], []  # lengths (prompt, answers to it); requests

    def get(self, path):
        answers = {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/get_world_size": {"world_size": WORKERS},
            "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
        }
        return answers[path.partition("?")[0]]

    def post(self, path, request):
        if path == "/v1/chat/completions/render":  # of one image
            return {"features": {"mm_placeholders": {"image": [{}]}}}
        if path == "/inference/v1/generate":
            return {"choices": self.choices([request["token_ids"]], request["sampling_params"])}
        if path == "/v1/completions":
            time.sleep(SECONDS)
            return {"choices": self.choices(request["prompt"], request)}
        return {"success": True}

    def choices(self, prompts, settings):
        choices = []
        for prompt in prompts:
            answers = [1 + (len(self.rows) + i) % settings["max_tokens"] for i in range(settings["n"])]
            self.rows.append((len(prompt), answers))
            choices += [self.choice(prompt, length) for length in answers]
        return choices

    def choice(self, prompt, length):
        ids = [8] * (length - 1) + [EOS]
        tokens = [f"token_id:{i}" for i in ids]
        logprobs = {"tokens": tokens, "token_logprobs": [-1.0] * length, "top_logprobs": [{t: -1.0} for t in tokens]}
        return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}


@pytest.fixture
def server(monkeypatch):
    standing = Server()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content):
            standing.paths.append(self.path)
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer(standing.get(self.path))

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(standing.post(self.path, json.loads(body or b"{}")))

        def log_message(self, *_):
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    standing.url = f"http://127.0.0.1:{http.server_port}"
    # vLLM is not installed here, and its weights go by NCCL, which needs a GPU
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", lambda *_: None)
    yield standing
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.mark.parametrize(
    ("trainer", "devices"),
    [
        pytest.param((GRPOTrainer, GRPOConfig), None, id="GRPO, as many devices as the server has workers"),
        pytest.param((GRPOTrainer, GRPOConfig), 3, id="GRPO, three devices"),
        pytest.param(
            (RLOOTrainer, RLOOConfig), PhaseDevices(Peak("theirs", 3e12, "fp32", "made up"), 2, 1e12), id="RLOO, others"
        ),
    ],
)
def test_a_rollout_on_a_server_is_timed_here_and_billed_there(tmp_path, server, trainer, devices):
    model = policy()
    ledger = trace(model)
    options = GROUPS | {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "beta": 0.0}
    run, _ = metered(*trainer, tmp_path, model, length_reward, callback={"rollout_devices": devices}, **options)
    phases, rollout = flops(run), run.phases["rollout"]
    rows = [(prompt, answer) for prompt, answers in server.rows for answer in answers]
    assert server.paths.count("/v1/completions") == 3
    assert phases["rollout"].total == shared(ledger, server.rows).total
    assert phases["update"] == ledger.count(learnt(rows))
    assert phases["policy"].total == ledger.count(learnt(rows), forward_only=True).total
    assert (rollout.prompt_tokens, rollout.generated_tokens) == (
        sum(prompt for prompt, _ in server.rows),
        sum(answer for _, answer in rows),
    )
    assert rollout.loop_s >= 3 * SECONDS
    assert rollout.is_elsewhere
    expected = devices
    if not isinstance(devices, PhaseDevices):
        expected = PhaseDevices(run.phases["update"].peak, devices or WORKERS)
    assert (rollout.world_size, rollout.peak) == (expected.num_devices, expected.peak)
    check_sums(run, elsewhere=["rollout"])


def test_pictures_of_a_served_prompt_are_counted_by_their_sizes(tmp_path, server):
    torch.manual_seed(1)
    folder = str(write_vlm(tmp_path / "model", "qwen2_5_vl", weights=True))
    processor = load_processor(folder)
    processor.tokenizer.padding_side = "left"  # as TRL loads it
    sizes = [(64, 48), (96, 64), (40, 80), (64, 64)]  # width, height [pixels]; patches of 8, merged by 2 x 2
    prompt = [{"role": "user", "content": "Which picture is it?"}]
    run, _ = metered(
        GRPOTrainer, GRPOConfig, tmp_path, folder, length_reward, given={"processing_class": processor},
        data=Dataset.from_list([{"prompt": prompt, "image": Image.new("RGB", size)} for size in sizes]),
        use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, beta=0.0, **GROUPS | {"max_steps": 2},
    )  # fmt: skip
    ledger = trace(AutoModelForImageTextToText.from_pretrained(folder))
    # the client sends prompts side by side, so that they come in any order; their pictures are told by their lengths
    grids = {len(words): grid for words, grid in zip(*rendered(processor, prompt, sizes), strict=True)}
    images = [grids[prompt] for prompt, _ in server.rows]
    assert run.phases["rollout"].flops.total == shared(ledger, server.rows, images=images).total
    assert len(images) == 4
    assert any(name.startswith("vision") for name in run.phases["rollout"].flops.by_component())


def rendered(processor, prompt, sizes):
    """Token ids of prompts with pictures of these sizes, and the grids of these [patches]."""
    text = processor.apply_chat_template(prepared(prompt), add_generation_prompt=True, tokenize=False)
    features = processor(images=[[Image.new("RGB", size)] for size in sizes], text=[text] * len(sizes))
    return features["input_ids"], features["image_grid_thw"].tolist()


def prepared(prompt):
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt[0]["content"]}]}]
