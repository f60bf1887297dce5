"""The target: a Transformers model that verifies draft trees."""
