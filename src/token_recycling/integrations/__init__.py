"""Token Recycling inside other software."""
