"""Drafting and learning on a GPU: what ``host`` does, as Triton kernels on the same rows.

Four kernels per step: ``propose`` and ``remember`` (one program per row of the batch), ``count``
(one program) and ``learn`` (one program per node and level of rows). Scores are computed in
float32, in ``host`` in float64; nodes of equal scores come in the same order.

Shapes use B rows of a batch, n nodes, k candidates, V tokens in the vocabulary, w slots of a
context, c tokens of a chain and t emitted tokens.
"""
