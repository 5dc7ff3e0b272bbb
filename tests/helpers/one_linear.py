"""A hand-made cost model that tests of the meter share: one linear layer of 3 x 5, so 30 FLOPs per token and phase."""

from headway.count import CostModel
from headway.count.rows import Gradient, Parameter, Row
from headway.devices import Peak

COST_MODEL = CostModel(
    name="one-linear",
    rows=(
        Row(
            module="layers.0.proj",
            op="linear",
            component="language.mlp",
            driver="tokens",
            forward=30,
            gradients=(Gradient("dgrad", 30, 1), Gradient("wgrad", 30, 1)),
            block="layers.0",
            recomputed=True,
            features=(3, 5),
        ),
    ),
    parameters=(Parameter("layers.0.proj.weight", 15, 15, "language.mlp"),),
)
PEAK = Peak("test device", 1000.0, "fp32", "made up for a test")


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s
