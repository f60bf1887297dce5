"""The decoding loop and its parts."""
