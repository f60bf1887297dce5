"""Measurement of serving engines with and without the plug-in."""
