"""Made and asked by transformers 4, in a process whose PYTHONPATH has it first: `MAKE FOLDER`, `ASK FOLDER ...`.

Source of the configurations: model cards of Qwen3, Llama 3.1, Gemma 3, Phi-3 and Qwen2.5-VL on the Hub, at toy sizes.
"""

import json
import sys
from pathlib import Path

import torch
import transformers as T
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"type": "longrope", "short_factor": [1.1] * 8, "long_factor": [2.0 + 0.3 * i for i in range(8)]}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
FAMILIES = {
    "qwen3": lambda: T.Qwen3Config(**TEXT, head_dim=16, rope_theta=1e6),
    "llama3": lambda: T.LlamaConfig(**TEXT, rope_theta=5e5, rope_scaling=dict(LLAMA3)),
    "gemma3": lambda: T.Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=16,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3": lambda: T.Phi3Config(**TEXT, original_max_position_embeddings=64, rope_theta=2e4, rope_scaling=dict(LONG)),
    "qwen2_5_vl": lambda: T.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        vision_config={**TOWER, "fullatt_block_indexes": [1], "window_size": 56},
        image_token_id=3,
        video_token_id=4,
    ),
}
CLASSES = {"gemma3": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM", "llama3": "LlamaForCausalLM"}
CLASSES |= {"qwen3": "Qwen3ForCausalLM", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}


def make(root: Path) -> None:
    """Save a small model of each family, with a tokenizer of Qwen's class or the plain one."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet))
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        model = getattr(T, CLASSES[name])(config())
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.2)
        model.save_pretrained(root / name)
        kind = T.Qwen2TokenizerFast if "qwen" in name else T.PreTrainedTokenizerFast
        rest = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": SPECIAL[1:]}
        tokenizer = kind(tokenizer_object=words, chat_template=TEMPLATE, **rest)
        tokenizer.save_pretrained(root / name)
    images = T.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    images._set_processor_class("Qwen2_5_VLProcessor")
    images.save_pretrained(root / "qwen2_5_vl")
    settings = json.loads((root / "qwen2_5_vl/preprocessor_config.json").read_text())
    settings |= {"image_processor_type": None, "video_processor_type": "Qwen2VLVideoProcessor"}
    (root / "qwen2_5_vl/video_preprocessor_config.json").write_text(json.dumps(settings))
    tokens = root / "qwen2_5_vl/tokenizer_config.json"
    tokens.write_text(json.dumps(json.loads(tokens.read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}))


def ask(folder: Path) -> dict[str, object]:
    """What a folder's model and tokenizer answer."""
    config = T.AutoConfig.from_pretrained(folder)
    model = getattr(T, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    tokens_1T = torch.randint(10, 250, (1, 200))
    with torch.no_grad():
        logits = model(input_ids=tokens_1T).logits[0, -1]
    tokenizer = T.AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>hello <|image_pad|>there<|im_end|>"
    answers = {
        "logits": [round(value, 3) for value in logits[:8].tolist()],
        "stops": model.generation_config.eos_token_id,
        "tokenizer": type(tokenizer).__name__,
        "tokens": tokenizer(text)["input_ids"],
        "special": sorted(tokenizer.all_special_tokens),
        "without_special": tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True),
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False),
    }
    if (folder / "preprocessor_config.json").is_file():
        images = T.AutoImageProcessor.from_pretrained(folder)
        answers["pixels"] = [images.min_pixels, images.max_pixels]
    return answers


if __name__ == "__main__":
    assert T.__version__.startswith("4."), T.__version__
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        json.dump([ask(Path(folder)) for folder in sys.argv[2:]], sys.stdout)
