"""Compiled loops of the drafters, for the host."""
