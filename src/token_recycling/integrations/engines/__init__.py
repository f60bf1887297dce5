"""Common code of the adapters for serving engines."""
