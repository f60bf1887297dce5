"""The id that stands where there is no token."""

NO_TOKEN = -1
