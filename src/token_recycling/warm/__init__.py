"""Warm rows: rows of the adjacency matrix that the model itself fills before it reads any text."""
