"""A local server with OpenAI's interface, for one model."""
