"""Attention over draft trees on GPUs."""
