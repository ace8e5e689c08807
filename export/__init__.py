"""How it gets fast: ONNX graphs of every network and of the guidance gradient, with their parity proof."""
