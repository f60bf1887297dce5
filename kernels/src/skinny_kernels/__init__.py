"""Kernels for few tokens on a CPU, for models of Transformers.

PyTorch's kernels are made for one row or for hundreds. These read every weight once for up to 128
tokens, keep GGUF files packed, and round each token as they would round it alone.
"""
