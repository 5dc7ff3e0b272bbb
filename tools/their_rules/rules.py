"""The rules that are compared: each convention, the tool's own function at a commit, and how the tool calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.their_rules import configured, counted, launched
from tools.their_rules.checkouts import Source

if TYPE_CHECKING:
    from tools.their_rules.sizes import Make


@dataclass(frozen=True)
class Rule:
    """One convention beside the function that it is held against.

    Attributes:
        convention: name of the package's rule.
        source: where the tool's function stands.
        make: compiles the function, and gives the FLOPs of a case.
        answers: whether it is asked for batches of reinforcement learning too.
    """

    convention: str
    source: Source
    make: Make
    answers: bool = False


_BRIDGE = "src/megatron/bridge/training/utils/flop_utils.py"
_TRAINING = "megatron/training/training.py"
RULES = (
    Rule("megatron-lm", Source("NVIDIA/Megatron-LM", "d98e8a64dd", _TRAINING), launched.megatron_lm(packs=True)),
    Rule(
        "megatron-lm-2026-05", Source("NVIDIA/Megatron-LM", "5e4fc931ba^", _TRAINING), launched.megatron_lm(packs=False)
    ),
    Rule(
        "megatron-bridge",
        Source("NVIDIA-NeMo/Megatron-Bridge", "067f987df", _BRIDGE),
        launched.megatron_bridge(frames=True),
    ),
    Rule(
        "megatron-bridge-2026-05",
        Source("NVIDIA-NeMo/Megatron-Bridge", "46d7e9f4f^", _BRIDGE),
        launched.megatron_bridge(),
    ),
    Rule(
        "megatron-bridge-2025",
        Source("NVIDIA-NeMo/Megatron-Bridge", "a5b3b5a4c", _BRIDGE),
        launched.megatron_bridge(lengths=False),
    ),
    Rule(
        "maxtext",
        Source("AI-Hypercomputer/maxtext", "e591f30cb", "src/maxtext/utils/maxtext_utils.py"),
        launched.maxtext,
    ),
    Rule(
        "maxtext-2026-03",
        Source("AI-Hypercomputer/maxtext", "6288c2333^", "src/maxtext/utils/maxtext_utils.py"),
        launched.maxtext,
    ),
    Rule(
        "maxtext-2025-06",
        Source("AI-Hypercomputer/maxtext", "a4c01726e^", "MaxText/maxtext_utils.py"),
        launched.maxtext,
    ),
    Rule(
        "veomni",
        Source("ByteDance-Seed/VeOmni", "0.1.12", "veomni/utils/count_flops.py"),
        configured.by_lengths(configured.veomni_counter, pictures=True),
    ),
    Rule(
        "veomni-2026-07",
        Source("ByteDance-Seed/VeOmni", "29e65e1c", "veomni/utils/count_flops.py"),
        configured.by_lengths(configured.veomni_counter, pictures=True),
    ),
    Rule(
        "verl",
        Source("verl-project/verl", "0.9.1", "verl/utils/flops_counter.py"),
        configured.by_lengths(configured.verl_counter, pictures=True),
        answers=True,
    ),
    Rule(
        "verl-2025-12",
        Source("verl-project/verl", "02cf355f1", "verl/utils/flops_counter.py"),
        configured.by_lengths(configured.verl_counter, pictures=False),
    ),
    Rule(
        "lmms-engine",
        Source("EvolvingLMMs-Lab/lmms-engine", "0.1.4", "lmms_engine/models/utils.py"),
        configured.by_lengths(configured.lmms_counter, pictures=False),
    ),
    Rule("trl", Source("huggingface/trl", "1.16.0", "trl/trainer/utils.py"), configured.trl(of_text=True)),
    Rule("trl-2026-07", Source("huggingface/trl", "f2cd57710", "trl/trainer/utils.py"), configured.trl()),
    Rule(
        "torchtitan-2026-06",
        Source("pytorch/torchtitan", "0.3.0", "torchtitan/models/utils.py"),
        counted.torchtitan,
    ),
    Rule("nanochat", Source("karpathy/nanochat", "92d63d4", "nanochat/gpt.py"), counted.nanochat),
    Rule(
        "llm-foundry",
        Source("mosaicml/llm-foundry", "8c8dd48f7", "llmfoundry/models/mpt/modeling_mpt.py"),
        counted.llm_foundry,
    ),
    Rule(
        "nemo-automodel",
        Source("NVIDIA-NeMo/Automodel", "0.7.0", "nemo_automodel/components/utils/flops_utils.py"),
        configured.automodel,
    ),
    Rule(
        "nemo-rl",
        Source("NVIDIA-NeMo/RL", "7ea279abf", "nemo_rl/utils/flops_formulas.py"),
        configured.nemo_rl,
        answers=True,
    ),
    Rule("slime", Source("THUDM/slime", "624b824a8", "slime/utils/flops_utils.py"), launched.slime, answers=True),
    Rule("miles", Source("radixark/miles", "31f1ca961", "miles/utils/flops_utils.py"), launched.slime, answers=True),
    Rule(
        "prime-rl",
        Source("PrimeIntellect-ai/prime-rl", "559b44772", "src/prime_rl/trainer/perf.py"),
        configured.prime_rl,
        answers=True,
    ),
)

UNCOMPARED = {
    "useful": "Headway's own",
    "useful-full-head": "Headway's own",
    "hardware": "Headway's own",
    "flop-counter": "PyTorch's own on a GPU, which the sweep of architectures runs by other means",
    "6nd": "transformers' `floating_point_ops`, in the package that the tests install",
    "palm": "nanoGPT's model is not transformers'; its formula is the paper's",
    "torchtitan": "a commit after the newest that was to be had",
    "torchtitan-flux": "of a model that is not transformers', held against its formula written out",
    "torchtitan-2025-12-vlm": "a branch of an experiment, held against its logs",
    "olmo-core": "its numbers are sums over modules of its own, held against a count by hand",
}
