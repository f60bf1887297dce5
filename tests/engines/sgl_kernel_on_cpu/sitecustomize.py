"""Test fixture, loaded by every Python process that has this folder on its path."""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    # Torchvision from PyPI is built for CUDA; its import asks for these operators.
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
