"""Drafting and learning on the host, for NumPy arrays: see ``tree.propose``, ``learn.observe``."""
