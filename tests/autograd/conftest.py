"""Tests of gradients."""

# Imports torch; test_same_gradients_as_torch.py runs it.
collect_ignore = ["torch_gradients.py"]
