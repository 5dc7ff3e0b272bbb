"""What a trace reads off models, and what it refuses to guess."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from headway.count import Workload, drivers
from headway.errors import TraceError, WorkloadError
from headway.tracing import trace
from headway.tracing.build import model_on_shapes
from helpers.cases import some
from helpers.counter import counted, counted_eagerly
from helpers.models import FAMILIES, tiny_config

OFTEN = {"llama", "qwen3_moe", "deepseek_v2", "qwen2_5_vl", "qwen3_vl"}  # the others are counted module by module


def drivers_of(cost, component):
    return {row.driver for row in cost.rows if row.component == component}


@pytest.mark.parametrize("family", some(FAMILIES, OFTEN.__contains__))
def test_every_operation_has_a_driver_and_a_component(family):
    cost = trace(tiny_config(family))
    assert cost.unknown == ()
    assert {row.component.partition(".")[0] for row in cost.rows} <= {"language", "vision"}
    assert not [p.name for p in cost.parameters if p.component == "other"]


def test_interleaved_windows_are_told_from_full_attention():
    assert drivers_of(trace(tiny_config("gemma3_sliding")), "language.attention") == {
        "pairs:sliding:16",
        "pairs:causal",
    }
    assert drivers_of(trace(tiny_config("gpt_oss_sinks")), "language.attention") == {"pairs:sliding:16", "pairs:causal"}
    assert drivers_of(trace(tiny_config("mistral_sliding")), "language.attention") == {"pairs:sliding:16"}


def test_windowed_vision_layers_are_told_from_full_ones():
    cost = trace(tiny_config("qwen2_5_vl"))
    # 32 pixels are 4 patches of 8; layer 1 of 3 attends over the whole frame
    windows = [row.driver for row in cost.rows if row.component == "vision.attention"]
    assert windows == ["patch_pairs:window:4", "patch_pairs:frame", "patch_pairs:window:4"]


def test_vision_mergers_work_on_merged_patches():
    cost = trace(tiny_config("qwen3_vl"))
    mergers = {row.module for row in cost.rows if row.component == "vision.merger"}
    assert drivers_of(cost, "vision.merger") == {"patches/4"}
    assert sum("deepstack" in module for module in mergers) == 4  # two linears in each of two deepstack mergers


def test_experts_cost_tokens_times_top_k_and_routers_all_experts():
    cost = trace(tiny_config("qwen3_moe"))
    tokens = Workload([10])
    rows = {row.name: row.forward for row in cost.count(tokens).rows}
    # two layers, top 2 of 4 experts: gate and up 32 to 2 x 16, down 16 to 32
    assert rows["language.experts"] == 2 * 10 * 2 * 2 * (32 * 32 + 16 * 32)
    assert rows["language.router"] == 2 * 10 * 2 * 32 * 4


def test_shared_experts_count_as_experts():
    cost = trace(tiny_config("deepseek_v3"))
    shared = [row for row in cost.rows if "shared_experts" in row.module]
    assert {row.component for row in shared} == {"language.experts"}
    assert {row.driver for row in shared} == {"tokens"}


def test_a_real_model_keeps_what_it_trains_and_is_left_alone():
    config = tiny_config("qwen3_vl")
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config)
    model.model.visual.requires_grad_(False)
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    implementation, training = model.config._attn_implementation, model.training
    step = Workload([60], images=[(1, 4, 6)])
    assert trace(model).count(step) == trace(config).freeze(["vision"]).count(step)
    assert {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()} == before
    assert (model.config._attn_implementation, model.training) == (implementation, training)


def test_tied_weights_are_one_parameter_and_a_full_head():
    tied, free = trace(tiny_config("qwen3_tied")), trace(tiny_config("qwen3"))
    assert free.params.total - tied.params.total == 160 * 32
    step = Workload([50])
    assert tied.count(step) == free.count(step)


class Toy(nn.Module):
    """A plain language model whose middle is swapped by each test."""

    def __init__(self, middle):
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.middle = middle
        self.head = nn.Linear(12, 50)

    def forward(self, input_ids):
        return (self.head(self.middle(self.embed(input_ids))),)


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.options = options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        options = {name: make(x.shape[1]) if callable(make) else make for name, make in self.options.items()}
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("options", "driver"),
    [
        ({"is_causal": True}, "pairs:causal"),
        ({}, "pairs:full"),
        ({"attn_mask": lambda n: torch.ones(n, n, dtype=torch.bool).tril()}, "pairs:causal"),
    ],
)
def test_a_plain_module_is_read_through_pytorchs_own_attention(options, driver):
    cost = trace(Toy(Attention(**options)))
    # forward 2 heads (6 + 6) x 2 a pair, backward twice that
    (row,) = [row for row in cost.rows if row.op == "attention"]
    assert (row.driver, row.forward, sum(g.flops for g in row.gradients)) == (driver, 2 * 2 * 12, 2 * 2 * 2 * 12)


class ByHand(nn.Module):
    """Attention of 3 heads without any library's help, each query seeing `window` keys at most."""

    def __init__(self, window, hide):
        super().__init__()
        self.qkv, self.window, self.hide = nn.Linear(12, 36), window, hide

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        ahead = place[:, None] - place[None, :]
        hidden = (ahead < 0) | (ahead >= self.window)
        scores = self.hide(q @ k.transpose(2, 3) * 0.5, hidden)
        return (scores.float().softmax(dim=-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)


WAYS_TO_HIDE = {
    "fill": lambda scores, hidden: scores.masked_fill(hidden, -torch.inf),
    "where": lambda scores, hidden: torch.where(hidden, torch.finfo(scores.dtype).min, scores),
    "where not": lambda scores, hidden: torch.where(
        ~hidden, scores, torch.full(hidden.shape, -1e9, dtype=scores.dtype)
    ),
    "add": lambda scores, hidden: scores + torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf),
}


@pytest.mark.parametrize("hide", WAYS_TO_HIDE)
@pytest.mark.parametrize(
    ("window", "driver"),
    [
        pytest.param(10_000, "pairs:causal", marks=pytest.mark.slow),
        (9, "pairs:sliding:9"),
        pytest.param(600, "pairs:sliding:600", marks=pytest.mark.slow),
    ],
)
def test_attention_by_hand_is_billed_for_the_pairs_that_its_mask_allows(window, driver, hide):
    rows = [row for row in trace(Toy(ByHand(window, WAYS_TO_HIDE[hide]))).rows if row.op == "attention"]
    # scores and values: 3 heads of 4, forward once and backward twice
    assert [(row.driver, row.forward, row.component) for row in rows] == [(driver, 2 * 3 * 4, "language.attention")] * 2
    assert [[g.flops for g in row.gradients] for row in rows] == [[2 * 3 * 4] * 2] * 2


def test_masks_that_a_model_makes_at_construction_are_read_off_its_configuration_too():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=50,
        hidden_size=12,
        num_layers=2,
        num_heads=3,
        window_size=9,
        attention_types=[[["global", "local"], 1]],
    )
    for source in (config, GPTNeoForCausalLM(config)):
        windows = [row.driver for row in trace(source).rows if row.op == "attention"]
        assert windows == ["pairs:causal"] * 2 + ["pairs:sliding:9"] * 2


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.cut = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return self.kept(x) + self.cut(x).detach()


def test_a_detached_branch_has_no_backward():
    cost = trace(Toy(Detached()))
    gradients = {row.module: [g.phase for g in row.gradients] for row in cost.rows}
    assert gradients == {"middle.kept": ["dgrad", "wgrad"], "middle.cut": [], "head": ["dgrad", "wgrad"]}


class Bilinear(nn.Module):
    def forward(self, x):
        return x @ x.transpose(1, 2) @ x


def test_products_of_two_activations_follow_pairs():
    cost = trace(Toy(Bilinear()))
    products = [row for row in cost.rows if row.module == "middle"]
    assert [(row.driver, row.forward) for row in products] == [("pairs:full", 2 * 12)] * 2
    assert [[(g.phase, g.flops) for g in row.gradients] for row in products] == [[("dgrad", 2 * 12)] * 2] * 2


class Odd(nn.Module):
    """Does one thing that a ledger cannot explain."""

    def __init__(self, what):
        super().__init__()
        self.what, self.weight = what, nn.Parameter(torch.zeros(12))

    def forward(self, x):
        return self.what(x, self.weight)


def placed_floats(x):
    """Make floats over pairs that might hide any of them: what is above the diagonal depends on the weights."""
    return (x @ x.transpose(1, 2)).triu(1)


def float_mask(x, w):
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=placed_floats(x))[:, 0]


def loop(x, w):
    for _ in range(x.shape[1] // 60):
        x = x @ torch.diag(w)
    return x


def attention_by_hand(x, w):
    return (x @ x.transpose(1, 2) * 0.3 + placed_floats(x)).softmax(dim=-1) @ x


def root(x, w):
    n = int(x.shape[1] ** 0.5)
    return torch.cat([x[:, :n] @ torch.diag(w), x[:, n:]], dim=1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda x, w: torch.conv_tbc(x, torch.diag(w)[None], w), r"module middle runs aten\.conv_tbc"),
        (float_mask, "module middle attends under a mask of floats"),
        (attention_by_hand, "module middle multiplies attention scores by hand, under a mask of floats without data"),
        (loop, "no driver explains matmul in module middle"),
        (root, "no driver explains matmul in module middle"),
    ],
)
def test_what_cannot_be_explained_is_refused_by_name(what, message):
    with pytest.raises(TraceError, match=message):
        trace(Toy(Odd(what)))


def heads_apart(x, w):
    everything = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    q = x[:, None].expand(-1, 2, -1, -1)
    scores = (q @ q.transpose(2, 3)).masked_fill(~torch.stack([everything, everything.tril()])[None], -1e9)
    return (scores.softmax(dim=-1) @ q).sum(1)


def test_heads_that_are_masked_differently_are_counted_together():
    cost = trace(Toy(Odd(heads_apart)))
    rows = [row for row in cost.rows if row.op == "attention"]
    # one head sees everything, the other its past; each pair costs a product of 12 for its score, one for its value
    seen = 7**2 + 7 * 8 // 2
    assert sum(row.forward * drivers.parse_driver(row.driver)(Workload([7])) for row in rows) == 2 * 2 * 12 * seen


class Swapping(nn.Module):
    """Puts another module in its own place once it has seen how long its input is, as BigBird does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x):
        if x.shape[1] < 500:
            self.inner = nn.Linear(12, 12, bias=False)
        return x


def test_a_model_that_swaps_its_modules_is_refused():
    with pytest.raises(TraceError, match="Toy swaps its own modules by the length"):
        trace(Toy(Swapping()))


def test_cross_attention_rests_in_a_decoder_used_alone():
    from transformers import BartConfig, BartForCausalLM

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
             {"layers": 2, "attention_heads": 2, "ffn_dim": 20}.items()}  # fmt: skip
    model = BartForCausalLM(BartConfig(vocab_size=50, d_model=12, max_position_embeddings=512, **sizes))
    cost = trace(model)
    assert cost.unknown == ()
    assert cost.source["without"] == "encoder_hidden_states"
    # per token and layer: 4 projections of 12 x 12 and 2 of 12 x 20; then the head
    assert sum(row.forward for row in cost.rows if row.driver == "tokens") == 2 * (2 * (4 * 144 + 2 * 240) + 12 * 50)
    with pytest.raises(WorkloadError, match="no encoder beside its text"):
        cost.count(Workload([7], sources=[5]))


def test_a_module_that_no_states_of_another_model_wake_stays_unknown():
    class Alone(Toy):
        def __init__(self):
            super().__init__(nn.Linear(12, 12))
            self.tower = nn.Linear(5, 5)

        def forward(self, input_ids, encoder_hidden_states=None):  # noqa: ARG002  # a trace offers states by this name
            return super().forward(input_ids)

    assert trace(Alone()).unknown == ("tower (it never ran)",)


def test_a_model_without_token_ids_is_refused_unless_its_arguments_are_given():
    with pytest.raises(TraceError, match=r"needs input_ids. Give the arguments with trace\(model, inputs=...\)"):
        trace(nn.Linear(3, 3))


class Pictures(nn.Module):
    """Patches and a class token that see each other, and a read-out of that token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.qkv = nn.Linear(8, 24)
        self.read = nn.Linear(8, 5)

    def forward(self, patches_NPF):
        x = torch.cat([self.token.expand(len(patches_NPF), -1, -1), self.embed(patches_NPF)], dim=1)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        return {"classes": self.read(x[:, 0, 0])}


def test_any_module_is_traced_on_arguments_made_from_a_workload():
    def pictures(workload):  # every frame of every image is one picture of 4 x 6 patches
        return {"patches_NPF": torch.zeros(len(workload.grids), 24, 12)}

    cost = trace(Pictures(), inputs=pictures)
    # 24 patches and a class token; the pairs are 25 squared
    assert [(r.module, r.driver, r.forward) for r in cost.rows] == [
        ("embed", "grids", 24 * 2 * 12 * 8),
        ("qkv", "grids", 25 * 2 * 8 * 24),
        ("", "grids", 25**2 * 2 * (8 + 8)),
        ("read", "grids", 2 * 8 * 5),
    ]


def test_a_cost_may_be_the_sum_of_two_drivers():
    class ClassToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, images):
            return torch.cat([self.mix(torch.cat([image[:1], image])) for image in images])

    def images(workload):
        return ([torch.zeros(int(t * h * w), 8) for t, h, w in workload.grids],)

    class Together(ClassToken):
        def forward(self, images):
            return self.mix(torch.cat([row for image in images for row in (image[:1], image)]))

    cost = trace(Together(), inputs=images)
    assert trace(ClassToken(), inputs=images).rows == cost.rows  # one image after another, or all at once
    assert [(r.driver, r.forward) for r in cost.rows] == [("patches", 128), ("grids", 128)]
    assert [g.flops for r in cost.rows for g in r.gradients] == [128, 128]
    assert cost.count(Workload(images=[(1, 4, 6), (1, 2, 2)])).total == 2 * 128 * (24 + 1 + 4 + 1)


def test_one_example_is_billed_per_segment():
    cost = trace(nn.Linear(3, 5), inputs=torch.zeros(7, 3))
    assert [(r.driver, r.forward) for r in cost.rows] == [("segments", 7 * 2 * 3 * 5)]
    assert cost.count(Workload([1, 1])).wgrad == 2 * 7 * 2 * 3 * 5


def test_an_output_without_floats_cannot_start_backward():
    class Index(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(TraceError, match="returns Tensor without a tensor of floats"):
        trace(Index(3, 5), inputs=torch.zeros(7, 3))


def test_a_configuration_that_is_no_language_model_is_refused():
    from transformers import ViTConfig

    with pytest.raises(TraceError, match="no causal or image-text model for a configuration of ViTConfig"):
        trace(ViTConfig())


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        return self.after(Squash.apply(self.before(x)))


def test_gradients_are_followed_through_custom_functions():
    cost = trace(Toy(Custom()))
    after = next(row for row in cost.rows if row.module == "middle.after")
    names = [p.name for p in cost.parameters]
    (upstream,) = [g.needs for g in after.gradients if g.phase == "dgrad"]
    assert upstream >> names.index("middle.before.weight") & 1


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) + target


def test_what_runs_without_gradients_has_no_backward():
    cost = trace(Toy(Watched()))
    rows = {row.module: row for row in cost.rows}
    assert rows["middle.teacher"].gradients == ()
    teacher = [p.name for p in cost.parameters].index("middle.teacher.weight")
    assert not any(g.needs >> teacher & 1 for g in rows["head"].gradients)


class Short(nn.Module):
    """A causal depthwise convolution as state-space layers write it: pad both ends, cut the tail."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(12, 12, kernel_size=4, groups=12, padding=3)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def test_a_causal_convolution_costs_its_real_tokens():
    (row,) = [row for row in trace(Toy(Short())).rows if row.op == "convolution"]
    # each of 12 channels multiplies 4 inputs
    assert (row.driver, row.forward, [g.flops for g in row.gradients]) == ("tokens", 2 * 12 * 4, [2 * 12 * 4] * 2)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.sound = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 12))
        self.text = nn.Linear(12, 12)

    def forward(self, x, sound=None):
        return self.text(x) if sound is None else self.text(x) + self.sound(sound)


def test_a_tower_that_never_ran_is_listed_as_unknown():
    assert trace(Toy(TwoTowers())).unknown == ("middle.sound (it never ran)",)


class OnWeights(nn.Module):
    """A layer of 8 features beside work that sees no row: `work` makes what the layer's result is scaled with."""

    def __init__(self, work, *sizes):
        super().__init__()
        self.linear, self.work = nn.Linear(8, 8), work
        self.made = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
        self.task, self.of_task = nn.Embedding(3, 4), nn.Linear(4, 8)

    def forward(self, x, *more):
        return self.linear(x) * self.work(self, *more)


ON_WEIGHTS = {
    "a reflected weight": OnWeights(lambda m: (torch.eye(8) - 2 * m.made[0] @ m.made[0].t()).sum(0), (8, 1)),
    "weights of one made vector": OnWeights(lambda m: m.of_task(m.made[0]), (4,)),
    "one row": OnWeights(lambda m: m.of_task(m.made[0]), (1, 4)),
    "several rows": OnWeights(lambda m: m.of_task(m.made[0]).sum(0), (5, 4)),
    "a task that the model picks": OnWeights(lambda m: m.of_task(m.task(torch.tensor([1])))),
    "a task for the batch": OnWeights(lambda m, task: m.of_task(m.task(task))),
    "a time for the batch": OnWeights(lambda m, time: m.of_task(time)),
    "PyTorch's spectral norm": parametrizations.spectral_norm(nn.Linear(8, 8)),
    "PyTorch's weight norm": parametrizations.weight_norm(nn.Linear(8, 8)),
    "PyTorch's orthogonal weight, solved for": parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
    "PyTorch's orthogonal weight, of reflections": parametrizations.orthogonal(
        nn.Linear(8, 8), orthogonal_map="householder"
    ),
}
_FOR_ALL_ROWS = {"a task for the batch": torch.tensor([1]), "a time for the batch": torch.ones(1, 4)}


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_work_that_sees_no_row_is_done_once_for_all_rows(name):
    model, more = ON_WEIGHTS[name].train(), [_FOR_ALL_ROWS[name]] if name in _FOR_ALL_ROWS else []
    cost = trace(model, inputs=lambda workload: (torch.zeros(workload.tokens, 8), *more))
    for rows in (1, 4):
        forward, _ = counted_eagerly(model, (torch.randn(rows, 8), *more))
        # PyTorch's power iteration ends in u . W v, which the counter has no formula for
        forward += 2 * 8 if "spectral" in name else 0
        assert counted(cost, Workload([1] * rows))[0] == forward


class Pooled(nn.Module):
    """A class token, or a recurrence from a state of zeros, and a head on one vector of each text."""

    def __init__(self, body):
        super().__init__()
        self.body, self.token, self.head = body, nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, x):
        if isinstance(self.body, nn.LSTM):
            return self.head(self.body(x)[0][:, -1])
        return self.head(self.body(torch.cat([self.token.expand(len(x), 1, 8), x], 1))[:, 0])


@pytest.mark.parametrize("body", [nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)], ids=["class token", "recurrence"])
def test_work_that_each_row_has_once_is_done_for_each(body):
    model = Pooled(body).train()
    cost = trace(model, inputs=lambda workload: (torch.zeros(1, workload.tokens, 8),))
    for rows in (1, 3):
        assert counted(cost, Workload([5] * rows)) == counted_eagerly(model, (torch.randn(rows, 5, 8),))


def test_a_tower_of_another_width_than_its_tokens_is_told_by_both_widths():
    config = tiny_config("qwen3_vl")
    config.vision_config.out_hidden_size = 24
    with pytest.raises(TraceError, match=r"vision_config.out_hidden_size is 24, and hidden_size of the text is 32\."):
        trace(model_on_shapes(config))
