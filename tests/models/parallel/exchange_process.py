"""Run by several processes over gloo: the laws of the exchange, each checked against whole tensors by plain indexing.

Every process draws the same examples. A law holds for all processes or fails for all, so that none waits for another.
"""

import sys

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from headway.models.parallel.exchange import gather_slots, heads_to_tokens, own_heads, split_over, tokens_to_heads
from helpers.cases import examples

TOLERANCE = 1e-12  # float64
EXAMPLES = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=examples(20, 50),
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def agree(holds):
    verdict = torch.tensor(int(holds))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    assert verdict.item() == 1


def close(x, y):
    return x.shape == y.shape and bool((x - y).abs().le(TOLERANCE).all())


def attention(q_THD, k_TKD, v_TKD):
    """Causal attention of PyTorch's own, every query head with the key head it reads."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def drawn(seed, *shape):
    """The same numbers in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@EXAMPLES
@given(
    extra=st.integers(0, 9),
    unit=st.sampled_from([1, 4]),
    key_heads=st.integers(1, 4),
    per_key=st.integers(1, 5),
    size=st.integers(1, 4),
    value_size=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def attention_by_heads_is_attention_of_the_whole(extra, unit, key_heads, per_key, size, value_size, seed):
    group = dist.group.WORLD
    slots, heads = unit * (dist.get_world_size(group) + extra), key_heads * per_key
    split = split_over(group, slots, unit)
    local = split.local()
    shapes = [(slots, heads, size), (slots, key_heads, size), (slots, key_heads, value_size), (heads,)]
    whole = [drawn(seed + i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    mine = [x.detach()[local].clone().requires_grad_() for x in whole[:3]] + [whole[3].detach().requires_grad_()]
    weight = drawn(seed + 4, slots, heads, value_size)

    q, k, v = tokens_to_heads(*mine[:3], split)
    gains = own_heads(mine[3], split)
    own = range(heads)[sum(len(range(heads)[r :: split.degree]) for r in range(split.rank)) :][: q.shape[1]]
    agree(torch.equal(q, whole[0][:, list(own)]))  # earlier processes have one head more where they do not divide
    if own:
        read = [i * k.shape[1] // len(own) for i in range(len(own))]
        agree_keys = all(torch.equal(k[:, j], whole[1][:, head // per_key]) for head, j in zip(own, read, strict=True))
        out = attention(q, k, v) * gains[:, None]
    else:
        agree_keys = k.shape[1] == 0
        out = q.reshape(slots, 0, value_size)
    agree(agree_keys)
    out = heads_to_tokens(out, len(mine[0]), heads, split)
    expected = attention(*whole[:3]) * whole[3][:, None]
    agree(close(out, expected[local]))

    (out * weight[local]).sum().backward()
    (expected * weight).sum().backward()
    agree(all(close(x.grad, y.grad[local]) for x, y in zip(mine[:3], whole[:3], strict=True)))
    gain_grad = torch.zeros_like(whole[3]) if mine[3].grad is None else mine[3].grad
    dist.all_reduce(gain_grad)
    agree(close(gain_grad, whole[3].grad))


@EXAMPLES
@given(extra=st.integers(0, 9), unit=st.sampled_from([1, 4]), width=st.integers(1, 5), seed=st.integers(0, 99))
def gathering_gives_all_slots_and_adds_up_their_gradients(extra, unit, width, seed):
    group = dist.group.WORLD
    slots = unit * (dist.get_world_size(group) + extra)
    split = split_over(group, slots, unit)
    whole = drawn(seed, slots, width)
    mine = whole[split.local()].clone().requires_grad_()
    gathered = gather_slots(mine, split)
    agree(torch.equal(gathered, whole))
    weights = [drawn(seed + 1 + rank, slots, width) for rank in range(split.degree)]
    (gathered * weights[split.rank]).sum().backward()
    agree(close(mine.grad, sum(weights)[split.local()]))


def the_exchange_compiles_once_for_all_lengths():
    group, heads, width = dist.group.WORLD, 3, 20
    weights = [drawn(i, *shape).requires_grad_() for i, shape in enumerate([(width, 12), (width, 4), (12, width)])]

    def layer(x_LC, split):
        q_LHD, k_LKD = (x_LC @ weight for weight in weights[:2])
        q_LHD, k_LKD = q_LHD.view(-1, heads, 4), k_LKD.view(-1, 1, 4)
        q_ThD, k_TkD, v_TkD = tokens_to_heads(q_LHD, k_LKD, 2 * k_LKD, split)
        mixed = q_ThD * k_TkD.mean() + v_TkD.cumsum(0).sum(1, keepdim=True)
        return x_LC + heads_to_tokens(mixed, x_LC.shape[0], heads, split).flatten(1) @ weights[2]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for slots in (101, 102, 164, 237, 90):
        split = split_over(group, slots)
        x_LC = drawn(7, slots, width)[split.local()]
        results = []
        for function in (layer, compiled):
            with torch._dynamo.config.patch(error_on_recompile=slots != 101):
                out = function(x_LC, split)
            results.append([out, *torch.autograd.grad(out.square().sum(), weights)])
        agree(all(torch.allclose(x, y, rtol=TOLERANCE) for x, y in zip(*results, strict=True)))


def numbers_of_every_type_arrive():
    split = split_over(dist.group.WORLD, 11)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        whole = torch.arange(44.0, dtype=dtype).view(11, 4)
        agree(torch.equal(gather_slots(whole[split.local()], split), whole))


def main(compiled):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if compiled:
        the_exchange_compiles_once_for_all_lengths()
    else:
        attention_by_heads_is_attention_of_the_whole()
        gathering_gives_all_slots_and_adds_up_their_gradients()
        numbers_of_every_type_arrive()
    dist.destroy_process_group()


if __name__ == "__main__":
    main("compiled" in sys.argv)
