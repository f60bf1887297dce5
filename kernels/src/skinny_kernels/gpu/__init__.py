"""Kernels for few tokens on a GPU, in Triton: attention over trees, norms, the cache."""
