"""Names on the Hugging Face Hub of models whose cost model ships; what differs between them is only their weights."""

_OWNERS: dict[str, dict[str, tuple[str, ...]]] = {
    "Qwen": {
        "qwen2.5-0.5b": ("Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct"),
        "qwen2.5-1.5b": ("Qwen2.5-1.5B", "Qwen2.5-1.5B-Instruct"),
        "qwen2.5-7b": ("Qwen2.5-7B", "Qwen2.5-7B-Instruct"),
        "qwen2.5-72b": ("Qwen2.5-72B", "Qwen2.5-72B-Instruct"),
        "qwen3-0.6b": ("Qwen3-0.6B", "Qwen3-0.6B-Base"),
        "qwen3-4b": ("Qwen3-4B", "Qwen3-4B-Base"),
        "qwen3-8b": ("Qwen3-8B", "Qwen3-8B-Base"),
        "qwen3-32b": ("Qwen3-32B",),
        "qwen3-30b-a3b": ("Qwen3-30B-A3B", "Qwen3-30B-A3B-Base"),
        "qwen2.5-vl-7b": ("Qwen2.5-VL-7B-Instruct",),
        "qwen3-vl-2b": ("Qwen3-VL-2B-Instruct", "Qwen3-VL-2B-Thinking"),
        "qwen3-vl-4b": ("Qwen3-VL-4B-Instruct", "Qwen3-VL-4B-Thinking"),
        "qwen3-vl-8b": ("Qwen3-VL-8B-Instruct", "Qwen3-VL-8B-Thinking"),
        "qwen3-vl-30b-a3b": ("Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL-30B-A3B-Thinking"),
    },
    "meta-llama": {
        "llama-3.1-8b": ("Llama-3.1-8B", "Llama-3.1-8B-Instruct"),
        "llama-3.1-70b": ("Llama-3.1-70B", "Llama-3.1-70B-Instruct"),
    },
    "mistralai": {
        "mistral-7b-v0.1": ("Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.1"),
        "mixtral-8x7b": ("Mixtral-8x7B-v0.1", "Mixtral-8x7B-Instruct-v0.1"),
    },
    "openai": {"gpt-oss-20b": ("gpt-oss-20b",), "gpt-oss-120b": ("gpt-oss-120b",)},
    "openai-community": {"gpt2": ("gpt2",)},
    "deepseek-ai": {"deepseek-v2-lite": ("DeepSeek-V2-Lite",), "deepseek-v3": ("DeepSeek-V3",)},
}

HUB_NAMES = {
    f"{owner}/{name}": shipped
    for owner, models in _OWNERS.items()
    for shipped, names in models.items()
    for name in names
}
"""The shipped name of each."""
