"""torchtitan's rule for FLUX: 6 FLOPs per parameter and token of text and picture together, with two corrections."""

from headway.conventions.architecture import Architecture
from headway.conventions.convention import Parts, Step
from headway.errors import NotExpressibleError


def torchtitan_flux(model: Architecture, step: Step) -> Parts:
    """Bill 6 N' + 6 hidden x row per layer, for every token of text and picture.

    N' leaves out one of the two streams of a double block, since a token passes one, and bills modulation once a
    sample (a row of the configured length); embedders, biases and norms are billed for every token. A layer's attention
    is half of its pairs, though all see each other. Not billed: the autoencoder and the text encoders, which its steps
    run.

    Source: pytorch/torchtitan, torchtitan/models/flux/model/model.py, FluxModel.Config.get_nparams_and_flops, and
    flux/trainer.py, batch_generator (63a80b2be, 30 March 2026, to b5bcd76c6, 21 Aug 2026); 1 FLOP a token before.
    """
    config = model.config
    if model.model_type != "FluxTransformer2DModel" or model.cost_model is None:
        raise NotExpressibleError("torchtitan's rule for FLUX is of FLUX alone")
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    double, single, row = config["num_layers"], config["num_single_layers"], step.seq_len
    # parameters of torchtitan's model, which has no embedder of a guidance scale
    guidance = sum(p.numel for p in model.cost_model.parameters if ".guidance_embedder." in f".{p.name}")
    one_side = 12 * hidden**2 * double  # queries, keys, values and output, and an MLP four times as wide
    modulation = (12 * double + 3 * single + 2) * hidden**2
    per_token = 6 * (model.cost_model.params.total - guidance) - 6 * one_side
    per_token -= 6 * modulation * (row - 1) // row
    tokens = step.workload.tokens + int(step.workload.sources.sum())
    return {"linear": tokens * per_token, "attention": tokens * 6 * hidden * row * (double + single)}
