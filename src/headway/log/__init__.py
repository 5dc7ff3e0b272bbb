"""Where numbers go: JSON lines, the live line in a terminal, TensorBoard, Weights & Biases, MLflow, Prometheus."""
