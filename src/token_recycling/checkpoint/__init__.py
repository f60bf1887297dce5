"""Checkpoints: loading a model by name, folder or GGUF file, and fetching a real model."""
