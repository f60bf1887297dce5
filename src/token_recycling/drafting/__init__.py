"""Drafts: what is learnt, the drafters, and the size of their drafts."""
