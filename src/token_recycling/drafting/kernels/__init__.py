"""Drafting and learning as compiled loops: for the host (numba) and for GPUs (Triton)."""
