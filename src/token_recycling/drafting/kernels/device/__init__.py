"""Drafting and learning on a GPU: what ``host`` does, as Triton kernels on the same rows.

In a step: ``propose`` (one program per row of the batch), for chains ``likeliest``; after the
forward ``count`` (a program per row and emitted token, then some that calibrate), ``remember`` (per
row; it also extends the text) and ``learn`` (per node and level of rows). The first, ``count`` and
``learn`` have the names of the host's. Scores are computed in float32, in ``host`` in float64;
nodes of equal scores come in the same order.

Shapes use B rows of a batch, n nodes, k candidates, V tokens in the vocabulary, w slots of a
context, c tokens of a chain and t emitted tokens.
"""
