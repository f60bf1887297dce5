"""A call of Transformers' ``generate``: what it asks for and how it is served."""
