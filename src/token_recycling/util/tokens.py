"""The placeholder id for "no token"."""

NO_TOKEN = -1
