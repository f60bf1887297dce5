"""A decoding step as one graph."""
