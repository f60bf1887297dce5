"""Decoding steps that are compiled and captured as graphs."""
