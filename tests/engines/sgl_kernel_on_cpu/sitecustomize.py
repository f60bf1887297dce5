"""Test fixture, loaded by every Python process that has this folder on its path."""

import importlib.metadata
import importlib.util
import os

if importlib.util.find_spec("torch") is not None:
    import torch

    # Torchvision from PyPI is built for CUDA; its import asks for these operators.
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

# The version that tests pretend is installed, in every process.
if number := os.environ.get("TOKEN_RECYCLING_TEST_VERSION"):
    whole = importlib.metadata.version
    importlib.metadata.version = lambda name: number if name == "sglang" else whole(name)

if os.environ.get("TOKEN_RECYCLING_TEST_WITHOUT"):
    import mutations

    mutations.hide_the_package()
